"""Checkpoints of ZeRO resumed on another number of ranks, with no step in between."""

from __future__ import annotations

import pytest

JOBS = "integrations.elastic_runs:"

ON_THREE = [
    "zero1",
    "zero2 fp16",
    "zero2 offload safetensors",
    "zero2 elastic_checkpoint",
    "zero3",
    "zero3 safetensors",
    "bf16 optimizer",
]
LESS_AND_MORE = ["zero1", "zero3"]


@pytest.fixture
def run(fork_server, tmp_path):
    """``run(function, *arguments, num_ranks=...)``: one job in the test's folder; gives its output."""

    def start(function, *arguments, num_ranks):
        return fork_server.start(JOBS + function, tmp_path, *arguments, folder=tmp_path, num_ranks=num_ranks).wait(120)

    return start


def test_two_ranks_resume_on_three_in_every_kind(run):
    run("save", ON_THREE, num_ranks=2)
    log = run("load", ON_THREE, num_ranks=3)
    for name in ON_THREE:
        assert log.count(f"ok loaded {name} on 3") == 3


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_fewer_and_more_ranks_than_a_group_has_elements(run, before, after):
    run("save", LESS_AND_MORE, num_ranks=before)
    log = run("load", LESS_AND_MORE, num_ranks=after)
    for name in LESS_AND_MORE:
        assert log.count(f"ok loaded {name} on {after}") == after


def test_a_pipeline_of_two_stages_gets_a_second_replica(run):
    run("save", ["pipeline"], num_ranks=2)
    assert run("load", ["pipeline"], num_ranks=4).count("ok loaded pipeline on 4") == 4


def test_flags_and_tag_hold_and_what_cannot_be_is_refused_on_every_rank(run):
    run("save", ["zero1", "zero3", "zero3 safetensors", "pipeline"], num_ranks=2)
    log = run("load_parts", num_ranks=3)
    for name in ("zero1", "zero3", "zero3 safetensors"):
        assert log.count(f"ok loaded parts of {name}\n") == 3
    assert run("refuse", num_ranks=3).count("ok refused") == 3


def test_deepspeed_loads_our_universal_checkpoints_on_other_ranks(run):
    run("save_plain", num_ranks=2)
    log = run("load_universal", num_ranks=3)
    for name in ("zero1", "zero3"):
        assert log.count(f"ok loaded universal {name}\n") == 3
