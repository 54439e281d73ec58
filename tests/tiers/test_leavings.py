"""What is left in a tier when carrying or removing is cut, given up or refused, and who else is at work there."""

from __future__ import annotations

import shutil
from datetime import timedelta

import pytest

from datastates.errors import ConfigError, StorageError
from datastates.integrity import verify
from datastates.manifest import read_commit
from datastates.pins import is_pinned, pin, unpin
from datastates.tier_settings import read_tiers
from datastates.tiers import bucket, folder_store, redaction
from datastates.tiers.housekeeping import Housekeeper
from flusher.rig import Rig, eventually
from tiers.killing import wait_carried, wait_ended
from tiers.object_server import BUCKET
from tiers.rig import Ranks

URL = f"s3://{BUCKET}/run"
LAST = {"path": URL, "keep_last": 1}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Pauses of milliseconds."""
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=20), "base": 2}
    monkeypatch.setattr(bucket, "RETRIES", {**bucket.RETRIES, "backoff": backoff})


def is_deletion(request):
    return request.method == "DELETE" or (request.method == "POST" and "delete" in request.query)


def is_sending(part):
    return lambda request: request.method == "PUT" and part in request.path


@pytest.mark.parametrize("how", ["removed", "saved anew", "damaged"])
def test_what_was_sent_in_vain_goes(tmp_path, commit, server, how):
    directory = commit(tmp_path / "a", "step1", (100, 200, 300), world_size=2)

    def lose(request):
        if is_sending("part1-rank0")(request):
            server.trouble = lambda _: None
            if how == "damaged":
                (directory / "part2-rank0.pt").write_bytes(bytes(300))
            else:
                shutil.rmtree(directory)
            if how == "saved anew":
                commit(tmp_path / "a", "step1", (100,), seed="again")

    ranks = Ranks(tmp_path / "a", URL, world_size=2)
    assert ranks.turn(1) is not None
    ranks.carriers[1]._stopped.clear()
    server.trouble = lose
    ranks.turn(0)
    assert server.names("run/step1/"), "there is something to be removed"
    ranks.work()
    commit(tmp_path / "a", "step2", (100,))
    ranks.work()
    left = server.names("run/step1/")
    expected = sorted(path.name for path in directory.glob("*.pt")) if how == "saved anew" else []
    assert [key.rpartition("/")[2] for key in left if key.endswith(".pt")] == expected
    assert how == "saved anew" or left == []
    assert "run/step2/.datastates/commit.json" in server.names()


def test_what_a_killed_process_has_sent_in_vain_goes_as_well(tmp_path, commit, server):
    directory = commit(tmp_path / "a", "step1", (100, 200))
    server.trouble = lambda request: 403 if is_sending("part1")(request) else None
    Ranks(tmp_path / "a", URL).turn()
    server.trouble = lambda request: 403 if is_sending("part1")(request) else None
    again = Ranks(tmp_path / "a", URL)
    again.carriers[0]._tidy(again.carriers[0]._make_carrying())
    again.turn()
    shutil.rmtree(directory)
    server.trouble = lambda _: None
    again.work()
    assert server.names() == []


def test_in_a_folder_nothing_is_left_of_what_was_given_up(tmp_path, commit, monkeypatch):
    directory = commit(tmp_path / "a", "step1", (100, 200))
    send = folder_store.FolderStore.send

    def lose(*arguments):
        shutil.rmtree(directory, ignore_errors=True)
        return send(*arguments)

    monkeypatch.setattr(folder_store.FolderStore, "send", lose)
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    ranks.turn()
    ranks.work()
    assert "removed or saved anew" in ranks.errors()[0] and list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_removal_that_was_cut_is_finished_by_the_next_start(tmp_path, commit, server, number):
    commit(tmp_path / "a", "step1", (100, 200))
    Ranks(tmp_path / "a", LAST).work()
    commit(tmp_path / "a", "step2", (100,))
    count = 0

    def cut(request):
        nonlocal count
        count += is_deletion(request)
        return 403 if count >= number and is_deletion(request) else None

    server.trouble = cut
    ranks = Ranks(tmp_path / "a", LAST)
    ranks.work()
    assert ranks.carried() == ["step2"] and "older ones stay" in ranks.errors()[0]
    assert ("run/step1/.datastates/commit.json" in server.names()) == (number == 1)
    server.trouble = lambda _: None
    Ranks(tmp_path / "a", LAST).work()
    if number == 1:
        assert "run/step1/part0-rank0.pt" in server.names(), "it is whole: the rules decide again"
        commit(tmp_path / "a", "step3", (100,))
        Ranks(tmp_path / "a", LAST).work()
    assert not server.names("run/step1/")


def test_where_nothing_may_be_deleted_checkpoints_are_carried_and_it_is_said(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", (100, 200))
    Ranks(tmp_path / "a", URL).work()
    server.call("PUT", f"/{BUCKET}/run/step2/.datastates/a-1-0001/rank-00000.json", b"{}")  # of an older try
    server.trouble = lambda request: 403 if is_deletion(request) else None
    directory = commit(tmp_path / "a", "step2", (100,))
    ranks = Ranks(tmp_path / "a", LAST)
    ranks.work()
    assert ranks.carried() == ["step2"] and server.get("run/latest") == b"step2"
    said = "".join(ranks.errors())
    assert "what was replaced may stay" in said and "older ones stay in" in said and "403" in said
    assert server.get("run/step2/part0-rank0.pt") == (directory / "part0-rank0.pt").read_bytes()


def test_leftovers_that_may_not_be_removed_are_in_nobodys_way(tmp_path, commit, server):
    server.call("PUT", f"/{BUCKET}/run/step0/.datastates/removing", b"")
    server.trouble = lambda request: 403 if is_deletion(request) else None
    commit(tmp_path / "a", "step1", (100,))
    commit(tmp_path / "a", "step2", (100,))
    ranks = Ranks(tmp_path / "a", URL)
    ranks.work()
    assert sorted(ranks.carried()) == ["step1", "step2"]
    assert sum("parts of earlier tries may stay" in error for error in ranks.errors()) == 1


def test_latest_is_the_one_of_the_first_tier_whatever_the_clocks_say(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", (100,), at=2000.0)
    ranks = Ranks(tmp_path / "a", URL)
    ranks.work()
    commit(tmp_path / "a", "step2", (100,), at=1000.0)
    commit(tmp_path / "a", "best", (100,), at=3000.0, latest=False)
    ranks.work()
    assert server.get("run/latest") == b"step2"


def test_one_that_cannot_be_carried_holds_up_no_other(tmp_path, commit, server):
    commit(tmp_path / "a", "step1", (100,))
    commit(tmp_path / "a", "st\udcffep2", (100,), latest=False)  # no name for an object
    ranks = Ranks(tmp_path / "a", URL)
    for _ in range(10):
        ranks.turn()
    assert ranks.carried() == ["step1"] and "the name of an object is UTF-8" in ranks.errors()[0]


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_pins_outlive_the_first_tier(tmp_path, commit, server, kind):
    tier = LAST if kind == "bucket" else {"path": tmp_path / "b", "keep_last": 1}
    first = commit(tmp_path / "a", "step1", (100,))
    pin(str(first))
    Ranks(tmp_path / "a", tier).work()
    pin(str(commit(tmp_path / "a", "step2", (100,))))
    ranks = Ranks(tmp_path / "a", tier)
    ranks.work()
    unpin(str(tmp_path / "a" / "step2"))
    commit(tmp_path / "a", "step3", (100,))
    ranks.work()
    assert {one.name for one in ranks.store.committed(None)} == {"step1", "step3"}
    shutil.rmtree(tmp_path / "a")
    for step in (4, 5):
        commit(tmp_path / "a", f"step{step}", (100,))
    again = Ranks(tmp_path / "a", tier)
    again.work()
    assert {one.name for one in again.store.committed(None)} == {"step1", "step5"}
    if kind == "folder":
        assert is_pinned(str(tmp_path / "b" / "step1"))


def test_a_full_tier_whose_rules_have_changed_gets_room(tmp_path, commit, monkeypatch):
    for step in (1, 2):
        commit(tmp_path / "a", f"step{step}", (100,))
    Ranks(tmp_path / "a", tmp_path / "b").work()
    commit(tmp_path / "a", "step3", (100,))
    ranks = Ranks(tmp_path / "a", {"path": tmp_path / "b", "keep_last": 1})
    send = folder_store.FolderStore.send

    def full(store, *arguments):
        if (tmp_path / "b" / "step1").exists():
            raise StorageError("no space left on device", 28, "b")
        return send(store, *arguments)

    monkeypatch.setattr(folder_store.FolderStore, "send", full)
    assert ranks.turn() > 0 and "no space" in ranks.errors()[0]
    ranks.work()
    assert ranks.carried() == ["step3"] and [one.name for one in ranks.store.committed(None)] == ["step3"]


def test_a_start_waits_for_the_process_that_an_earlier_one_has_left(tmp_path, commit, server, make_gate):
    """Two at work on one upload would abort each other's."""
    commit(tmp_path / "a", "step1", (40 << 20, 1000))
    gate = make_gate()
    server.trouble = lambda request: gate.hold() if request.is_part else None
    tiers = read_tiers([tmp_path / "a", URL])
    with Rig(tiers=tiers) as rig:
        old = rig.client.pid
        gate.wait_held()
    with Rig(tiers=tiers):
        num_lists = len([request for request in server.requests if "list-type" in request.query])
        eventually(
            lambda: len([found for found in server.requests if "list-type" in found.query]) > num_lists,
            "the new process has looked at the tier",
        )
        gate.open()
        wait_carried(tmp_path / "a", "step1")
    wait_ended(old)
    assert sum(request.is_part for request in server.requests) == 3, "each part was sent once"
    assert not [request for request in server.requests if request.method == "DELETE"]


def test_a_turn_belongs_to_one_process(tmp_path, commit):
    commit(tmp_path / "a", "step1", (100,))
    ranks, other = Ranks(tmp_path / "a", tmp_path / "b"), Ranks(tmp_path / "a", tmp_path / "b")
    carrying = ranks.carriers[0]._make_carrying()
    (placed,), _ = carrying.survey()
    with carrying.marks(placed).turn(0) as is_mine:
        assert is_mine and other.turn() > 0 and not (tmp_path / "b").exists()
    other.work()
    assert verify(str(tmp_path / "b" / "step1")) == [] and other.carried() == ["step1"]


@pytest.mark.parametrize("inside", [False, True])
def test_the_first_tier_by_another_name_is_no_other_tier(tmp_path, inside):
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "b").symlink_to(tmp_path / "a" / "x" if inside else tmp_path / "a")
    with pytest.raises(ConfigError, match="lie in each other"):
        read_tiers([tmp_path / "a", {"path": tmp_path / "b", "keep_last": 1}])


def test_a_prefix_is_read_as_a_url(tmp_path, commit, server):
    for key in ("my%20run/step0/x.pt", "my%2520run/step0/x.pt"):
        server.call("POST", f"/{BUCKET}/{key}?uploads")
    commit(tmp_path / "a", "ü 1/step+1%20#", (100, 0))
    ranks = Ranks(tmp_path / "a", f"s3://{BUCKET}/my%20run")
    ranks.work()
    assert ranks.errors() == [] and [one.name for one in ranks.store.committed(None)] == ["ü 1/step+1%20#"]
    assert server.uploads() == 1 and "my run/ü 1/latest" in server.names()


def test_user_and_password_of_an_endpoint_are_not_told(tmp_path, commit, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:sesame@127.0.0.1:9")
    commit(tmp_path / "a", "step1", (100,))
    ranks = Ranks(tmp_path / "a", URL)
    ranks.turn()
    assert ranks.errors() and "sesame" not in "".join(ranks.errors())
    assert redaction.redacted("by http://u:p%40x@proxy:1/ to s3://b/c@d") == "by http://(hidden)@proxy:1/ to s3://b/c@d"


def test_a_housekeeper_survives_what_it_does_not_know(tmp_path, commit, monkeypatch):
    commit(tmp_path / "a", "step1", (100,))
    monkeypatch.setattr("datastates.tiers.housekeeping.committed_below", lambda _: 1 / 0)
    notes = []
    tiers = read_tiers([{"path": tmp_path / "a", "keep_last": 1}, tmp_path / "b"])
    keeper = Housekeeper(tiers[0], tiers[1:], tell=notes.append, on_removed=lambda: None, on_idle=lambda: None)
    assert keeper._turn() is None and "ZeroDivisionError" in notes[0].error
    assert read_commit(str(tmp_path / "a" / "step1")) is not None
