"""Which checkpoints are carried, and which may go: decisions about listings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import ConfigError
from datastates.retention import step_of
from datastates.tier_settings import TierSettings, read_tiers
from datastates.tiers.parts import MAX_PARTS, MEMORY_BYTES, num_in_flight, part_nbytes
from datastates.tiers.selection import Removals, to_carry, to_remove

GIB = 2**30


@dataclass(frozen=True)
class One:
    name: str
    created_at: float
    nbytes: int = GIB

    @property
    def tag(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def step(self) -> int | None:
        return step_of(self.tag)


def series(*steps: int, folder: str = "") -> list[One]:
    return [One(f"{folder}step{step}", float(step)) for step in steps]


def test_the_youngest_is_carried_first_and_what_the_tier_would_not_keep_is_not():
    every = TierSettings("s3://b/p")
    assert to_carry(series(1, 2, 3), [], every) == (series(3, 2, 1), [])
    last = TierSettings("s3://b/p", keep_last=1, keep_every=2)
    assert to_carry(series(1, 2, 3), [], last) == (series(3, 2), series(1))
    assert to_carry(series(1), series(5), last) == ([], series(1))


def test_a_run_that_went_back_carries_what_it_made_last():
    waiting = [One("step200", 1.0), One("step110", 2.0)]
    assert [one.name for one in to_carry(waiting, [], TierSettings("/t"))[0]] == ["step110", "step200"]


def test_what_is_pinned_is_carried_and_stays():
    last = TierSettings("/t", keep_last=1, limit_gb=1)
    assert to_carry(series(1, 2), [], last, {"step1"})[0] == series(2, 1)
    assert to_remove(series(1, 2, 3), last, latest={}, pinned={"step1"}) == Removals(("step2",), ())


def test_folders_are_counted_apart():
    waiting = series(1, 2, folder="a/") + series(1, 2, folder="b/")
    wanted, _ = to_carry(waiting, [], TierSettings("/t", keep_last=1))
    assert {one.name for one in wanted} == {"a/step2", "b/step2"}


def test_what_is_not_carried_stays_unless_the_limit_is_exceeded():
    found = series(1, 2, 3, 4)
    keep = TierSettings("/t", keep_last=1)
    assert to_remove(found, keep, latest={}).names == ("step1", "step2", "step3")
    assert to_remove(found, keep, latest={}, uncarried={"step1", "step2"}) == Removals(("step3",), ())
    limited = TierSettings("/t", limit_gb=2)
    assert to_remove(found, limited, latest={}, uncarried={"step1", "step2"}) == Removals(("step3",), ("step1",))
    behind = {one.name for one in found}
    assert to_remove(found, limited, latest={}, uncarried=behind) == Removals((), ("step1", "step2"))
    held = to_remove(found, limited, latest={}, uncarried=behind, in_progress={"step1"})
    assert held == Removals((), ("step2", "step3")), "what is being carried goes last"


@given(
    st.lists(st.integers(1, 50), unique=True, min_size=1),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 4]),
    st.sampled_from([None, 0.5, 2, 5]),
    st.data(),
)
def test_never_the_newest_nor_the_latest_and_within_the_limit(steps, keep_last, keep_every, limit_gb, data):
    found = series(*steps)
    latest = data.draw(st.sampled_from(found)).tag
    uncarried = data.draw(st.sets(st.sampled_from([one.name for one in found])))
    tier = TierSettings("/t", keep_last=keep_last, keep_every=keep_every, limit_gb=limit_gb)
    removals = to_remove(found, tier, latest={"": latest}, uncarried=uncarried)
    gone = {*removals.names, *removals.dropped}
    assert not gone & {latest, f"step{max(steps)}"}
    assert not set(removals.names) & uncarried and set(removals.dropped) <= uncarried
    assert len(gone) == len(removals.names) + len(removals.dropped)
    left = len(found) - len(gone)
    assert limit_gb is None or left <= max(limit_gb, len({latest, f"step{max(steps)}"}))
    if removals.dropped:
        assert limit_gb is not None and left + 1 > limit_gb, "nothing is lost without need"


@given(st.integers(0, 50 * 2**40))
def test_parts_follow_the_size_of_the_object(nbytes):
    part = part_nbytes(nbytes)
    assert part >= 5 << 20 and -(-nbytes // part) <= MAX_PARTS
    assert num_in_flight(part) == 1 or num_in_flight(part) * part <= MEMORY_BYTES


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["s3://bucket/run"], "expected a directory"),
        (["/a", "ftp://host/x"], "expected a directory or one of s3://"),
        (["/a", "s3://"], "expected a directory or one of"),
        (["/a", "s3://bucket/a/../b"], "without empty parts"),
        (["/a", "/a/b"], "lie in each other"),
        (["/a", "s3://b/x", "s3://b/x/y"], "lie in each other"),
        (["/a", {"path": "/b", "keep": 1}], "unknown key 'keep'; did you mean 'keep_last'"),
        (["/a", {"keep_last": 1}], 'no "path"'),
        (["/a", {"path": "/b", "keep_last": 0}], "keep_last is 0"),
        (["/a", {"path": "/b", "limit_gb": float("nan")}], "limit_gb is nan"),
        ("/a", "expected a list"),
        ([3], "a tier is 3"),
    ],
)
def test_wrong_tiers_are_named(entries, expected):
    with pytest.raises(ConfigError, match=expected.replace("(", r"\(")):
        read_tiers(entries)


@pytest.mark.parametrize("url", ["s3://key:sesame@bucket/p", "s3://bucket/p?X-Amz-Signature=sesame", "az://b/p#sesame"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="taken from the environment") as info:
        read_tiers(["/a", url])
    assert "sesame" not in str(info.value)


def test_places_are_read_as_people_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiers = read_tiers(["here", "file:///there", {"path": "S3://bucket/run/", "keep_every": 5}, tmp_path / "x"])
    assert [tier.path for tier in tiers] == [f"{tmp_path}/here", "/there", "s3://bucket/run", f"{tmp_path}/x"]
    assert [tier.is_object_store for tier in tiers] == [False, False, True, False]
    assert tiers[2].has_retention and not tiers[0].has_retention
