"""A pipeline of more than a hundred layers, saved every few steps, killed and resumed; two real processes, gloo."""

from __future__ import annotations

import json
import re

import pytest
import torch

from datastates import integrity
from datastates.manifest import read_commit

RUN = "integrations.pipeline_runs:train"
NUM_LAYERS = 102


@pytest.mark.leaves_partial_files
def test_a_loop_with_a_save_interval_is_killed_and_resumed_with_every_layer_in_its_own_file(fork_server, tmp_path):
    job = fork_server.start(RUN, tmp_path, 7, 3, True, folder=tmp_path)
    job.wait_announced(90)
    job.kill()
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "latest").read_text() == "global_step6"
    directory = checkpoints / "global_step6"
    assert integrity.verify(str(directory)) == []
    check_layers(directory, tmp_path)
    fork_server.start(RUN, tmp_path, 8, 100, False, folder=tmp_path).wait(90)
    for rank in range(2):
        first, resumed = (
            json.loads((tmp_path / f"losses-{name}-{rank}.json").read_text()) for name in ("first", "resumed")
        )
        assert list(first) == list("1234567")
        assert list(resumed) == list("78")
        assert resumed["7"] == first["7"]


def check_layers(directory, folder):
    """The record, no pattern, says which files belong to the checkpoint; each holds its own layer, to the last bit."""
    names = read_commit(str(directory)).file_nbytes
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"layer_(\d+)-.*model_states\.pt", name))]
    assert sorted(numbers) == list(range(NUM_LAYERS))
    expected = {}
    for rank in range(2):
        expected |= torch.load(folder / f"layers-6-{rank}.pt")
    assert sorted(expected) == list(range(NUM_LAYERS))
    assert not torch.equal(expected[10]["weight"], expected[100]["weight"])
    for number, layer in expected.items():
        (path,) = directory.glob(f"layer_{number:02d}-*model_states.pt")  # as DeepSpeed looks for it
        found = torch.load(path)
        assert list(found) == list(layer)
        assert all(torch.equal(found[name], layer[name]) for name in layer)
