"""What is wrong with a checkpoint: its files compared with its records."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from datastates.attempt_folder import checkpoint_of
from datastates.contents.parts import Part, names_within, parts_of
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.fqns import listed
from datastates.manifest import (
    COMMIT_NAME,
    METADATA_NAME,
    FileRecord,
    commit_path,
    committed_files,
    committed_manifests,
    read_commit,
)
from datastates.paths import resolved
from datastates.reading import NUM_THREADS, Digests, FileReader, Progress, tiles_of
from datastates.storage import size_of
from datastates.system_calls import storage_errors

RACES = 3
"""So often reading starts over because the checkpoint was saved again under its tag meanwhile."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint.

    Attributes:
        path: the file, or the folder.
        message: where and what, with what was expected and found.
        offset: where in the file, None where it is not one place.
        fqn: the tensor whose bytes are damaged, the first where they may be several; empty for anything else.
        expected: the CRC-32 that the bytes should have, None where it is not about that.
        found: the CRC-32 that they have.
    """

    path: str
    message: str
    offset: int | None = None
    fqn: str = ""
    expected: int | None = None
    found: int | None = None


def check(directory: str) -> list[Problem]:
    """What is wrong with a checkpoint as far as names and sizes tell; empty when nothing is. Reads no tensor.

    Raises:
        StorageError: a record or a file cannot be looked at.
    """
    try:
        record = read_commit(directory)
        if record is None:
            return [Problem(directory, f"not a complete checkpoint: no {METADATA_NAME}/{COMMIT_NAME}")]
        files = [file for manifest in committed_manifests(directory, record) for file in manifest.files]
    except CorruptCheckpointError as error:
        return [Problem(error.path, str(error))]
    problems = list(_check_sizes(directory, files))
    if {file.name: file.nbytes for file in files} != record.file_nbytes:
        problems.append(Problem(commit_path(directory), "number or size of the files differ from the manifests'"))
    return problems


def verify(directory: str, *, num_threads: int = NUM_THREADS, progress: Progress | None = None) -> list[Problem]:
    """`check`, and every byte compared with its checksum. Reads the whole checkpoint, several files at a time.

    Where it is saved again under its tag meanwhile, it is read again.

    Args:
        directory: the checkpoint.
        num_threads: so many reads are under way at a time, each into a buffer of 4 MiB.
        progress: hears how many bytes have been read since it was called last; not called by two threads at once.
    """
    for _ in range(RACES):
        stamp = folder_stamp(directory)
        problems = _verify(directory, num_threads, progress)
        if not problems or folder_stamp(directory) == stamp:
            return problems
    return _verify(directory, num_threads, progress)


def _verify(directory: str, num_threads: int, progress: Progress | None) -> list[Problem]:
    problems = check(directory)
    wrong = {problem.path for problem in problems}
    try:
        files = committed_files(directory).values()
    except CorruptCheckpointError:
        return problems
    sound = [file for file in files if os.path.join(directory, file.name) not in wrong]
    if not sound:
        return problems
    lock = threading.Lock()

    def report(nbytes: int) -> None:
        if progress is not None:
            with lock:
                progress(nbytes)

    at_once = min(num_threads, len(sound))
    with ThreadPoolExecutor(at_once, thread_name_prefix="datastates-verify") as executor:
        futures = [
            executor.submit(_verify_file, directory, file, num_threads // at_once, report)
            for file in sorted(sound, key=lambda file: -file.nbytes)
        ]
        for future in futures:
            problems.extend(future.result())
    return problems


def verify_file(directory: str, file: FileRecord) -> list[Problem]:
    """What is wrong with the bytes of one file of a checkpoint: the tensors, or what else, that are damaged.

    Reads all of the file.
    """
    return _verify_file(directory, file, 1, None)


def record_of(path: str) -> FileRecord | None:
    """What the checkpoint that a file belongs to says of it; None where it belongs to none that is committed.

    Raises:
        CorruptCheckpointError: the record of the checkpoint is damaged.
        StorageError: it cannot be read.
    """
    path = resolved(path)
    directory = checkpoint_of(path)
    record = None if directory is None else read_commit(directory)
    if directory is None or record is None:
        return None
    name = os.path.relpath(path, directory)
    if name not in record.file_nbytes:
        return None
    for manifest in committed_manifests(directory, record, first=_ranks_in(name)):
        for file in manifest.files:
            if file.name == name:
                return file
    return None


def record_stamp(path: str) -> tuple[int, int, int] | None:
    """What changes whenever the checkpoint that a file belongs to is committed again; None while it is not committed.

    Raises:
        StorageError: the record cannot be looked at.
    """
    directory = checkpoint_of(resolved(path))
    return None if directory is None else folder_stamp(directory)


def folder_stamp(directory: str) -> tuple[int, int, int] | None:
    """As `record_stamp`, of a checkpoint's folder."""
    record = commit_path(directory)
    with storage_errors("look at", record):
        try:
            status = os.stat(record)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _ranks_in(name: str) -> tuple[int, ...]:
    """The numbers in a file's name: the rank that wrote it is likely among them, so that not all manifests are read."""
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", name))


def _verify_file(directory: str, file: FileRecord, num_threads: int, progress: Progress | None) -> list[Problem]:
    path = os.path.join(directory, file.name)
    digests = Digests()
    cuts = range(0, file.nbytes, file.slab_nbytes)
    try:
        with FileReader(path, num_threads=num_threads) as reader:
            reader.run(tiles_of(0, file.nbytes), digests, cuts, progress)
            problems: dict[int | None, Problem] = {}
            for begin, expected in zip(cuts, file.crc32, strict=True):
                end = min(begin + file.slab_nbytes, file.nbytes)
                found = digests.of(begin, end)
                if found != expected:
                    for problem in _locate(reader, begin, end, expected, found or 0):
                        problems.setdefault(problem.offset, problem)
            return list(problems.values())
    except (StorageError, CheckpointNotFoundError) as error:
        return [Problem(path, str(error))]
    except CorruptCheckpointError as error:
        return [Problem(path, str(error), error.offset)]


def _locate(reader: FileReader, begin: int, end: int, expected: int, found: int) -> list[Problem]:
    """The parts of a file that make a range of it wrong: exactly, where the file has checksums of its own."""
    try:
        parts = [part for part in parts_of(reader) if part.begin < end and part.end > begin]
    except CorruptCheckpointError:
        parts = []  # header or directory are what is damaged
    exact = []
    for part in parts:
        if part.crc32 is not None and (actual := _crc32_of(reader, part)) != part.crc32:
            exact.append(_problem(reader.path, [part.name], part.begin, part.end, part.crc32, actual, part.is_tensor))
    if exact:
        return exact
    unknown = [part for part in parts if part.crc32 is None]
    names = names_within(unknown, begin, end)
    is_tensor = any(part.is_tensor and part.name == names[0] for part in unknown)
    return [_problem(reader.path, names, begin, end, expected, found, is_tensor)]


def _crc32_of(reader: FileReader, part: Part) -> int:
    digests = Digests()
    reader.run(tiles_of(part.begin, part.end), digests)
    return digests.of(part.begin, part.end) or 0


def _problem(path: str, names: list[str], begin: int, end: int, expected: int, found: int, is_tensor: bool) -> Problem:
    message = f"{listed(names)}: bytes {begin} to {end} have CRC-32 {found:08x}, expected {expected:08x}"
    return Problem(path, message, begin, names[0] if is_tensor else "", expected, found)


def _check_sizes(directory: str, files: Iterable[FileRecord]) -> Iterator[Problem]:
    for file in files:
        path = os.path.join(directory, file.name)
        with storage_errors("look at", path):
            nbytes = size_of(path)
        if nbytes is None:
            yield Problem(path, "the file is missing")
        elif nbytes != file.nbytes:
            yield Problem(path, f"the file has {nbytes} bytes, expected {file.nbytes}", min(nbytes, file.nbytes))
