"""What must hold of a folder of checkpoints once the processes that wrote there are gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datastates import manifest, recovery
from datastates.attempt_folder import attempts
from datastates.errors import DataStatesError
from datastates.integrity import verify
from stress.contents import BEST, LONE, PARTS, Moment, file_name, read_moment

_NUM_KEPT = 2


@dataclass
class Promised:
    """What the ranks were told before they died, so what must be there: at least this, by tag and by rank."""

    latest: Moment | None = None
    committed: dict[str, Moment] = field(default_factory=dict)
    published: dict[int, Moment] = field(default_factory=dict)

    def move_latest(self, moment: Moment) -> None:
        self.latest = max(self.latest or moment, moment)

    def commit(self, tag: str, moment: Moment) -> None:
        self.committed[tag] = max(self.committed.get(tag, moment), moment)

    def publish(self, rank: int, moment: Moment) -> None:
        self.published[rank] = max(self.published.get(rank, moment), moment)


def complete(directory: str) -> list[str]:
    """The tags that have a commit record."""
    return sorted(name for name in os.listdir(directory) if os.path.exists(manifest.commit_path(f"{directory}/{name}")))


def problems_before_recovery(directory: str) -> Iterator[str]:
    """What a reader must never see, whoever has just died: a checkpoint that looks complete and is not."""
    tag = manifest.read_latest(directory)
    # A tag that is saved again is withdrawn for the moment of its replacement; the next start finishes that.
    if tag is not None and tag != BEST and tag not in complete(directory):
        yield f"latest names {tag}, which is not complete, before recovery"
    for name in complete(directory):
        yield from _problems_of(directory, name)


def recover(directory: str, problems: list[str]) -> int:
    """Recover as the next start does. Returns in how many folders there was something to do."""
    try:
        return len(recovery.clean_leftovers(directory))
    except (DataStatesError, OSError) as error:
        problems.append(f"recovery: {error!r}")
        return 0


def problems(directory: str, promised: Promised) -> Iterator[str]:
    """What is wrong once nobody writes and all is recovered; looks at every byte."""
    again = recovery.clean_leftovers(directory)
    if again:
        yield f"a second recovery found more to do in {again}"
    tag = manifest.read_latest(directory)
    if tag is None and promised.latest is not None:
        yield f"there is no latest, {promised.latest} was committed"
    if tag is not None and tag not in complete(directory):
        yield f"latest names {tag!r}, which is not complete"
        return
    for name in complete(directory):
        yield from _problems_of(directory, name)
    moments = {name: _moment(directory, name) for name in complete(directory)}
    for name, least in promised.committed.items():
        if (found := moments.get(name)) is None or found < least:
            yield f"{name} was committed at {least}, found {found}"
    found = None if tag is None else moments[tag]
    if found is not None and promised.latest is not None and found < promised.latest:
        yield f"latest names {tag} of {found}, {promised.latest} was committed"
    yield from _lone_problems(directory, promised)
    yield from _leftovers(directory)


def _problems_of(directory: str, name: str) -> Iterator[str]:
    for problem in verify(f"{directory}/{name}"):
        yield f"{problem.path}: {problem.message}"
    record = manifest.read_commit(f"{directory}/{name}")
    if record is None:
        return
    try:
        names = set(manifest.committed_files(f"{directory}/{name}"))
        expected = {file_name(rank, part) for rank in range(record.world_size) for part in PARTS}
        if names != expected:
            yield f"{name} has the files {sorted(names)}, expected {sorted(expected)}"
        read_moment(os.path.join(directory, name, file) for file in names)
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes of a reader is what is looked for
        yield f"{name}: {error!r}"


def _moment(directory: str, name: str) -> Moment | None:
    try:
        return read_moment([os.path.join(directory, name, file_name(0, PARTS[0]))])
    except Exception:  # noqa: BLE001 - reported by _problems_of
        return None


def _lone_problems(directory: str, promised: Promised) -> Iterator[str]:
    folder = Path(directory, LONE)
    for rank, least in promised.published.items():
        if not (folder / file_name(rank, LONE)).exists():
            yield f"the lone file of rank {rank} is missing, {least} was published"
    for path in folder.glob("*.pt"):
        try:
            moment = read_moment([str(path)])
        except Exception as error:  # noqa: BLE001 - see _problems_of
            yield f"{path}: {error!r}"
            continue
        least = promised.published.get(int(path.name.removeprefix("rank").split("-")[0]), moment)
        if moment < least:
            yield f"{path} is of {moment}, {least} was published"


def _leftovers(directory: str) -> Iterator[str]:
    """Whatever belongs to nobody: no file of a save that did not come to its end may stay."""
    for path in Path(directory).rglob("*"):
        if path.name.endswith((".partial", ".tmp")):
            yield f"left behind: {path}"
    for name in os.listdir(directory):
        folder = os.path.join(directory, name)
        if name == LONE or not os.path.isdir(folder):
            continue
        try:
            record = manifest.read_commit(folder)
        except DataStatesError as error:
            yield repr(error)
            continue
        kept = [] if record is None else [record.attempt]
        if (left := attempts(folder)) != kept:
            yield f"{folder}: attempts {left} have folders, expected {kept}"
        files = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        if record is None and files:
            yield f"{folder} is not complete and shows the files {files}"


def delete_old(directory: str, promised: Promised) -> None:
    """Delete all but the last few checkpoints and what ``latest`` names."""
    names = [name for name in complete(directory) if name not in (BEST, manifest.read_latest(directory))]
    names.sort(key=lambda name: int(name.removeprefix("step")))
    for name in names[:-_NUM_KEPT]:
        shutil.rmtree(os.path.join(directory, name))
        promised.committed.pop(name, None)


def latest_moment(directory: str) -> Moment | None:
    tag = manifest.read_latest(directory)
    return None if tag is None else _moment(directory, tag)
