"""What is wrong with a checkpoint: its files compared with its records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from datastates.checksum import crc32
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.manifest import (
    COMMIT_NAME,
    METADATA_NAME,
    FileRecord,
    commit_path,
    committed_files,
    committed_manifests,
    read_commit,
)
from datastates.storage import read_chunks

_READ_BYTES = 4 << 20  # a few of these per second keep up with any disk, and weigh nothing


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint: where and what; `offset` where it is one place of a file."""

    path: str
    message: str
    offset: int | None = None


def check(directory: str) -> list[Problem]:
    """What is wrong with a checkpoint as far as names and sizes tell; empty when nothing is. Reads no tensor."""
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


def verify(directory: str) -> list[Problem]:
    """`check`, and every byte compared with its checksum. Reads the whole checkpoint."""
    problems = check(directory)
    wrong = {problem.path for problem in problems}
    try:
        files = committed_files(directory)
    except CorruptCheckpointError:
        return problems
    for file in files.values():
        if os.path.join(directory, file.name) not in wrong:
            problems.extend(verify_file(directory, file))
    return problems


def verify_file(directory: str, file: FileRecord) -> Iterator[Problem]:
    """What is wrong with the bytes of one file of a checkpoint. Reads all of it."""
    path = os.path.join(directory, file.name)
    for index, expected in enumerate(file.crc32):
        begin = index * file.slab_nbytes
        end = min(begin + file.slab_nbytes, file.nbytes)
        value = 0
        try:
            for chunk in read_chunks(path, begin, end, _READ_BYTES):
                value = crc32(chunk, value)
        except StorageError as error:
            yield Problem(path, str(error), begin)
            return
        if value != expected:
            message = f"bytes {begin} to {end} have CRC-32 {value:08x}, expected {expected:08x}"
            yield Problem(path, message, begin)


def _check_sizes(directory: str, files: Iterable[FileRecord]) -> Iterator[Problem]:
    for file in files:
        path = os.path.join(directory, file.name)
        try:
            nbytes = os.stat(path).st_size
        except FileNotFoundError:
            yield Problem(path, "the file is missing")
            continue
        if nbytes != file.nbytes:
            yield Problem(path, f"the file has {nbytes} bytes, expected {file.nbytes}", min(nbytes, file.nbytes))
