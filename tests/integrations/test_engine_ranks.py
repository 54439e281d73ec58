"""What the other ranks see when one fails, stalls, dies, or goes its own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastates.recovery import clean_leftovers
from integrations.ranks import run_ranks

WORKER = Path(__file__).parent / "engine_worker.py"


@pytest.mark.parametrize("case", ["one_raises", "one_never_saves", "different_steps", "policies"])
def test_the_others_learn_of_it_and_the_next_checkpoint_is_committed(tmp_path, case):
    with run_ranks(WORKER, case, tmp_path, folder=tmp_path) as ranks:
        assert ranks.wait(90).count("ok\n") == 2
    clean_leftovers(str(tmp_path))  # a promised part stays until the next start has looked at it
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_rank_that_dies_is_named(tmp_path):
    with run_ranks(WORKER, "one_dies", tmp_path, folder=tmp_path) as ranks:
        assert ranks.processes[0].wait(90) == 0, ranks.log()
        assert ranks.log().count("ok\n") == 1
