"""The torch format: genuine files for ``torch.load``, true archives for zip tools."""

from __future__ import annotations

import io
import pathlib
import pickletools
import shutil
import struct
import subprocess
import zipfile

import pytest
import torch
from contract import FormatContract, lazy, pytestmark  # noqa: F401
from images import image_of

from datastates.checksum import crc32
from datastates.errors import StateError
from datastates.formats import plan
from datastates.formats.image import Block, ImageBuilder
from datastates.formats.zip_image import ZipImage
from datastates.plan import FilePlan
from datastates.state import capture_host, default_is_eager


def _state() -> dict[str, object]:
    weight = torch.randn(600, 600)
    return {
        "weight": weight,
        "row": weight[3],
        "transposed": weight.t(),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(1000),
        "every": torch.arange(20.0)[::3],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "step": torch.tensor(3.0),
        "empty": torch.empty(3, 0),
    }


class TestTorchZip(FormatContract):
    format = "torch"
    suffix = ".pt"

    def test_torch_opens_it_in_every_mode(self, tmp_path: pathlib.Path) -> None:
        state = _state()
        path = self.write(tmp_path, state, default_is_eager(64))
        for options in ({}, {"mmap": True}, {"weights_only": False}, {"map_location": "cpu"}):
            loaded = torch.load(path, **options)
            for name, tensor in state.items():
                assert loaded[name].dtype is tensor.dtype
                assert torch.equal(loaded[name], tensor), name

    def test_meta_and_computed_offsets(self, tmp_path: pathlib.Path) -> None:
        """torch may compute where storages lie from the first one; for our order it must read the headers."""
        state = {"large": torch.arange(400_000.0), "small": torch.tensor(5), "last": torch.arange(300_000.0)}
        path = self.write(tmp_path, state, default_is_eager(64))
        data = pathlib.Path(path).read_bytes()
        with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
            loaded = torch.load(path, mmap=True)
        assert torch.equal(loaded["small"], state["small"])
        assert torch.equal(loaded["last"], state["last"])
        for name, tensor in torch.load(path, map_location="meta").items():
            begin = tensor.untyped_storage()._checkpoint_offset
            assert data[begin : begin + 8] == bytes(capture_host(state[name]))[:8]

    def test_zip_tools_verify_it(self, tmp_path: pathlib.Path) -> None:
        path = self.write(tmp_path, _state(), default_is_eager(64))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        unzip = shutil.which("unzip")
        if unzip is not None:
            result = subprocess.run([unzip, "-tq", path], capture_output=True, text=True, check=False)
            assert (result.returncode, result.stderr) == (0, "")

    def test_a_flipped_bit_is_found_by_its_checksum(self, tmp_path: pathlib.Path) -> None:
        made = self.plan({"t": torch.arange(4000)})
        image = bytearray(image_of(made))
        segment = next(one for one in made.segments if not one.is_literal)
        image[segment.begin + 100] ^= 1
        with zipfile.ZipFile(io.BytesIO(image)) as archive:
            assert archive.testzip() == "archive/data/0"

    def test_same_records_as_torch(self, tmp_path: pathlib.Path) -> None:
        state = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)}
        theirs = io.BytesIO()
        torch.save(state, theirs)
        with zipfile.ZipFile(theirs) as expected, zipfile.ZipFile(self.write(tmp_path, state)) as found:
            assert found.namelist() == expected.namelist()
            for name in expected.namelist():
                if name.rpartition("/")[2] not in (".format_version", "serialization_id"):
                    assert found.read(name) == expected.read(name), name
            assert len(found.read("archive/.data/serialization_id")) == 40
            assert {one.flag_bits for one in found.infolist()} == {0x0808}

    def test_data_is_aligned(self) -> None:
        made = self.plan({"page": torch.zeros(1 << 20, dtype=torch.uint8), "line": torch.zeros(5, dtype=torch.uint8)})
        begins = {one.fqn: one.begin for one in made.segments if not one.is_literal}
        assert begins["page"] % 4096 == 0
        assert begins["line"] % 64 == 0

    def test_views_share_again(self, tmp_path: pathlib.Path) -> None:
        loaded = self.round_trip(tmp_path, _state())
        loaded["weight"][3, 0] = 77.0
        assert loaded["row"][0] == 77.0
        assert loaded["transposed"][0, 3] == 77.0

    def test_disjoint_slices_part(self, tmp_path: pathlib.Path) -> None:
        flat = torch.arange(10.0)
        loaded = self.round_trip(tmp_path, {"a": flat[:5], "b": flat[5:]})
        assert loaded["a"].untyped_storage().nbytes() == 20
        assert loaded["a"].untyped_storage()._cdata != loaded["b"].untyped_storage()._cdata

    def test_strides_are_kept_where_no_hole_is(self, tmp_path: pathlib.Path) -> None:
        state = _state()
        loaded = self.round_trip(tmp_path, state)
        for name in ("transposed", "image", "expanded", "row"):
            assert loaded[name].stride() == state[name].stride(), name
        assert loaded["expanded"].untyped_storage().nbytes() == 4
        assert loaded["every"].untyped_storage().nbytes() == 7 * 4

    def test_views_of_two_dtypes_share_again(self, tmp_path: pathlib.Path) -> None:
        raw = torch.arange(64, dtype=torch.uint8)
        state = {"bytes": raw[3:20], "floats": raw.view(torch.float32)[2:6], "halves": raw.view(torch.int16)[9:12]}
        loaded = self.round_trip(tmp_path, state)
        loaded["floats"].view(torch.uint8)[0] = 200  # byte 8 of the storage
        assert loaded["bytes"].tolist() == [3, 4, 5, 6, 7, 200, *range(9, 20)]
        assert torch.equal(loaded["halves"], state["halves"])

    def test_views_inside_one_object_share_again(self, tmp_path: pathlib.Path) -> None:
        class_state = torch.nn.Module()
        class_state.row = torch.arange(6.0)[2:4]
        class_state.whole = torch.nn.Parameter(torch.zeros(1))
        class_state.all = class_state.row._base
        loaded = self.round_trip(tmp_path, {"m": class_state})["m"]
        loaded.all[2] = 50.0
        assert loaded.row.tolist() == [50.0, 3.0]

    def test_typed_storage(self, tmp_path: pathlib.Path) -> None:
        tensor = torch.arange(5, dtype=torch.int32)
        loaded = self.round_trip(tmp_path, {"s": tensor._typed_storage(), "t": tensor[1:3]})
        assert loaded["s"].dtype is torch.int32
        loaded["s"]._untyped_storage[4] = 9
        assert loaded["t"].tolist() == [9, 2]

    def test_typed_storage_shared_with_another_dtype_is_refused(self) -> None:
        tensor = torch.arange(4, dtype=torch.int32)
        with pytest.raises(StateError, match="shared with tensors of another dtype"):
            self.plan({"t": tensor.view(torch.uint8), "s": tensor._typed_storage()})

    def test_a_list_that_contains_itself(self, tmp_path: pathlib.Path) -> None:
        state: list[object] = [torch.ones(2)]
        state.append(state)
        loaded = self.round_trip(tmp_path, state)
        assert loaded[1] is loaded

    def test_the_pickle_names_nothing_of_this_package(self) -> None:
        state = _state() | {"b": torch.nn.Buffer(torch.ones(2)), "sparse": torch.eye(2).to_sparse()}
        with zipfile.ZipFile(io.BytesIO(image_of(self.plan(state)))) as archive:
            operations = list(pickletools.genops(archive.read("archive/data.pkl")))
        names = [argument for operation, argument, _ in operations if operation.name == "GLOBAL"]
        assert names
        assert not [name for name in names if "datastates" in name]

    def test_equal_states_give_equal_files(self) -> None:
        first, second = (image_of(self.plan({"a": torch.ones(3), "n": [1, {"x": 2}]})) for _ in range(2))
        assert first == second


def _write_sparse(path: pathlib.Path, made: FilePlan) -> None:
    """Literal bytes only; tensors are left as holes."""
    with path.open("wb") as file:
        file.truncate(made.nbytes)
        for segment in made.segments:
            if not isinstance(segment.source, torch.Tensor):
                file.seek(segment.begin)
                file.write(segment.source)


def test_sizes_and_offsets_beyond_four_gibibytes(tmp_path: pathlib.Path) -> None:
    nbytes = (4 << 30) + 4097
    state = {"huge": torch.empty(nbytes, dtype=torch.uint8), "after": torch.arange(5.0)}
    made = plan(state, "torch", capture_host, lazy)
    path = tmp_path / "huge.pt"
    _write_sparse(path, made)
    after = next(one for one in made.segments if one.fqn == "after")
    assert after.begin > 1 << 32
    with path.open("r+b") as file:
        file.seek(after.begin)
        file.write(capture_host(state["after"]))
        for seal in made.seals:
            if seal.begin == after.begin:
                file.seek(seal.offset)
                file.write(crc32(capture_host(state["after"])).to_bytes(4, "little"))
        huge = next(one for one in made.segments if one.fqn == "huge")
        file.seek(huge.end)
        assert file.read(24) == b"PK\7\x08" + bytes(4) + struct.pack("<QQ", nbytes, nbytes)
    loaded = torch.load(path, mmap=True)
    assert torch.equal(loaded["after"], state["after"])
    assert loaded["huge"].shape == (nbytes,)
    with zipfile.ZipFile(path) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
        assert sizes["archive/data/0"] == nbytes
        assert archive.read("archive/data/1") == bytes(capture_host(state["after"]))
    unzip = shutil.which("unzip")
    if unzip is not None:
        command = [unzip, "-tq", str(path), "archive/data/1", "archive/version", "archive/data.pkl"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_more_entries_than_sixteen_bits_count() -> None:
    image = ImageBuilder()
    archive = ZipImage(image)
    for index in range(65_536):
        archive.add(f"archive/data/{index}", Block(1, b"x", ""), 64)
    archive.add("archive/version", Block(2, b"3\n", ""), 64)
    archive.finish()
    made = FilePlan("torch", image.nbytes, image.segments(), image.seals())
    data = io.BytesIO(image_of(made))
    with zipfile.ZipFile(data) as found:
        assert len(found.namelist()) == 65_537
        assert found.read("archive/data/65535") == b"x"
    data.seek(0)
    reader = torch._C.PyTorchFileReader(data)
    assert len(reader.get_all_records()) == 65_537
    assert reader.get_record("data/65535") == b"x"
