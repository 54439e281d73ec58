"""One rank's part in carrying one checkpoint to one tier: its files, its manifest; rank 0 commits.

The ranks do not talk: rank 0 marks in the first tier what it has chosen, the others follow, and rank 0 finds their
manifests in the tier. All that is needed is read from the first tier, so a process that starts anew goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from datastates.checksum import crc32
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError
from datastates.manifest import CommitRecord, FileRecord, Manifest, manifest_path, read_bytes, read_latest
from datastates.tier_settings import TierSettings
from datastates.tiers.first_tier import Placed, committed_below, is_current, pinned_names
from datastates.tiers.marks import Marks, Outcome
from datastates.tiers.selection import folder_of, to_remove
from datastates.tiers.source import checked_pieces
from datastates.tiers.store import Store


class StoppedError(Exception):
    """The process is to end: what is being carried is left as it is."""


class SupersededError(Exception):
    """The checkpoint was removed from the first tier, or saved anew, while it was carried."""


class DamagedError(Exception):
    """The checkpoint in the first tier is not what its records say: it is not carried."""


class Carrying:
    """The steps. They block, and raise StorageError where the tier or the first tier fails. Not thread safe."""

    def __init__(
        self,
        root: str,
        tier: TierSettings,
        store: Store,
        *,
        rank: int,
        world_size: int,
        is_stopped: Callable[[], bool],
    ) -> None:
        """Args:
        root: the first tier.
        tier: where to.
        store: of that tier.
        rank: of this process.
        world_size: ranks that take part now; a checkpoint of more ranks is shared out over them.
        is_stopped: asked between pieces of files.
        """
        self._root = root
        self._tier = tier
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._is_stopped = is_stopped
        self._held: dict[tuple[str, str], CommitRecord] = {}  # by name and attempt: of what there may be a part
        self._abandoned: list[tuple[str, CommitRecord, frozenset[str]]] = []

    def directory(self, placed: Placed) -> str:
        """The checkpoint's folder in the first tier."""
        return os.path.join(self._root, placed.name)

    def marks(self, placed: Placed) -> Marks:
        return Marks(self.directory(placed), placed.attempt, self._tier)

    def pinned(self, checkpoints: Sequence[Placed]) -> set[str]:
        """Names of those that are pinned in the first tier."""
        return pinned_names(self._root, checkpoints)

    def survey(self) -> tuple[list[Placed], list[Placed]]:
        """The checkpoints of the first tier that have no outcome in the tier, and those that are carried there."""
        waiting, carried = [], []
        for placed in committed_below(self._root):
            outcome = self.marks(placed).outcome
            if outcome is None:
                waiting.append(placed)
            elif outcome is Outcome.CARRIED:
                carried.append(placed)
        self._let_go(waiting, carried)
        return waiting, carried

    def clean_forgotten(self) -> None:
        """Rank 0, before anything is carried: remove what crashes have left of what nobody carries any more."""
        waiting, _ = self.survey()
        self._store.clean_forgotten([placed.name for placed in waiting])
        for placed in waiting:
            if self.marks(placed).is_begun:
                self._held[placed.name, placed.attempt] = placed.record

    def discard_abandoned(self) -> None:
        """Rank 0: remove what was sent of checkpoints that will never be committed in the tier; tried once."""
        while self._abandoned:
            self._store.discard(*self._abandoned.pop())

    def choose(self, placed: Placed) -> None:
        """Rank 0: begin to carry a checkpoint; the other ranks follow."""
        marks = self.marks(placed)
        if marks.chosen_at is None:
            self._store.begin(placed.name, placed.attempt)
            marks.choose()
        self._held[placed.name, placed.attempt] = placed.record

    def send_part(self, placed: Placed) -> int:
        """Send this rank's files and manifests, as far as they are not there. Returns the bytes that were sent.

        Raises:
            DamagedError: a file or a manifest in the first tier is not what the commit record says.
            SupersededError: the checkpoint is not there any more.
            StoppedError: `is_stopped` said so.
        """
        self._held[placed.name, placed.attempt] = placed.record
        try:
            ranks = range(self._rank, placed.record.world_size, self._world_size)
            return sum(self._send_rank(placed, rank) for rank in ranks)
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            self._check(placed)
            raise DamagedError(str(error)) from error

    def missing_ranks(self, placed: Placed, ranks: list[int]) -> list[int]:
        """Which of these ranks' manifests are not in the tier yet.

        Raises:
            SupersededError, StoppedError: as `send_part`.
            DamagedError: another rank has found its part to be damaged.
        """
        self._check(placed)
        if self.marks(placed).outcome is Outcome.DAMAGED:
            raise DamagedError("another rank's part is damaged")
        return [rank for rank in ranks if self._store.manifest(placed.name, placed.attempt, rank) is None]

    def commit(self, placed: Placed) -> None:
        """Rank 0: all manifests are there. Commit, move ``latest``, remember that it is done."""
        manifests = []
        for rank in range(placed.record.world_size):
            manifest, data = self._manifest(placed, rank)
            manifests.append((manifest, crc32(data)))
        self._check(placed)
        self._store.commit(placed.name, placed.record, manifests)
        if pinned_names(self._root, [placed]):
            self._store.set_pin(placed.name, wanted=True)
        self._move_latest(folder_of(placed.name))
        self.marks(placed).settle(Outcome.CARRIED)
        self._store.release(placed.name, placed.attempt)
        self._held.pop((placed.name, placed.attempt), None)

    def apply_retention(self) -> list[str]:
        """Rank 0: remove from the tier what its rules do not keep. Returns the names."""
        if not self._tier.has_retention:
            return []
        found = self._store.committed(None)
        latest = {folder: self._store.latest(folder) for folder in {folder_of(one.name) for one in found}}
        removals = to_remove(found, self._tier, latest=latest, pinned=self._pinned_there(found))
        for name in removals.names:
            self._store.remove(name)
        return list(removals.names)

    def is_superseded(self, placed: Placed) -> bool:
        """Whether the checkpoint was removed from the first tier, or saved anew. Raises StorageError."""
        return not is_current(self.directory(placed), placed.attempt)

    def _pinned_there(self, found: Sequence[Placed]) -> set[str]:
        """Names of those that are pinned: as the first tier says, else, where it has lost them, as the tier does."""
        there = self._store.pinned([one.name for one in found])
        here = [one for one in found if not self.is_superseded(one)]
        wanted = pinned_names(self._root, here)
        for one in here:
            if (one.name in wanted) != (one.name in there):
                self._store.set_pin(one.name, wanted=one.name in wanted)
        return (there - {one.name for one in here}) | wanted

    def _send_rank(self, placed: Placed, rank: int) -> int:
        manifest, data = self._manifest(placed, rank)
        if self._store.has_part(placed.name, placed.attempt, rank, manifest, data):
            return 0
        self._store.clean(placed.name, manifest.files)
        marks = self.marks(placed)
        receipts = marks.receipts(rank)
        nbytes = 0
        for file in manifest.files:
            self._check(placed)
            if self._store.has(placed.name, placed.attempt, file, receipts.get(file.name)):
                continue
            receipt = self._store.send(placed.name, placed.attempt, file, self._pieces(placed, file))
            nbytes += file.nbytes
            if receipt:
                marks.add_receipt(rank, file.name, receipt)
        self._check(placed)
        self._store.send_manifest(placed.name, placed.attempt, rank, data)
        return nbytes

    def _pieces(self, placed: Placed, file: FileRecord) -> Iterator[memoryview]:
        for piece in checked_pieces(self.directory(placed), file):
            if self._is_stopped():
                raise StoppedError
            yield piece

    def _manifest(self, placed: Placed, rank: int) -> tuple[Manifest, bytes]:
        path = manifest_path(self.directory(placed), placed.attempt, rank)
        data = read_bytes(path)
        if data is None:
            raise CorruptCheckpointError(f"{path}: the manifest of rank {rank} is missing", path)
        expected = placed.record.manifest_crc32[rank]
        if crc32(data) != expected:
            raise CorruptCheckpointError(f"{path}: CRC-32 {crc32(data):08x}, committed with {expected:08x}", path)
        return Manifest.from_bytes(data, path), data

    def _move_latest(self, folder: str) -> None:
        """``latest`` names what it names in the first tier; until the tier has that, what was committed last there.

        Where the first tier has none, the tier gets none.
        """
        wanted = read_latest(os.path.join(self._root, folder))
        if wanted is None:
            return
        there = self._store.committed(folder)
        if wanted not in {one.tag for one in there}:
            newest = max(there, key=lambda one: one.created_at, default=None)
            wanted = None if newest is None else newest.tag
        if wanted is not None and self._store.latest(folder) != wanted:
            self._store.set_latest(folder, wanted)

    def _check(self, placed: Placed) -> None:
        if self._is_stopped():
            raise StoppedError
        if self.is_superseded(placed):
            raise SupersededError(f"{self.directory(placed)} was removed or saved anew")

    def _let_go(self, waiting: Sequence[Placed], carried: Sequence[Placed]) -> None:
        """Give back what the store holds for checkpoints that are settled, or gone, and note what is abandoned."""
        wanted = {(placed.name, placed.attempt) for placed in waiting}
        committed = {(placed.name, placed.attempt) for placed in carried}
        files = {placed.name: frozenset(placed.record.file_nbytes) for placed in waiting}
        for key in [key for key in self._held if key not in wanted]:
            name, attempt = key
            record = self._held.pop(key)
            self._store.release(name, attempt)
            if self._rank == 0 and key not in committed:
                self._abandoned.append((name, record, files.get(name, frozenset())))
