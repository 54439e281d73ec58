"""The metadata of distributed checkpoints, read without running them."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from datastates.contents.distributed_listing import list_distributed
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError
from datastates.integrity import verify_file
from datastates.manifest import FileRecord

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def folder(tmp_path):
    state = {"model": {"w": torch.randn(300, 7, dtype=torch.float64), "n": torch.tensor(1)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "x")
    return tmp_path / "x"


def test_names_dtypes_and_whole_shapes(folder):
    listing = list_distributed(folder / ".metadata")
    found = [(one.fqn, one.dtype, one.shape, one.nbytes, one.storage) for one in listing.tensors]
    assert found == [
        ("model.w", "float64", (300, 7), 16800, "__0_0.distcp"),
        ("model.n", "int64", (), 8, "__0_0.distcp"),
    ]
    assert [one.fqn for one in listing.values] == ["step"]


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x80\x04N.", id="none"),
        pytest.param(pickle.dumps({"state_dict_metadata": {}}), id="a dictionary"),
        pytest.param(pickle.dumps(torch.Size([1])), id="something else"),
    ],
)
def test_what_is_malformed_is_refused(tmp_path, found):
    path = tmp_path / ".metadata"
    path.write_bytes(found)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        list_distributed(path)


def test_truncations_are_refused(folder):
    path = folder / ".metadata"
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError):
            list_distributed(path)
    path.unlink()
    with pytest.raises(CheckpointNotFoundError):
        list_distributed(path)


def test_damage_in_a_file_of_many_archives_has_a_name(folder):
    path = folder / "__0_0.distcp"
    state = {"model": {"w": torch.zeros(300, 7, dtype=torch.float64)}}
    dcp.load(state, checkpoint_id=folder)
    data = bytearray(path.read_bytes())
    data[data.index(state["model"]["w"][100].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    record = FileRecord("__0_0.distcp", len(data), len(data), (0,))
    problems = verify_file(str(folder), record)
    assert [problem.fqn for problem in problems] == ["model.w"]
