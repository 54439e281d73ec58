"""Power loss at every point of a save: what the disk may hold then is recovered, loaded and saved into again.

A scenario saves through real flusher processes that record their calls (`faults.storage_recorder`). After each
call the model of the disk (`faults.disk_model`) gives several states that a power loss may leave there. Of every one:

- `clean_leftovers` brings it to a whole checkpoint, old or new; new, once the save has been reported as committed;
- ``latest`` names a checkpoint of which every byte is right; checkpoints under other tags are untouched,
  but for those whose removal had begun, which are there as a whole or not at all;
- cleaning again changes nothing, nor does a power loss in the middle of cleaning do harm;
- the next save goes well, also over the files of removed ones, and changes no other checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from datastates import spares
from datastates.checkpoint_engine import check_committed
from datastates.integrity import verify
from datastates.manifest import LATEST_NAME, committed_files, read_commit, read_latest
from datastates.recovery import clean_leftovers
from datastates.removal import remove_checkpoint
from faults import storage_recorder
from faults.disk_model import Disk, Tree, read_tree, write_tree
from faults.storage_recorder import Call, Recorder, read_log
from flusher.rig import SLAB, TIMEOUT, Rig, image_of

Files = dict[str, bytes]

SAVES = "saves"  # the folder of checkpoints; the trainer makes it and does not sync its name
_FLUSHER = (
    "import sys; from datastates import spares; from datastates.flusher.process import main;"
    f" spares.MIN_SPARE_BYTES = {storage_recorder.SPARE_BYTES}; main(sys.argv[1:])"
)
COUNTS = ("cut_points", "states", "none", "old", "new", "cleanings_cut")
ALONE = "alone"  # as a tag: the files are lone files, in a folder of this name


@dataclass(frozen=True)
class Save:
    """One save of a scenario.

    Attributes:
        ranks: the files of each.
        retired: tag of the checkpoint that is removed once this save is committed: the next ones write over its files.
    """

    tag: str
    ranks: tuple[Files, ...]
    retired: str = ""

    @property
    def files(self) -> Files:
        return {name: image for files in self.ranks for name, image in files.items()}


@dataclass(frozen=True)
class Scenario:
    name: str
    saves: tuple[Save, ...]


@dataclass(frozen=True)
class Recording:
    """Attributes:
    root_inode: of the folder below which the calls are.
    """

    scenario: Scenario
    root_inode: int
    calls: list[Call]


class PowerLossError(AssertionError):
    """A power loss does harm."""


@dataclass(frozen=True)
class Past:
    """What had been done when the power went: saves reported as committed, checkpoints whose removal was begun."""

    num_committed: int = 0
    retired: tuple[str, ...] = ()

    def after(self, call: Call) -> Past:
        if call[0] == "mark":
            return replace(self, num_committed=self.num_committed + 1)
        return replace(self, retired=(*self.retired, call[1])) if call[0] == "retire" else self


@dataclass
class Trial:
    """States that were tried, and what became of them."""

    choices: int
    seed: int
    scratch: Path
    rig: Rig
    counts: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)


def _files(seed: int, *, extra: bool = False) -> Files:
    """Files of several slabs, one block and no byte; of equal sizes for all seeds."""
    files = {"f": image_of(SLAB + 4097, seed), "g": image_of(300, seed + 100), "sub/h": image_of(9000, seed + 200)}
    return files | ({"more": image_of(4096, seed), "empty": b""} if extra else {})


SCENARIOS = (
    Scenario("another tag", (Save("s1", (_files(1),)), Save("s2", (_files(2, extra=True),)))),
    Scenario("the same tag", tuple(Save("s1", (_files(seed, extra=seed == 2),)) for seed in (1, 2, 3))),
    Scenario("two ranks", tuple(Save("s1", (_files(seed), {"r": image_of(5000, seed)})) for seed in (1, 2))),
    Scenario(
        "over removed ones",
        tuple(
            Save(f"s{seed}", (_files(seed, extra=seed == 2),), retired=f"s{seed - 1}" if seed > 1 else "")
            for seed in (1, 2, 3, 4)
        ),
    ),
    Scenario("lone files", tuple(Save(ALONE, ({"f": _files(seed)["f"]},)) for seed in (1, 2))),
)


def run_power_loss(choices: int, seed: int, scenarios: Sequence[Scenario] = SCENARIOS) -> dict[str, int]:
    """Try ``choices`` states at every cut point of the scenarios, the same for the same seed.

    Returns:
        ``cut_points``; ``states`` tried, without repetitions; of these ``none``, ``old`` and ``new``: what was there
        after recovery; ``cleanings_cut``: states whose recovery was cut, too.

    Raises:
        PowerLossError: a state in which a promise is broken.
    """
    total: Counter[str] = Counter()
    for scenario in scenarios:
        total += try_all(record(scenario), choices, seed)
    return {name: total[name] for name in COUNTS}


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """In memory where there is such a folder: what a real disk does here proves nothing."""
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def record(scenario: Scenario) -> Recording:
    """Make the saves of a scenario, one after the other, each reported as committed before the next begins."""
    num_ranks = len(scenario.saves[0].ranks)
    with scratch_folder() as scratch:
        log, root = str(scratch / "log"), scratch / "root"
        root.mkdir()
        inode = root.stat().st_ino
        with contextlib.closing(Recorder(log, str(root))) as recorder:
            recorder.mkdir(root / SAVES)
            with contextlib.ExitStack() as stack:
                command = (sys.executable, storage_recorder.__file__, log, str(root))
                rigs = [
                    stack.enter_context(Rig(rank=rank, world_size=num_ranks, command=command))
                    for rank in range(num_ranks)
                ]
                for number, save in enumerate(scenario.saves):
                    folder = root / SAVES / save.tag
                    if not folder.exists():
                        recorder.mkdir(folder)  # as DeepSpeed does, long before the flusher knows of it
                    _save(rigs, save, folder, f"run-{number}")
                    recorder.mark()
                    if save.retired:
                        recorder.retire(save.retired)
                        with recorder.installed(), _small_spares():
                            remove_checkpoint(str(root / SAVES / save.retired), spare=True)
        return Recording(scenario, inode, read_log(log))


@contextlib.contextmanager
def _small_spares() -> Iterator[None]:
    usual, spares.MIN_SPARE_BYTES = spares.MIN_SPARE_BYTES, storage_recorder.SPARE_BYTES
    try:
        yield
    finally:
        spares.MIN_SPARE_BYTES = usual


def _save(rigs: Sequence[Rig], save: Save, folder: Path, attempt: str) -> None:
    for rig, files in zip(rigs, save.ranks, strict=True):
        for name, image in files.items():
            rig.save(folder / name, image, attempt)
    if save.tag == ALONE:
        futures = [rig.client.publish(attempt) for rig in rigs]
    else:
        futures = [rig.commit(folder, attempt, tag=save.tag) for rig in rigs]
    for future in futures:
        future.result(TIMEOUT)


def try_all(recording: Recording, choices: int, seed: int) -> Counter[str]:
    """Cut a recording after each call."""
    with scratch_folder() as scratch, Rig(command=(sys.executable, "-c", _FLUSHER)) as rig:
        trial = Trial(choices, seed, scratch, rig)
        disk = Disk(recording.root_inode)
        past = Past()
        for number, call in enumerate(recording.calls):
            disk.apply(call)
            past = past.after(call)
            trial.counts["cut_points"] += 1
            for choice in range(choices):
                tree = disk.tree(choice, f"{seed}/{number}")
                key = hash((past, *tree.items()))
                if key not in trial.seen:
                    trial.seen.add(key)
                    where = f"{recording.scenario.name}, after call {number} {call[:3]!r:.100}, choice {choice}"
                    _try_state(trial, recording.scenario.saves, past, tree, f"{where}, seed {seed}")
        return trial.counts


def _try_state(trial: Trial, saves: Sequence[Save], past: Past, tree: Tree, where: str) -> None:
    number = trial.counts["states"]
    trial.counts["states"] += 1
    root = trial.scratch / f"state-{number}"
    write_tree(str(root), tree)
    disk = Disk.of(str(root))
    try:
        calls = _recorded_cleaning(trial, root)
        recovered = read_tree(str(root))
        trial.counts[_check(root, saves, past)] += 1
        _expect(_clean(root) == [] and read_tree(str(root)) == recovered, "cleaning again changes something")
        _check_next_save(trial, root, saves, f"next-{number}")
        shutil.rmtree(root)
        if calls:
            _cut_cleaning(trial, disk, calls, saves, past)
    except Exception as error:
        raise PowerLossError(f"{where}: {error!r}; the disk held {sorted(tree)}") from error


def _clean(root: Path) -> list[str]:
    folder = root / SAVES
    return clean_leftovers(str(folder)) if folder.exists() else []


def _recorded_cleaning(trial: Trial, root: Path) -> list[Call]:
    log = trial.scratch / "log"
    with contextlib.closing(Recorder(str(log), str(root))) as recorder, recorder.installed():
        _clean(root)
    calls = read_log(str(log))
    log.unlink()
    return calls


def _cut_cleaning(trial: Trial, disk: Disk, calls: list[Call], saves: Sequence[Save], past: Past) -> None:
    """The power goes again while the state is cleaned: one cut point per state, another in each."""
    number = trial.counts["cleanings_cut"]
    trial.counts["cleanings_cut"] += 1
    for call in calls[: 1 + number % len(calls)]:
        disk.apply(call)
    root = trial.scratch / f"again-{number}"
    write_tree(str(root), disk.tree(number % max(trial.choices, 4), f"{trial.seed}/{number}"))
    _clean(root)
    _check(root, saves, past)
    shutil.rmtree(root)


def _check(root: Path, saves: Sequence[Save], past: Past) -> str:
    """Compare with what may be there; says whether the save in flight is."""
    left = [str(path) for path in root.rglob("*.partial")]
    _expect(not left, f"left behind: {left}")
    num_committed = past.num_committed
    tags = dict.fromkeys(save.tag for save in saves)
    found = {tag: _load(root / SAVES / tag, tag) for tag in tags}
    for tag in tags:
        committed = [save.files for save in saves[:num_committed] if save.tag == tag]
        allowed = [
            *committed[-1:],
            *(save.files for save in saves[num_committed : num_committed + 1] if save.tag == tag),
        ]
        is_right = found[tag] in allowed or (found[tag] is None and (not committed or tag in past.retired))
        _expect(is_right, f"{tag} holds {_describe(found[tag])}, allowed: {[_describe(files) for files in allowed]}")
    if ALONE not in tags:
        _check_latest(root, saves, num_committed, found)
    in_flight = saves[num_committed : num_committed + 1]
    if any(found[save.tag] == save.files for save in in_flight) or not in_flight:
        return "new"
    return "old" if num_committed else "none"


def _check_latest(root: Path, saves: Sequence[Save], num_committed: int, found: dict[str, Files | None]) -> None:
    latest = read_latest(str(root / SAVES))
    allowed = [save.tag for save in saves[max(num_committed - 1, 0) : num_committed + 1]]
    _expect(latest in allowed or (latest is None and not num_committed), f"latest says {latest}, allowed: {allowed}")
    _expect(latest is None or found[latest] is not None, f"latest names {latest}, which is no checkpoint")


def _load(folder: Path, tag: str) -> Files | None:
    """The files of a checkpoint by name, None if there is none. All bytes are compared with their checksums."""
    if tag == ALONE:
        names = os.listdir(folder) if folder.exists() else []
        return {name: (folder / name).read_bytes() for name in names} or None
    if read_commit(str(folder)) is None:
        return None
    problems = verify(str(folder))
    _expect(not problems, f"{problems}")
    files = {}
    for name in committed_files(str(folder)):
        check_committed(str(folder / name))
        files[name] = (folder / name).read_bytes()
    return files


def _check_next_save(trial: Trial, root: Path, saves: Sequence[Save], attempt: str) -> None:
    save = saves[-1]
    others = {other.tag: _load(root / SAVES / other.tag, other.tag) for other in saves if other.tag != save.tag}
    (root / SAVES).mkdir(exist_ok=True)
    files = {name: image[::-1] for name, image in save.files.items()}
    _save([trial.rig], Save(save.tag, (files,)), root / SAVES / save.tag, attempt)
    _expect(_load(root / SAVES / save.tag, save.tag) == files, "the next save is not what can be loaded")
    for tag, held in others.items():
        _expect(_load(root / SAVES / tag, tag) == held, f"the next save has changed {tag}")
    if save.tag != ALONE:
        _expect(read_latest(str(root / SAVES)) == save.tag, f"{LATEST_NAME} does not name the next save")


def _describe(files: Files | None) -> str:
    return "nothing" if files is None else str({name: data[:4].hex() for name, data in files.items()})


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise PowerLossError(message)
