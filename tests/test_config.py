"""The section of a DeepSpeed config, read strictly."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.config import _RULES, GIB, KIB, MIB, CheckpointConfig
from datastates.errors import ConfigError
from datastates.tier_settings import TierSettings

SETTINGS = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
from_section = CheckpointConfig.from_section


def test_defaults():
    config = from_section({"host_cache_size": 4})
    assert config == CheckpointConfig(host_cache_bytes=4 * GIB)
    assert (config.pin_host_cache, config.fast_cache_init, config.wait_on_save) == (True, True, False)
    assert (config.eager_bytes, config.eager_budget_bytes) == (64 * KIB, 16 * MIB)
    assert config.format is config.events_dir is config.parser_threads is config.slab_bytes is None


def test_every_field_can_be_set_from_the_section():
    settings = {
        "pin_host_cache": False,
        "fast_cache_init": False,
        "parser_threads": 2,
        "format": "safetensors",
        "slab_bytes": 8192,
        "eager_bytes": 0,
        "eager_budget_bytes": 1,
        "num_writers": 1,
        "commit_timeout_seconds": 1,
        "close_timeout_seconds": 2.5,
        "grace_seconds": 0,
        "events_dir": "events",
        "metrics_dir": "metrics",
        "wait_on_save": True,
        "shared_directory": True,
        "tiers": (TierSettings("/local"), TierSettings("s3://bucket/run", keep_last=2)),
        "carry_timeout_seconds": 1.5,
        "when_busy": "skip",
        "verify_staging": True,
    }
    config = from_section({"host_cache_size": 1, **settings})
    assert {name: getattr(config, name) for name in settings} == settings
    assert set(settings) | {"host_cache_bytes"} == {field.name for field in dataclasses.fields(config)}


def test_the_document_of_the_settings_has_each_key_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", SETTINGS.read_text("utf-8"), re.MULTILINE)
    said = {key: {"none": None, "chosen": None, "by suffix": None}.get(cell, cell.strip("`")) for key, cell in rows}
    assert said.pop("host_cache_size") == "required"
    found = {key: None if value is None else json.loads(value) for key, value in said.items()}
    assert found == {f.name: f.default for f in dataclasses.fields(CheckpointConfig) if f.name != "host_cache_bytes"}


def test_every_field_has_a_rule():
    assert set(_RULES) == {field.name for field in dataclasses.fields(CheckpointConfig)}


@pytest.mark.parametrize(
    ("gigabytes", "nbytes"),
    [(1, GIB), (2.0, 2 * GIB), (0.5, GIB // 2), (0.00390625, 4 * MIB), (0.1, 107372544), (64, 64 * GIB)],
)
def test_gigabytes_are_two_to_the_thirty_in_whole_pages(gigabytes, nbytes):
    assert from_section({"host_cache_size": gigabytes}).host_cache_bytes == nbytes
    assert nbytes % 4096 == 0


@pytest.mark.parametrize("found", [0, -1, 0.0, math.nan, math.inf, True, "4", "auto", [4], 2**21, 10**400])
def test_wrong_host_cache_size_says_found_and_expected(found):
    with pytest.raises(
        ConfigError, match=r"^datastates_ckpt\.host_cache_size is .* expected a number of gigabytes"
    ) as info:
        from_section({"host_cache_size": found})
    assert repr(found) in str(info.value)
    assert '"datastates_ckpt": {"host_cache_size": 4}' in str(info.value)


def test_a_cache_of_less_than_four_slabs_is_refused():
    with pytest.raises(ConfigError, match=r"0\.0039 gigabytes.*at least 0\.00390625 gigabytes"):
        from_section({"host_cache_size": 0.0039})
    with pytest.raises(ConfigError, match=r"host_cache_bytes is 4194303 .*>= 4194304 bytes"):
        CheckpointConfig(host_cache_bytes=4 * MIB - 1)


@pytest.mark.parametrize(
    "section", [None, {}, {"host_cache_size": None}, {"num_writers": 2}, True, 4, ["host_cache_size"]]
)
def test_missing_host_cache_size_shows_the_example(section):
    with pytest.raises(ConfigError, match=r'host_cache_size.*"datastates_ckpt": \{"host_cache_size": 4\}'):
        from_section(section)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("host_cache_bytes", "host_cache_size"),
        ("host_cache_sise", "host_cache_size"),
        ("parser_thread", "parser_threads"),
        ("numwriters", "num_writers"),
        ("Format", "format"),
        ("event_dir", "events_dir"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(key, nearest):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{nearest}'"):
        from_section({"host_cache_size": 1, key: 1})


def test_a_key_like_no_other_still_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key 7; did you mean .*Known: carry_timeout_seconds, .*when_busy$"):
        from_section({"host_cache_size": 1, 7: 1})


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("pin_host_cache", 1, "true or false"),
        ("fast_cache_init", "false", "true or false"),
        ("wait_on_save", None, "true or false"),
        ("enabled", 1, "true or false"),
        ("parser_threads", 0, "an integer >= 1"),
        ("parser_threads", True, "an integer >= 1"),
        ("format", "pickle", '"torch", "safetensors"'),
        ("format", ["torch"], '"torch", "safetensors"'),
        ("slab_bytes", 0, "a multiple of 4096 bytes"),
        ("slab_bytes", 4095, "a multiple of 4096 bytes"),
        ("slab_bytes", 4096.0, "a multiple of 4096 bytes"),
        ("eager_bytes", -1, "an integer >= 0 bytes"),
        ("eager_bytes", 0.5, "an integer >= 0 bytes"),
        ("eager_budget_bytes", True, "an integer >= 0 bytes"),
        ("num_writers", 0, "an integer from 1 to 64"),
        ("num_writers", 65, "an integer from 1 to 64"),
        ("commit_timeout_seconds", 0, "a number of seconds > 0"),
        ("commit_timeout_seconds", math.inf, "a number of seconds > 0"),
        ("close_timeout_seconds", None, "a number of seconds > 0"),
        ("grace_seconds", -0.1, "a number of seconds >= 0"),
        ("carry_timeout_seconds", -1, "a number of seconds >= 0"),
        ("tiers", "s3://bucket/run", "a list of tiers"),
        ("events_dir", "", "a path"),
        ("metrics_dir", "", "a path"),
        ("events_dir", 3, "a path"),
    ],
)
def test_wrong_value_names_key_found_and_expected(name, found, expected):
    with pytest.raises(ConfigError) as info:
        from_section({"host_cache_size": 1, name: found})
    message = str(info.value)
    assert message.startswith("datastates_ckpt") and f"{name} is {found!r} ({type(found).__name__})" in message
    assert f"expected {expected}" in message


@given(st.integers(min_value=4 * MIB, max_value=2**50))
def test_chosen_slab_is_aligned_bounded_and_fits_four_times(host_cache_bytes):
    slab_nbytes = CheckpointConfig(host_cache_bytes=host_cache_bytes).slab_nbytes
    assert slab_nbytes % 4096 == 0
    assert MIB <= slab_nbytes <= 16 * MIB
    assert slab_nbytes * 4 <= host_cache_bytes
    assert slab_nbytes in (MIB, 16 * MIB) or slab_nbytes == host_cache_bytes // 8 // 4096 * 4096


def test_given_slab_bytes_apply_as_they_are_and_leave_four_slabs():
    assert CheckpointConfig(host_cache_bytes=4 * MIB, slab_bytes=4096).slab_nbytes == 4096
    assert CheckpointConfig(host_cache_bytes=128 * MIB, slab_bytes=32 * MIB).slab_nbytes == 32 * MIB
    with pytest.raises(
        ConfigError, match=r"slab_bytes is 33558528, expected at most a quarter .* 33554432 of 134217728"
    ):
        CheckpointConfig(host_cache_bytes=128 * MIB, slab_bytes=32 * MIB + 4096)


def test_parser_threads_say_that_they_have_no_effect(caplog):
    with caplog.at_level(logging.INFO, logger="datastates.config"):
        from_section({"host_cache_size": 1})
        assert caplog.messages == []
        from_section({"host_cache_size": 1, "parser_threads": 8})
    assert caplog.messages == ["datastates_ckpt.parser_threads is accepted and has no effect: remove it"]


def test_enabled_is_tolerated_and_false_is_not_taken_in_silence(caplog):
    assert from_section({"host_cache_size": 1, "enabled": True}) == from_section({"host_cache_size": 1})
    assert caplog.records == []
    from_section({"host_cache_size": 1, "enabled": False})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "remove datastates_ckpt" in caplog.text


def test_the_section_is_not_changed():
    section = {"host_cache_size": 1, "enabled": True, "num_writers": 2}
    from_section(section)
    assert section == {"host_cache_size": 1, "enabled": True, "num_writers": 2}


def test_immutable_keyword_only_and_picklable():
    config = CheckpointConfig(host_cache_bytes=GIB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_writers = 4
    with pytest.raises(TypeError):
        CheckpointConfig(GIB)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match="num_writers"):
        dataclasses.replace(config, num_writers=0)
