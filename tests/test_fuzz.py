"""Damaged files: each is loaded or refused, in little memory and time. The long form is scripts/fuzz.py."""

from __future__ import annotations

import pathlib
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stress import fuzz


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
