"""Brings checkpoints back from a further tier to the directory that they are loaded from."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from datastates.attempt_folder import AttemptLock
from datastates.checksum import crc32
from datastates.commit import roll_forward
from datastates.directories import make_directories
from datastates.errors import CheckpointNotFoundError
from datastates.integrity import check, verify_file
from datastates.locks import open_locked
from datastates.manifest import CommitRecord, FileRecord, manifest_path
from datastates.partial_names import partial_path
from datastates.pins import pin
from datastates.storage import PartialFile, create_partial, reopen_partial, size_of, write_atomically
from datastates.system_calls import storage_errors
from datastates.tier_settings import TierSettings
from datastates.tiers.first_tier import Placed, is_current
from datastates.tiers.marks import Marks, Outcome
from datastates.tiers.source import check_piece
from datastates.tiers.store import Store, manifests_in, open_store, record_in

_LOCK_SUFFIX = ".datastates.fetch"
_NUM_READS = 4
"""Slabs read at a time; they bound the memory: four times 16 MiB."""


def placed_in(tier: TierSettings, folder: str | None = "") -> list[Placed]:
    """The committed checkpoints of a tier, in a folder of it; None: in all of it.

    Raises:
        ConfigError: it is an object store, and the library for them is missing.
        StorageError: the tier cannot be read.
    """
    return open_store(tier, _ignore).committed(folder)


def fetch(tier: TierSettings, name: str, directory: str, *, again: bool = False) -> CommitRecord:
    """Bring a checkpoint of a tier to a directory, compared with its checksums on the way. Blocks.

    It appears there whole or not at all. Files that an earlier, interrupted call has brought are not fetched again.
    Does nothing where the directory holds it already, with all its files. Of several processes one works, the others
    wait.

    Args:
        tier: where it is.
        name: of the checkpoint, relative to the tier's root.
        directory: the folder that becomes the checkpoint; made where it is missing. ``latest`` is left alone.
        again: what the directory holds is not trusted: it is replaced, also where sizes are right.

    Raises:
        CheckpointNotFoundError: it is not committed there.
        CorruptCheckpointError: what is there is not what its records say; the directory is as before.
        ConfigError: the library for object stores is missing.
        StorageError: the tier or the directory fails.
    """
    store = open_store(tier, _ignore)
    with _alone(directory):
        record = record_in(store, name)
        if record is None:
            raise CheckpointNotFoundError(f"{store.url} holds no complete checkpoint {name!r}")
        if not again and is_current(directory, record.attempt) and not check(directory):
            return record
        record = _fetch(store, name, directory, record)
        Marks(directory, record.attempt, tier).settle(Outcome.CARRIED, "it was fetched from there")
        return record


@contextlib.contextmanager
def _alone(directory: str) -> Iterator[None]:
    """Hold off other processes that fetch to the same directory."""
    parent, name = os.path.split(os.path.abspath(directory))
    path = os.path.join(parent, f".{name}{_LOCK_SUFFIX}")
    with storage_errors("lock", path):
        make_directories(parent)
        while True:
            try:
                descriptor = open_locked(path, os.O_RDWR | os.O_CREAT)
                break
            except OSError as error:
                if error.errno != errno.EBUSY:  # another process fetches for longer than that call waits
                    raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it stays, empty: no harm
            os.unlink(path)
        os.close(descriptor)


def _fetch(store: Store, name: str, directory: str, record: CommitRecord) -> CommitRecord:
    manifests = manifests_in(store, name, record)
    lock = AttemptLock(directory, record.attempt)
    partials: list[PartialFile] = []
    try:
        for manifest, _ in manifests:
            for file in manifest.files:
                partials.append(_fetch_file(store, name, directory, record.attempt, file))
        for manifest, data in manifests:
            write_atomically(manifest_path(directory, record.attempt, manifest.rank), data)
        pairs = [(manifest, crc32(data)) for manifest, data in manifests]
        fetched = roll_forward(directory, pairs, record.tag, record.committed_at)
        if store.pinned([name]):
            pin(directory)
        return fetched
    finally:
        for partial in partials:
            partial.close()
        lock.release()


def _fetch_file(store: Store, name: str, directory: str, attempt: str, file: FileRecord) -> PartialFile:
    """A file under its partial name, durable and compared with its checksums."""
    path = os.path.join(directory, file.name)
    partial = partial_path(path, attempt)
    is_whole = size_of(partial) == file.nbytes
    if is_whole and not verify_file(directory, _named(file, os.path.relpath(partial, directory))):
        return reopen_partial(path, attempt, file.nbytes)
    target = create_partial(path, attempt, file.nbytes)
    try:
        for begin, piece in _pieces(store, name, file):
            target.write(piece, begin)
        target.make_durable()
    except BaseException:
        target.remove()
        raise
    return target


def _named(file: FileRecord, name: str) -> FileRecord:
    return FileRecord(name, file.nbytes, file.slab_nbytes, file.crc32)


def _pieces(store: Store, name: str, file: FileRecord) -> Iterator[tuple[int, memoryview]]:
    """The slabs of a file in order, some read ahead. Raises CorruptCheckpointError for a wrong checksum."""
    where = f"{store.url}/{name}/{file.name}"

    def read(index: int) -> memoryview:
        begin = index * file.slab_nbytes
        piece = store.read_piece(name, file.name, begin, min(begin + file.slab_nbytes, file.nbytes))
        check_piece(where, begin, piece, file.crc32[index])
        return piece

    with ThreadPoolExecutor(_NUM_READS, thread_name_prefix="datastates-fetch") as executor:
        for first in range(0, len(file.crc32), _NUM_READS):
            indices = range(first, min(first + _NUM_READS, len(file.crc32)))
            for index, piece in zip(indices, executor.map(read, indices), strict=True):
                yield index * file.slab_nbytes, piece


def _ignore(_: str) -> None:
    """Nobody need be told of unfinished uploads here: nothing is sent."""
