from __future__ import annotations

from datastates.recent_names import RecentNames


def test_only_the_youngest_names_are_remembered():
    names = RecentNames(limit=3)
    for number in range(10):
        names.add(str(number))
    assert len(names) == 3
    assert [str(number) in names for number in range(10)] == [False] * 7 + [True] * 3


def test_a_name_twice_is_one_name():
    names = RecentNames(limit=3)
    for _ in range(5):
        names.add("a")
    assert len(names) == 1
