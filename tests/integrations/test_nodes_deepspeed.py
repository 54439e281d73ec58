"""DeepSpeed on nodes that share no directory."""

from __future__ import annotations

import re
import shutil

from test_nodes_jobs import on_this_machine


def losses(output):
    return re.findall(r"^losses (.*)$", output, re.MULTILINE)


def test_a_job_on_two_nodes_resumes_from_local_files(fork_server, tmp_path):
    def start(function, *arguments):
        place = on_this_machine(tmp_path)
        name = f"integrations.nodes_runs:{function}"
        return fork_server.start(name, place, *arguments, folder=tmp_path / function, num_ranks=4).wait(100)

    expected = losses(start("save"))
    assert len(expected) == 4
    runs = [tmp_path / name / "run" for name in "ab"]
    (runs[1] / "global_step2" / ".datastates" / "whole.json").unlink()  # as if it had died just before
    (runs[1] / "latest").write_text("global_step1")
    assert losses(start("resume", "global_step2")) == expected
    assert [(run / "latest").read_text() for run in runs] == ["global_step2"] * 2
    shutil.rmtree(runs[1])
    told = start("find_nothing")
    assert told.count("global_step2 is not whole: node 1 (b) has no part of it") == 4, told
