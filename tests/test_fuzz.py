"""Damaged files: each is loaded or refused, in little memory and time. The long form is scripts/fuzz.py."""

from __future__ import annotations

import ast
import pathlib
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stress import fuzz

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"


@pytest.mark.parametrize("index", range(len(fuzz.corpus())))
@pytest.mark.parametrize("way", range(5))
def test_the_valid_files_load(tmp_path: pathlib.Path, index: int, way: int) -> None:
    answers = {"loaded", "MismatchError", "ForeignObjectError"} if index > 2 else {"loaded"}
    assert fuzz.attempt(tmp_path / "x", fuzz.corpus()[index], way) in answers


def test_hundreds_of_damaged_files(tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pickles of other protocols
        outcome = fuzz.run(range(700), tmp_path / "x")
    assert outcome.faults == {}
    assert outcome.answers["CorruptCheckpointError"] > 400 and outcome.answers["loaded"] > 10


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(10**7, 2**62), index=st.integers(0, 4))
def test_any_damaged_file(tmp_path: pathlib.Path, seed: int, index: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz.attempt(tmp_path / "x", fuzz.changed(fuzz.corpus()[index], seed), seed)


_HANGING = """
import pathlib, sys, threading
sys.path.insert(0, sys.argv[1])
import fuzz as script

def run(seeds, path, begin):
    for seed in seeds:
        begin(seed)
        while seed == 3 and sys.argv[2] == "HANG_SECONDS":
            pass
        if seed == 3:
            threading.Event().wait()
    return script.fuzz.Outcome()

script.fuzz.run, script.BATCH = run, 5
setattr(script, sys.argv[2], int(sys.argv[3]))
print(script.run_all(0, 10, 2, pathlib.Path(".")).faults)
"""


@pytest.mark.parametrize(("limit", "seconds"), [("HANG_SECONDS", 1), ("STILL_SECONDS", 5)])
def test_a_file_that_hangs_is_told_by_its_number(run_script: Any, limit: str, seconds: int) -> None:
    """Whether it takes processor time or waits."""
    found = run_script(_HANGING, SCRIPTS, limit, seconds).stdout
    assert found.startswith("{3: 'hangs: ") and len(ast.literal_eval(found)) == 1
