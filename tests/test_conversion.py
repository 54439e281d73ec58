"""Conversions between formats: {torch, safetensors, DCP, Hugging Face} x {read by us, read by their owners}."""

from __future__ import annotations

import collections
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from datastates import CheckpointEngine, load
from datastates.cli import main
from datastates.cli.exit_codes import exit_code_of
from datastates.conversion import (
    convert_to_distributed,
    convert_to_huggingface,
    convert_to_safetensors,
    convert_to_torch,
    convert_to_weights,
)
from datastates.conversion.huggingface import parse_size
from datastates.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    ForeignObjectError,
    StateError,
    StorageError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def weights() -> dict[str, torch.Tensor]:
    """Flat, as every format can hold it; names with dots; dtypes of one, two, four and eight bytes; odd shapes."""
    matrix = torch.arange(12.0).view(3, 4)
    return {
        "embed.weight": matrix,
        "a.transposed": torch.arange(6.0).view(2, 3).t(),
        "a.slice": torch.arange(100, dtype=torch.bfloat16)[10:30:2],
        "eight": torch.arange(5.0).to(torch.float8_e4m3fn),
        "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "double": torch.tensor([1e-300, float("nan")], dtype=torch.float64),
        "head.weight": matrix,
    }


def nested() -> dict[Any, Any]:
    """What only the formats of files can hold: keys of any type, tuples, objects of the standard library."""
    return {
        "model": weights(),
        1: {"step": torch.tensor(3.0), "1": None},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}, ()],
        "ordered": collections.OrderedDict(x=torch.ones(2, dtype=torch.int16)),
        "raw": b"\0\1",
        "empty": {},
    }


def assert_equal(found: Any, expected: Any, *, is_nested: bool = True) -> None:
    """Equal to the last bit, in values, types and keys; ``is_nested`` False: all but the types of containers."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        one, other = (tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected))
        assert torch.equal(one, other)
        return
    if isinstance(expected, dict):
        assert list(found) == list(expected) if is_nested else set(found) == set(expected)
        assert not is_nested or type(found) is type(expected)
        for key in expected:
            assert_equal(found[key], expected[key], is_nested=is_nested)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, is_nested=is_nested)
    else:
        assert type(found) is type(expected) and found == expected


def write(kind: str, state: Any, path: Path) -> Path:
    """Write a state as the owner of a format does, or as we do."""
    if kind == "torch":
        torch.save(state, path)
    elif kind == "safetensors":
        safetensors.torch.save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, path)
    elif kind == "dcp":
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    elif kind == "hf":
        path.mkdir()
        names = list(state)
        shards = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
        for name, part in shards.items():
            write("safetensors", {one: state[one] for one in part}, path / name)
        index = {one: name for name, part in shards.items() for one in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        with CheckpointEngine({"host_cache_size": 2**-8}) as engine:
            engine.save(state, str(path))
    return path


def read_by_owner(kind: str, path: Path) -> dict[str, torch.Tensor]:
    if kind == "torch":
        return torch.load(path, weights_only=True)
    if kind == "safetensors":
        return safetensors.torch.load_file(path)
    if kind == "hf":
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        files = {name: safetensors.torch.load_file(path / name) for name in set(index.values())}
        return {name: files[file][name] for name, file in index.items()}
    dcp_to_torch_save(path, path.parent / "by_owner.pt")
    return torch.load(path.parent / "by_owner.pt", weights_only=True)


def read_by_us(kind: str, path: Path, folder: Path) -> dict[str, torch.Tensor]:
    if kind in ("torch", "safetensors"):
        return load(path)
    convert_to_torch(path, folder / "back.pt")
    return load(folder / "back.pt")


CONVERT = {
    "torch": convert_to_torch,
    "safetensors": convert_to_safetensors,
    "dcp": convert_to_distributed,
    "hf": lambda source, out: convert_to_huggingface(source, out, max_shard_bytes=100),
}
SUFFIX = {"torch": ".pt", "safetensors": ".safetensors", "dcp": "", "hf": ""}


@pytest.mark.parametrize("target", list(CONVERT))
@pytest.mark.parametrize("source", list(CONVERT))
def test_every_format_becomes_every_other_one(tmp_path, source, target):
    state = weights()
    begun = write(source, state, tmp_path / f"begun{SUFFIX[source]}")
    out = tmp_path / f"out{SUFFIX[target]}"
    CONVERT[target](begun, out)
    keeps_ties = source == "torch"  # the others store tied weights twice
    by_owner, by_us = read_by_owner(target, out), read_by_us(target, out, tmp_path)
    first_names = {name: state[name] for name in state if name != "head.weight"}
    drops_second_name = keeps_ties and target in ("safetensors", "hf")
    assert_equal(by_owner, first_names if drops_second_name else state, is_nested=False)
    assert_equal(by_us, first_names if keeps_ties and target == "hf" else state, is_nested=False)
    if keeps_ties and target == "safetensors":
        assert by_us["head.weight"].data_ptr() == by_us["embed.weight"].data_ptr()


@pytest.mark.parametrize("there", [".pt", ".safetensors"])
def test_a_state_comes_back_as_it_was(tmp_path, there):
    """Ours and stock torch files, to the other format and back."""
    state = nested()
    begun = write("ours" if there == ".pt" else "torch", state, tmp_path / "begun.pt")
    convert_to_safetensors(begun, tmp_path / "between.safetensors")
    convert_to_torch(tmp_path / "between.safetensors", tmp_path / "back.pt")
    for found in (load(tmp_path / "between.safetensors"), torch.load(tmp_path / "back.pt", weights_only=True)):
        assert_equal(found, state)
        assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()


def test_files_without_a_directory_are_converted_too(tmp_path):
    state = nested()
    del state["model"]["eight"]  # torch itself cannot load it from there
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    convert_to_torch(tmp_path / "old.pt", tmp_path / "new.pt")
    convert_to_safetensors(tmp_path / "old.pt", tmp_path / "new.safetensors")
    assert_equal(torch.load(tmp_path / "new.pt", weights_only=True, mmap=True), state)
    assert_equal(load(tmp_path / "new.safetensors"), state)


def test_lists_and_values_in_a_distributed_checkpoint(tmp_path):
    """Ours is loaded in place by the stock library, and comes back."""
    state = {"model": {"w": torch.arange(12.0).view(3, 4)}, "list": [torch.ones(2), {"lr": 0.1}], "step": 5}
    torch.save(state, tmp_path / "a.pt")
    convert_to_distributed(tmp_path / "a.pt", tmp_path / "dcp")
    target = {"model": {"w": torch.zeros(3, 4)}, "list": [torch.zeros(2), {"lr": 0.0}], "step": 0}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(target, state)
    convert_to_safetensors(tmp_path / "dcp", tmp_path / "back.safetensors")
    assert_equal(load(tmp_path / "back.safetensors"), state, is_nested=False)


def change_metadata(folder: Path, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def as_chunks(metadata: Metadata) -> None:
    """What was saved as "begin" and "end" becomes two chunks of "w", as two ranks would have saved them."""
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    chunks = [ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((2, 3))) for first in (0, 2)]
    entries["w"] = TensorStorageMetadata(entries["begin"].properties, torch.Size((4, 3)), chunks)
    for first, name in ((0, "begin"), (2, "end")):
        places[MetadataIndex("w", (first, 0))] = places.pop(MetadataIndex(name, (0, 0)))
        del entries[name]
    metadata.planner_data = {"w": ("model", "w")}


def test_tensors_in_chunks_are_put_together(tmp_path):
    whole = torch.arange(12.0).view(4, 3)
    write("dcp", {"begin": whole[:2].clone(), "end": whole[2:].clone()}, tmp_path / "in")
    change_metadata(tmp_path / "in", as_chunks)
    convert_to_safetensors(tmp_path / "in", tmp_path / "out.safetensors")
    assert_equal(load(tmp_path / "out.safetensors"), {"model": {"w": whole}})
    change_metadata(tmp_path / "in", lambda metadata: metadata.state_dict_metadata["w"].chunks.pop())
    with pytest.raises(CorruptCheckpointError, match="the chunks of w do not cover it"):
        convert_to_torch(tmp_path / "in", tmp_path / "out.pt")


# ------------------------------------------------------------------------------------------------- folders


def test_a_folder_is_converted_file_by_file(tmp_path):
    source = tmp_path / "run" / "step1"
    (source / "more").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("step1")
    write("torch", nested(), source / "a.pt")
    write("torch", {"w": torch.ones(2)}, source / "more" / "mp_rank_00_model_states.pt")
    (source / "notes.json").write_text("{}")
    done = convert_to_safetensors(tmp_path / "run", tmp_path / "out")
    assert (done.num_items, done.num_kept) == (3, 0)
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert found == ["a.safetensors", "more/mp_rank_00_model_states.pt", "notes.json"]
    assert_equal(load(tmp_path / "out" / "a.safetensors"), nested())
    assert_equal(load(tmp_path / "out" / "more" / "mp_rank_00_model_states.pt"), {"w": torch.ones(2)})
    convert_to_torch(tmp_path / "out", tmp_path / "back")
    assert_equal(torch.load(tmp_path / "back" / "a.pt", weights_only=True), nested())
    assert (tmp_path / "back" / "notes.json").read_text() == "{}"


class StopError(Exception):
    """Ends a conversion in the middle."""


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_copied_file_is_kept_by_the_next_conversion_unless_it_has_changed(tmp_path, is_changed):
    (tmp_path / "in").mkdir()
    write("torch", {"w": torch.zeros(5000)}, tmp_path / "in" / "large.pt")
    write("torch", {"w": torch.zeros(5)}, tmp_path / "in" / "small.pt")
    large_nbytes = (tmp_path / "in" / "large.pt").stat().st_size

    def stop(done: int, _: int) -> None:
        if done > large_nbytes:
            raise StopError

    with pytest.raises(StopError):
        convert_to_torch(tmp_path / "in", tmp_path / "out", num_workers=1, progress=stop)
    assert not (tmp_path / "out").exists()
    if is_changed:
        write("torch", {"w": torch.ones(5000)}, tmp_path / "in" / "large.pt")
    done = convert_to_torch(tmp_path / "in", tmp_path / "out", num_workers=1)
    assert done.num_kept == (0 if is_changed else 1)
    assert_equal(load(tmp_path / "out" / "large.pt"), {"w": torch.full((5000,), float(is_changed))})


def test_a_damaged_file_in_a_folder_is_not_copied(tmp_path):
    (tmp_path / "in").mkdir()
    write("torch", {"w": torch.zeros(5000)}, tmp_path / "in" / "a.pt")
    content = bytearray((tmp_path / "in" / "a.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "in" / "a.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
        convert_to_torch(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_two_files_that_would_get_one_name_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    write("torch", weights(), tmp_path / "in" / "a.pt")
    write("torch", weights(), tmp_path / "in" / "a.bin")
    with pytest.raises(StorageError, match=r"a\.bin and a\.pt would both be a\.safetensors"):
        convert_to_safetensors(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


# ------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_are_found_under_their_usual_names_and_cast(tmp_path, suffix):
    torch.save({"epoch": 3, "state_dict": weights(), "optimizer": {"state": {0: torch.ones(9)}}}, tmp_path / "a.pt")
    done = convert_to_weights(tmp_path / "a.pt", tmp_path / f"out{suffix}", torch.bfloat16)
    assert done.num_items == len(weights())
    expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights().items()}
    found = load(tmp_path / f"out{suffix}")
    assert_equal(found, expected)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_weights_by_key(tmp_path):
    state = {"a": {"ema": {"w": torch.ones(2)}, "raw": {"w": torch.zeros(2)}}, "b": {"w": torch.zeros(3)}}
    torch.save(state, tmp_path / "a.pt")
    convert_to_weights(tmp_path / "a.pt", tmp_path / "out.pt", key="a.ema")
    assert_equal(torch.load(tmp_path / "out.pt", weights_only=True), {"w": torch.ones(2)})
    with pytest.raises(StateError, match=r"which tensors are the weights.*one of a, b"):
        convert_to_weights(tmp_path / "a.pt", tmp_path / "none.pt")
    with pytest.raises(StateError, match=r"'a\.emo' is no dictionary.*'a\.ema'"):
        convert_to_weights(tmp_path / "a.pt", tmp_path / "none.pt", key="a.emo")


def test_shards_are_filled_and_named_as_hugging_face_does(tmp_path):
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(5)}
    state["big"] = torch.ones(100)
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    convert_to_huggingface(tmp_path / "a.pt", tmp_path / "out", max_shard_bytes=80)
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", *names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 150, "total_size": 600}
    assert [index["weight_map"][name] for name in ("w0", "w1", "w2", "w4", "big")] == [
        names[i] for i in (0, 0, 1, 2, 3)
    ]
    with safetensors.safe_open(tmp_path / "out" / names[0], "pt") as file:
        assert (file.metadata(), sorted(file.keys())) == ({"format": "pt"}, ["w0", "w1"])
    with pytest.raises(CheckpointNotFoundError, match=r"no file .*none\.json"):
        convert_to_huggingface(tmp_path / "a.pt", tmp_path / "other", config=tmp_path / "none.json")


# ------------------------------------------------------------------------------------------------- safety


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


class Plain:
    """An object that is no plain data."""


@pytest.mark.parametrize("convert", [convert_to_torch, convert_to_safetensors, convert_to_distributed])
def test_no_code_is_run_unless_trusted(tmp_path, monkeypatch, convert):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": Evil()}, "evil.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(2), "x": Plain()}, "plain.pt")
    if convert is not convert_to_torch:  # which copies torch files as they are
        with pytest.raises(ForeignObjectError, match=r"x holds .*Plain.*--trust"):
            convert("plain.pt", "out.bin")
        convert("plain.pt", "trusted.bin", trust=True)
    with pytest.raises(pickle.UnpicklingError):
        convert("evil.pt", "out.bin")
    assert not {"executed", "out.bin"} & set(os.listdir(tmp_path))


def test_the_metadata_of_a_distributed_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("dcp", weights(), tmp_path / "in")
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ForeignObjectError, match=r"\.metadata: it refers to posix\.mkdir"):
        convert_to_torch(tmp_path / "in", tmp_path / "out.pt")
    assert not (tmp_path / "executed").exists()


def test_an_object_in_a_distributed_checkpoint_is_named(tmp_path):
    write("dcp", {"w": torch.ones(2), "x": Plain()}, tmp_path / "in")
    with pytest.raises(ForeignObjectError, match=r"in: x is more than plain data.*--trust"):
        convert_to_torch(tmp_path / "in", tmp_path / "out.pt")
    convert_to_torch(tmp_path / "in", tmp_path / "out.pt", trust=True)
    assert isinstance(load(tmp_path / "out.pt", weights_only=False)["x"], Plain)


@pytest.mark.parametrize("convert", list(CONVERT.values()), ids=list(CONVERT))
def test_a_flipped_byte_is_not_carried_on(tmp_path, convert):
    state = {"w": torch.arange(1000.0)}
    path = write("ours", state, tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    position = data.index(state["w"].numpy().tobytes())
    data[position + 2001] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt: w is damaged"):
        convert(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.pt"]


def with_shape_of(size: int):
    return lambda metadata: setattr(metadata.state_dict_metadata["mask"], "size", torch.Size((size, size)))


def with_path_of(index: int):
    return lambda metadata: metadata.planner_data.update(mask=("mask", index))


def with_file_of(name: str):
    return lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", name)


def flip_byte_of(folder: Path, tensor: torch.Tensor) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 5] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "cannot be read"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 3000), "cannot be read"),
        (lambda folder: flip_byte_of(folder, weights()["double"]), "double cannot be read: Bad CRC-32"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04N."), "it is a NoneType|NoneType"),
        (lambda folder: os.truncate(folder / ".metadata", 30), "metadata cannot be read"),
        (lambda folder: change_metadata(folder, with_shape_of(1 << 60)), "mask cannot have shape"),
        (lambda folder: change_metadata(folder, with_path_of(1 << 40)), "mask has no place in a list"),
        (lambda folder: change_metadata(folder, with_file_of("../other")), "names '../other', no file in the folder"),
    ],
)
def test_a_damaged_distributed_checkpoint_is_refused(tmp_path, damage, words):
    write("dcp", weights(), tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(CorruptCheckpointError, match=words):
        convert_to_torch(tmp_path / "in", tmp_path / "out.pt")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", ".hidden"])
def test_an_index_names_nothing_outside_of_its_folder(tmp_path, name):
    write("hf", weights(), tmp_path / "in")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CorruptCheckpointError, match="no file beside it"):
        convert_to_torch(tmp_path / "in", tmp_path / "out.pt")


# ----------------------------------------------------------------------------------------- whole or not at all


@pytest.mark.parametrize("target", list(CONVERT))
def test_what_is_there_stays_unless_forced(tmp_path, target):
    begun, out = write("torch", weights(), tmp_path / "a.pt"), tmp_path / "out"
    out.write_text("older")
    arguments = ["convert", "--to", target, str(begun), str(out)]
    refused = CliRunner().invoke(main, arguments)
    assert (refused.exit_code, refused.stderr.count("\n")) == (exit_code_of(StorageError("")), 1)
    assert "is there already" in refused.stderr and out.read_text() == "older"
    if target in ("torch", "safetensors"):  # for them a file may be replaced, and a folder not
        assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0
        assert_equal(load(out), weights())
    else:
        assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0
        assert out.is_dir()
        assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0, "a folder, too"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "out"]


def test_the_source_is_never_replaced(tmp_path):
    (tmp_path / "in").mkdir()
    begun = write("torch", weights(), tmp_path / "in" / "a.pt")
    for out in (begun, tmp_path / "in"):
        with pytest.raises(StorageError, match="is, or holds, the source"):
            convert_to_safetensors(begun, out, force=True)
    with pytest.raises(StorageError, match="lies in the source"):
        convert_to_safetensors(tmp_path / "in", tmp_path / "in" / "out")
    assert_equal(torch.load(begun, weights_only=True), weights())


KILLED = """
import json, os, signal, sys
import datastates.cli.convert
from datastates.cli import main
from datastates.universal import mapped_files
blocks = mapped_files.MappedFiles.blocks
def killed(self, tensor):
    if tensor.numel() == 77:
        os.kill(os.getpid(), signal.SIGKILL)
    return blocks(self, tensor)
mapped_files.MappedFiles.blocks = killed
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        main(arguments)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.leaves_partial_files
def test_a_kill_leaves_no_half_result_and_the_next_conversion_clears_up(tmp_path, run_script):
    state = {**weights(), "last": torch.ones(77)}
    begun, stock = (write(kind, state, tmp_path / kind) for kind in ("torch", "safetensors"))
    outs = {target: tmp_path / f"to {target}" / "out" for target in CONVERT}
    sources = {target: stock if target == "torch" else begun for target in CONVERT}  # torch files would be copied
    calls = {target: ["convert", "--to", target, str(sources[target]), str(out)] for target, out in outs.items()}
    assert run_script(KILLED, json.dumps(list(calls.values()))).stdout.split() == [str(-signal.SIGKILL)] * len(calls)
    for target, out in outs.items():
        assert not out.exists() and os.listdir(out.parent), "something was begun"
        again = CliRunner().invoke(main, calls[target])
        assert again.exit_code == 0, again.output
        assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("layout", ["dcp", "fp32", "hf", "safetensors", "torch"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, small_disk, layout):
    torch.save({f"w{n}": torch.ones(100_000) for n in range(8)}, tmp_path / "in.pt")
    disk = small_disk(1 << 20)
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "in.pt"), str(disk / "out"), "--to", layout])
    assert done.exit_code == 9, done.output
    assert done.stderr.count("\n") == 1 and str(disk) in done.stderr
    assert os.listdir(disk) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "torch", "text", "out"], "neither a torch.save file nor safetensors"),
        (["--to", "dcp", "tensor.pt", "out"], "holds a Tensor: a distributed checkpoint needs a dictionary"),
        (["--to", "dcp", "double.pt", "out"], "two leaves have one name in a distributed checkpoint"),
        (["--to", "hf", "words.pt", "out"], "it cannot be told which tensors are the weights"),
        (["--to", "hf", "odd.pt", "out"], "w: safetensors has no dtype torch.complex128"),
        (["--to", "hf", "half.pt", "out"], "'\\udc80' cannot be the name of a tensor in a safetensors file"),
        (["--to", "hf", "taken.pt", "out"], "'__metadata__' cannot be the name of a tensor in a safetensors file"),
        (["--to", "hf", "w.pt", "out", "--max-shard-size", "5 apples"], "'5 apples' is no size"),
        (["--to", "fp32", "several", "out"], "several holds 2 states, name the file that is meant: a.pt, b.pt"),
        (["--to", "fp32", "nothing", "out"], "holds no file"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("some text")
    for name in ("several", "nothing"):
        Path(name).mkdir()
    states = {
        "tensor.pt": torch.ones(2),
        "double.pt": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
        "words.pt": {"words": "none"},
        "odd.pt": {"w": torch.ones(2, dtype=torch.complex128)},
        "w.pt": {"w": torch.ones(2)},
        "half.pt": {"\udc80": torch.ones(2)},
        "taken.pt": {"__metadata__": torch.ones(2)},
        "several/a.pt": {"w": torch.ones(2)},
        "several/b.pt": {"w": torch.ones(2)},
    }
    for name, state in states.items():
        torch.save(state, name)
    before = sorted(os.listdir())
    done = CliRunner().invoke(main, ["convert", *arguments])
    assert words in done.stderr and done.stderr.count("\n") == 1, done.output
    assert done.exit_code not in (0, 70)
    assert sorted(os.listdir()) == before


def test_options_that_mean_nothing_are_refused(tmp_path):
    write("torch", weights(), tmp_path / "a.pt")
    done = CliRunner().invoke(main, ["convert", "--to", "torch", str(tmp_path / "a.pt"), "out", "--dtype", "bf16"])
    assert done.exit_code == 2
    assert "--dtype means nothing for --to torch, only for hf" in done.stderr


def test_memory_does_not_grow_with_the_state(tmp_path, run_script):
    """144 MiB of tensors, some with other strides (of which the mapped file counts), through each kind of file."""
    rows = torch.arange(32 << 20, dtype=torch.float32).view(4096, -1)
    torch.save({"plain": rows, "turned": rows[:, :1024].clone().t()}, tmp_path / "a.pt")
    done = run_script(
        "import resource, sys\n"
        "from datastates.conversion import convert_to_safetensors, convert_to_huggingface, convert_to_weights\n"
        "import torch\n"
        "begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "folder = sys.argv[1]\n"
        "convert_to_safetensors(folder + '/a.pt', folder + '/a.safetensors')\n"
        "convert_to_weights(folder + '/a.pt', folder + '/b.safetensors', torch.bfloat16)\n"
        "convert_to_huggingface(folder + '/a.pt', folder + '/hf', max_shard_bytes=1 << 25)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) >> 10)\n",
        str(tmp_path),
    )
    assert int(done.stdout) < 64, "MiB beyond what was there before"
    found = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert torch.equal(found["turned"], rows[:, :1024].t().bfloat16())


def test_sizes_are_read_as_hugging_face_writes_them():
    found = [parse_size(text) for text in ("5GB", "1.5 MB", "2GiB", "100", "3kb")]
    assert found == [5 * 10**9, 1_500_000, 2 << 30, 100, 3000]
    for text in ("", "5 apples", "-1GB", "0GB"):
        with pytest.raises(ConfigError, match="is no size"):
            parse_size(text)
