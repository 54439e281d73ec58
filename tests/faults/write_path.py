"""The calls of the flusher that touch storage, and a job of which one rank's calls can be made to fail."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datastates.errors import CommitError, StorageError
from datastates.integrity import verify
from datastates.manifest import read_commit, read_latest
from datastates.recovery import Recovery, recover
from flusher.rig import SLAB, TIMEOUT, Rig, eventually, image_of

DECISION = ".commit.json.tmp"
RETRIED = ("EINTR", "EAGAIN", "ESTALE")
FATAL = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES")
PARTIAL = ".datastates.partial"


@dataclass(frozen=True)
class Point:
    """One call, found by its name and a text in its arguments, and what its failure leads to.

    Attributes:
        once: whether a save is committed although the call fails once with a `FATAL` error.
        for_ever: likewise if it fails each time, with any error.
        retried: errors that are no failure if they come once.
        needs_recovery: a checkpoint saved again under its name may be left to the next start to finish.
        is_mute: the rank cannot tell the others either, who wait until their time is over.
        races: another rank or thread may do the same in time: either outcome is right.
        first: the calls before this one go through.
        after: so do all calls before a file of this name is renamed.
    """

    name: str
    call: str
    only: str = ""
    ends: str = ""
    once: bool = False
    for_ever: bool = False
    retried: tuple[str, ...] = RETRIED
    needs_recovery: bool = False
    is_mute: bool = False
    races: bool = False
    first: int = 0
    after: str = ""

    def rule(self, then: str, times: int | None) -> dict[str, Any]:
        fields = {"call": self.call, "only": self.only, "ends": self.ends, "first": self.first, "then": then}
        if self.after:
            fields["after"] = self.after
        return fields if times is None else fields | {"times": times}

    def is_committed(self, code: str, times: int | None) -> bool:
        """Whether a save is expected to be committed."""
        if times is None:
            return self.for_ever
        return self.once or code in self.retried


ANY_FILE = [
    Point("list", "listdir"),
    Point("open", "open", PARTIAL),
    Point("lock", "flock", PARTIAL),
    Point("empty", "ftruncate", PARTIAL),
    Point("free", "fstatvfs"),
    Point("reserve", "posix_fallocate"),
    Point("write", "pwrite", PARTIAL),
    Point("cut", "ftruncate", PARTIAL, first=1),
    Point("sync", "fsync", PARTIAL, retried=("EINTR",)),
]
LONE_FILE = [
    *ANY_FILE,
    Point("mkdir", "mkdir", ends="-step"),
    Point("sync-parent", "fsync", ends="/root", retried=("EINTR",)),
    Point("publish", "replace", PARTIAL),
    Point("sync-folder", "fsync", ends="-step", retried=("EINTR",)),
]
ANY_RANK = [
    *ANY_FILE,
    Point("mkdir", "mkdir", ends="-step", races=True),
    Point("mkdir-attempt", "mkdir", ends="-run", races=True),
    Point("open-attempt-lock", "open", ends="/lock", is_mute=True),
    Point("attempt-lock", "flock", ends="/lock", is_mute=True),
    Point("open-manifest", "open", ".json.tmp", is_mute=True),
    Point("write-manifest", "pwrite", ".json.tmp", is_mute=True),
    Point("sync-manifest", "fsync", ".json.tmp", retried=("EINTR",), is_mute=True),
    Point("place-manifest", "replace", ".json.tmp", is_mute=True),
    Point("read-record", "read", ends="/commit.json rb"),
]
RANK_0 = [
    *ANY_RANK,
    Point("read-manifest", "read", ends="/rank-00000.json rb"),
    Point("open-staged-record", "open", ".commit.json.tmp"),
    Point("write-staged-record", "pwrite", ".commit.json.tmp"),
    Point("sync-staged-record", "fsync", ".commit.json.tmp", retried=("EINTR",)),
    Point("place-staged-record", "replace", ".commit.json.tmp"),
    Point("scan", "scandir", once=True),
    Point("publish", "replace", PARTIAL, once=True, needs_recovery=True),
    Point("place-record", "replace", ends="/.datastates/commit.json", once=True, needs_recovery=True),
    Point("sync-folder", "fsync", ends="-step", once=True, needs_recovery=True, after=DECISION),
    Point("sync-record", "fsync", ends="/.datastates", once=True, needs_recovery=True, after=DECISION),
    Point("open-latest", "open", ".latest.tmp", once=True),
    Point("write-latest", "pwrite", ".latest.tmp", once=True),
    Point("sync-latest", "fsync", ".latest.tmp", once=True),
    Point("place-latest", "replace", ".latest.tmp", once=True),
]
NEW_NAME = [
    *RANK_0,
    Point("sync-new-parent", "fsync", ends="/root", retried=("EINTR",)),
    Point("sync-new-folder", "fsync", ends="-step", retried=("EINTR",)),
]
SAME_NAME = [
    *(point for point in RANK_0 if point.name != "mkdir"),
    Point("chmod", "fchmod"),
    Point("withdraw", "unlink", ends="/.datastates/commit.json", once=True),
    Point("remove-superseded", "rmdir", once=True, for_ever=True),
]


class Job:
    """Ranks that save one checkpoint after the other, and the switch for the faults of one of them.

    With ``tag`` all checkpoints have that name, and the one before is replaced; else each has a name of its own.
    """

    def __init__(self, root: Path, rigs: list[Rig], faulty_rank: int, rules: Path, tag: str = "") -> None:
        self.root = root
        self.rigs = rigs
        self.faulty_rank = faulty_rank
        self._rules = rules
        self._met = rules.with_name("met")
        self._fixed_tag = tag
        self._number = 0
        self.tag = ""
        self.images: list[bytes] = []
        self._committed: tuple[str, list[bytes]] = ("", [])

    def inject(self, *rules: dict[str, Any]) -> None:
        self._met.unlink(missing_ok=True)
        self._replace([rule | {"met": str(self._met)} for rule in rules])

    @property
    def is_met(self) -> bool:
        """Whether a fault has happened since `inject`."""
        return self._met.exists()

    def heal(self) -> None:
        self._replace([])

    def _replace(self, rules: list[dict[str, Any]]) -> None:
        new = self._rules.with_name("new-rules")
        new.write_text(json.dumps(rules))
        new.replace(self._rules)

    def save(self) -> list[BaseException | None]:
        """Save the next checkpoint; gives the error of each rank."""
        self._begin()
        attempt = f"{self._number}-run"
        files = [
            rig.save(self.directory / f"f{rank}", self.images[rank], attempt) for rank, rig in enumerate(self.rigs)
        ]
        futures = [rig.commit(self.directory, attempt, self.tag) for rig in self.rigs]
        errors = [future.exception(TIMEOUT) for future in futures]
        eventually(lambda: all(file.has_ended for file in files), "what could be removed of lost files is removed")
        for rig in self.rigs:
            rig.wait_all_free()
        return errors

    def _begin(self) -> None:
        self._number += 1
        self.tag = self._fixed_tag or f"{self._number}-step"
        self.images = [image_of(SLAB + 100 + rank, self._number) for rank in range(len(self.rigs))]

    @property
    def directory(self) -> Path:
        return self.root / self.tag

    def content(self, tag: str) -> list[bytes]:
        return [(self.root / tag / f"f{rank}").read_bytes() for rank in range(len(self.rigs))]

    def check_committed(self) -> None:
        assert verify(str(self.directory)) == []
        assert self.content(self.tag) == self.images
        assert read_latest(str(self.root)) == self.tag
        earlier, self._committed = self._committed[0], (self.tag, self.images)
        if earlier not in ("", self.tag):
            shutil.rmtree(self.root / earlier)

    def check_reported(self, errors: list[BaseException | None], code: int) -> None:
        """The faulty rank names call, path, error, rank and tag; the others know whose part is missing, if any."""
        for rank, error in enumerate(errors):
            if rank == self.faulty_rank:
                check_error(error, code, self.root, rank, self.tag)
            elif error is not None:
                assert isinstance(error, CommitError), repr(error)
                assert error.tag == self.tag and self.tag in str(error)
                assert list(error.ranks) == [self.faulty_rank]

    def check_earlier(self, needs_recovery: bool) -> None:
        """`latest` names a whole checkpoint: the one before the fault or, where the name is the same, either."""
        tag, images = self._committed
        latest = read_latest(str(self.root))
        assert latest in (tag, self.tag)
        if latest == self.tag != tag:
            images = self.images
        if needs_recovery and read_commit(str(self.root / latest)) is None:
            assert recover(str(self.root / latest)) is Recovery.ROLLED_FORWARD
        assert verify(str(self.root / latest)) == []
        assert self.content(latest) in ([images, self.images] if latest == self.tag else [images])

    def check_healed(self) -> None:
        """After `recovery`: what was left of the save has been finished or is gone."""
        if self.directory.exists() and read_commit(str(self.directory)) is not None:
            assert verify(str(self.directory)) == []


class LoneJob(Job):
    """One rank that saves files of which each is visible as soon as it is durable."""

    def save(self) -> list[BaseException | None]:
        self._begin()
        (rig,) = self.rigs
        attempt = f"{self._number}-run"
        file = rig.save(self.directory / "f0", self.images[0], attempt)
        error = rig.client.publish(attempt).exception(TIMEOUT)
        eventually(lambda: file.has_ended, "what could be removed of a lost file is removed")
        rig.wait_all_free()
        return [error]

    def check_committed(self) -> None:
        assert self.content(self.tag) == self.images
        self._committed = (self.tag, self.images)

    def check_reported(self, errors: list[BaseException | None], code: int) -> None:
        check_error(errors[0], code, self.root, 0, "")

    def check_earlier(self, needs_recovery: bool) -> None:
        assert self.content(self._committed[0]) == self._committed[1]
        if (self.directory / "f0").exists():
            assert self.content(self.tag) == self.images  # its name may not be durable: that is what was reported

    def check_healed(self) -> None:
        self.check_earlier(False)


def check_error(error: BaseException | None, code: int, root: Path, rank: int, tag: str) -> None:
    assert isinstance(error, StorageError), repr(error)
    assert error.errno == code, error
    assert (error.rank, error.tag) == (rank, tag)
    assert error.path.startswith(str(root)) and error.path in str(error)
    assert f"rank {rank}" in str(error) and tag in str(error)
