"""Tags, client states, partial loads, several engines, 16-bit weights, swap files, and an adapter repaired upstream."""

from __future__ import annotations

import pytest

from integrations.deepspeed_configurations import CONFIGURATIONS

CASES = {
    "tags_and_client_states": "tags and client states",
    "partial_loads": "partial loads",
    "adapters": "adapters",
    "several_engines": "several engines",
    "sixteen_bit_weights": "16-bit weights",
    "files_at_once": "files at once",
    "repaired_adapter": "repaired adapter",
    "numeric_names": "numeric names",
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_right_on_every_rank(case, fork_server, tmp_path):
    job = fork_server.start(f"integrations.deepspeed_cases:{case}", tmp_path, folder=tmp_path)
    assert job.wait().count(f"ok {CASES[case]}") == 2


@pytest.mark.timeout(900)  # operators may have to be compiled
def test_swapped_states_are_part_of_the_checkpoint_under_stable_names(fork_server, need_operators, tmp_path):
    need_operators(*CONFIGURATIONS["zero3-nvme"].needs)
    job = fork_server.start("integrations.deepspeed_cases:swap_files", tmp_path, folder=tmp_path)
    assert job.wait().count("ok swap files") == 2
