"""Each rule for what is copied when, with a save that is copied as late as the fence allows, with and without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integrations.deepspeed_configurations import CONFIGURATIONS

ZENFLOW_STEPS = 4
"""After so many its next backward pass overwrites master weights."""

RUN = "integrations.deepspeed_hazards:copy_late"


def torn(fork_server, folder: Path, name: str, without: str = "", num_steps_before: int = 3) -> set[str]:
    """Names of tensors that differ from what they were at the save, on any rank."""
    fork_server.start(RUN, name, folder, without, num_steps_before, folder=folder).wait()
    return {fqn for rank in range(2) for fqn in json.loads((folder / f"torn{rank}.json").read_text())}


@pytest.mark.timeout(900)  # an operator may have to be compiled
@pytest.mark.parametrize(
    "name",
    [
        "zero0-fp32",
        "zero0-bf16",
        "zero1-fp16-overflow",
        "zero2-cpu-adam",
        "zero3-bf16",
        "zero3-cpu-adam-params",
        "zero2-muon",
        "zero3-muon",
        "zenflow",
        "zero3-nvme",
        "zero3-nvme-pipelined-params",
        "moe-zero2-bf16",
        "accumulation-zero2-middle",
    ],
)
def test_nothing_is_torn_when_all_is_copied_as_late_as_the_fence_allows(name, fork_server, need_operators, tmp_path):
    need_operators(*CONFIGURATIONS[name].needs)
    assert torn(fork_server, tmp_path, name, num_steps_before=ZENFLOW_STEPS if name == "zenflow" else 3) == set()


def test_without_eager_copies_buffers_and_client_state_are_torn(fork_server, tmp_path):
    assert torn(fork_server, tmp_path, "zero1-bf16", "eager") == {"module.average", "user"}


@pytest.mark.parametrize("name", ["zero2-muon", "zero3-muon"])
def test_without_the_fence_at_the_model_step_the_momentum_of_muon_is_torn(name, fork_server, tmp_path):
    names = torn(fork_server, tmp_path, name, "model_step")
    assert names
    assert all(fqn.endswith("momentum_buffer") for fqn in names)


@pytest.mark.timeout(900)
def test_without_eager_copies_the_master_weights_of_zenflow_are_torn(fork_server, need_operators, tmp_path):
    need_operators(*CONFIGURATIONS["zenflow"].needs)
    names = torn(fork_server, tmp_path, "zenflow", "eager", ZENFLOW_STEPS)
    assert "optimizer_state_dict.single_partition_of_fp32_groups.0" in names


def test_without_the_fence_weights_and_optimizer_are_torn(fork_server, tmp_path):
    names = torn(fork_server, tmp_path, "zero1-bf16", "fence")
    assert {"module.first.weight", "optimizer_state_dict.base_optimizer_state.state.0.exp_avg"} <= names


@pytest.mark.timeout(900)
def test_without_the_fence_a_swap_file_that_changes_loses_the_save(fork_server, need_operators, tmp_path):
    need_operators(*CONFIGURATIONS["zero3-nvme"].needs)
    names = torn(fork_server, tmp_path, "zero3-nvme", "fence")
    assert names
    assert all(name.endswith(".tensor.swp") for name in names)
    assert not list((tmp_path / "late").rglob("*.pt"))
