"""Intervals and caches that follow from what was measured."""

from __future__ import annotations

import itertools
import json

import pytest

from datastates.advice import CACHE_HEADROOM, HEADROOM, Measured, advise, widest

GIB = 1 << 30
MEASURED = Measured(
    nbytes=8 * GIB,
    host_cache_bytes=8 * GIB,
    flush_nbytes_per_second=2.0 * GIB,
    copy_nbytes_per_second=8.0 * GIB,
    step_seconds=1.0,
    interval_seconds=10.0,
    num_steps=10,
)


def measured(**changes: float | None) -> Measured:
    return Measured(**{name: getattr(MEASURED, name) for name in Measured.__slots__} | changes)


@pytest.mark.parametrize("changes", [{"nbytes": 0}, {"flush_nbytes_per_second": None}])
def test_nothing_is_advised_before_anything_was_written(changes):
    assert advise(measured(**changes)) is None


def test_a_run_that_saves_seldom_enough_has_nothing_to_change():
    advice = advise(MEASURED)
    assert (advice.committed_seconds, advice.interval_seconds, advice.interval_steps) == (4.0, 4.0 * HEADROOM, 5)
    assert (advice.is_outrun, advice.is_cache_short, advice.held_seconds, advice.remedy) == (False, False, 0.0, "")


def test_a_save_at_every_step_that_the_disk_does_not_keep_up_with():
    advice = advise(measured(interval_seconds=1.0))
    assert advice.is_outrun
    assert advice.remedy == "raise save-interval to >= 5 (5 s)"


def test_without_steps_the_interval_is_in_seconds():
    advice = advise(measured(step_seconds=None, interval_seconds=1.0))
    assert (advice.interval_steps, advice.remedy) == (None, "save every 5 s or less often")


def test_what_is_written_while_a_step_goes_on_needs_no_cache():
    advice = advise(measured(host_cache_bytes=4 * GIB))
    assert advice.host_cache_bytes == int(6 * GIB * CACHE_HEADROOM)
    assert advice.remedy == "raise host_cache_size to >= 6.3"
    assert advice.held_seconds == pytest.approx(1.0)  # (8 - 4) / 2, less the step
    assert not advise(measured(host_cache_bytes=6 * GIB)).is_cache_short


def test_a_save_right_before_the_step_has_no_time_to_be_written_in():
    advice = advise(measured(host_cache_bytes=4 * GIB, overlap_seconds=0.0))
    assert advice.remedy == "raise host_cache_size to >= 8.4"
    assert advice.held_seconds == pytest.approx(2.0)
    assert advise(measured(host_cache_bytes=4 * GIB, overlap_seconds=2.0)).remedy == ""


def test_every_step_is_said_without_a_number():
    advice = advise(measured(step_seconds=10.0))
    assert advice.interval_text == "step (5 s)"
    assert advise(MEASURED).interval_text == "5 steps (5 s)"


def test_the_cache_that_is_advised_is_enough():
    for nbytes, flush, step in itertools.product((1, 3 << 20, 8 * GIB), (1e3, 1e8, 1e10), (None, 1e-3, 1.0, 1e4)):
        found = {"nbytes": nbytes, "flush_nbytes_per_second": flush, "step_seconds": step}
        small = advise(measured(**found, host_cache_bytes=1))
        assert 0 <= small.host_cache_bytes <= nbytes * CACHE_HEADROOM
        after = advise(measured(**found, host_cache_bytes=max(small.host_cache_bytes, 1), copy_nbytes_per_second=None))
        assert not after.is_cache_short
        assert after.held_seconds == pytest.approx(0.0, abs=1e-6 * nbytes / flush)


def test_the_interval_that_is_advised_is_sustainable():
    advice = advise(measured(interval_seconds=0.5))
    assert not advise(measured(interval_seconds=advice.interval_seconds)).is_outrun
    assert not advise(measured(interval_seconds=advice.interval_steps * 1.0)).is_outrun


def test_copies_that_take_longer_than_a_step_hold_it_back_whatever_the_cache():
    advice = advise(measured(copy_nbytes_per_second=4.0 * GIB))
    assert (advice.held_seconds, advice.is_cache_short) == (1.0, False)


def test_both_remedies_are_named_where_both_are_needed():
    advice = advise(measured(host_cache_bytes=GIB, interval_seconds=1.0))
    assert advice.remedy == "raise host_cache_size to >= 6.3 and raise save-interval to >= 5 (5 s)"


def test_commits_take_time_too():
    assert advise(measured(commit_seconds=2.0)).committed_seconds == 6.0


def test_an_advice_for_all_ranks_is_right_for_each():
    first = advise(measured(host_cache_bytes=GIB, interval_seconds=None))
    second = advise(measured(flush_nbytes_per_second=1.0 * GIB, step_seconds=None, interval_seconds=2.0))
    both = widest([first, second])
    assert (both.interval_seconds, both.interval_steps) == (second.interval_seconds, first.interval_steps)
    assert (both.is_outrun, both.is_cache_short) == (True, True)
    assert widest([]) is None


def test_plain_values_are_json():
    assert json.loads(json.dumps(advise(MEASURED).plain()))["interval_steps"] == 5


def test_small_caches_are_named_as_the_setting_takes_them():
    advice = advise(measured(nbytes=1 << 20, host_cache_bytes=1, step_seconds=None))
    assert advice.cache_remedy == "raise host_cache_size to >= 0.004"
