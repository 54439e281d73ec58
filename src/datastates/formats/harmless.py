"""What torch's restricted unpickler may be given: it runs no code, but takes memory and time without end if told so.

It makes a ``bytearray`` of any length, and hashes keys that are tuples of tuples, each several times the one before.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence

from datastates.contents.kinds import ZIP
from datastates.contents.parts import PICKLE_NAME
from datastates.contents.stub_pickle import Call, StubPickle, read_whole
from datastates.contents.tensor_calls import ReachError, check_reach
from datastates.contents.zip_directory import ZipDirectory
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

_FEW_ARGUMENTS = 10_000
_ARGUMENTS_PER_BYTE = 64
"""Arguments that are shared count as often as they are used; no state has so many."""

_NUM_LEGACY_PICKLES = 5
"""Magic number, protocol, system, state, keys. Source: ``torch.serialization._legacy_load`` of torch 2.13."""

_FIRST_BYTES = 1 << 20
_LARGEST_RATIO = 1032
"""Deflate makes nothing more than so many times shorter. Source: zlib, "Technical Details"."""


def harmless(pickled: bytes, path: str) -> StubPickle:
    """What a pickle says, of which the restricted unpickler takes no more memory or time than it should.

    Raises:
        CorruptCheckpointError: the pickle is malformed, or such a one.
    """
    try:
        stubs = read_whole(pickled)
    except pickle.UnpicklingError as error:
        raise CorruptCheckpointError(f"{path} cannot be loaded: {error}", path) from error
    _check(stubs, path)
    return stubs


def check_tensors(stubs: StubPickle, path: str) -> None:
    """Refuse tensors that reach beyond their storages: torch makes some longer, by memory of any content.

    What else is wrong with a tensor is left to torch.

    Raises:
        CorruptCheckpointError: there is one.
    """
    for call in stubs.calls:
        try:
            check_reach(call)
        except ReachError as error:
            raise CorruptCheckpointError(f"{path} cannot be loaded: {error}", path) from error
        except ValueError:
            continue


def check_foreign(file: FileReader, kind: str) -> None:
    """The same for a file that ``torch.load`` reads by itself: older ones, and compressed archives.

    Raises:
        CorruptCheckpointError: a pickle in it is malformed, or such a one.
        StorageError: the file cannot be read.
    """
    if kind == ZIP:
        check_tensors(harmless(_inflated(file), file.path), file.path)
        return
    if file.read(0, 1) != pickle.PROTO:
        return  # an archive of tar, which torch refuses
    begin = 0
    for _ in range(_NUM_LEGACY_PICKLES):
        stubs = _first_pickle(file, begin)
        check_tensors(stubs, file.path)
        begin += stubs.nbytes


def _first_pickle(file: FileReader, begin: int) -> StubPickle:
    """The pickle that begins there; its length is known when it has been read."""
    nbytes = _FIRST_BYTES
    while True:
        nbytes = min(nbytes, file.nbytes - begin)
        try:
            stubs = read_whole(file.read(begin, nbytes))
        except pickle.UnpicklingError as error:
            if begin + nbytes == file.nbytes:
                raise CorruptCheckpointError(f"{file.path} cannot be loaded: {error}", file.path) from error
            nbytes *= 4  # it may go on behind what was read
            continue
        _check(stubs, file.path)
        return stubs


def _inflated(file: FileReader) -> bytes:
    """The pickle of an archive, compressed or not. What the archive's checksum says of it is left to torch."""
    directory = ZipDirectory(file)
    entry = directory.entries.get(PICKLE_NAME)
    if entry is None or entry.is_stored:
        return directory.content(PICKLE_NAME)
    begin = directory.data_begin(entry)
    if entry.nbytes > _LARGEST_RATIO * entry.stored_nbytes:
        message = f"{file.path} cannot be loaded: {entry.nbytes} bytes cannot come out of {entry.stored_nbytes}"
        raise CorruptCheckpointError(message, file.path, offset=begin)
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(begin, entry.stored_nbytes), entry.nbytes)
    except zlib.error as error:
        message = f"{file.path} cannot be loaded: its pickle cannot be decompressed: {error}"
        raise CorruptCheckpointError(message, file.path, offset=begin) from error


def _check(stubs: StubPickle, path: str) -> None:
    asked = 0
    for call in stubs.calls:
        if call.class_name.endswith(".bytearray") and isinstance(call.args, tuple):
            asked += sum(size for size in call.args if type(size) is int and size > 0)
            if asked > stubs.nbytes:
                raise CorruptCheckpointError(f"{path}: the pickle asks for a bytearray of {asked} bytes", path)
    if not _has_few_arguments(stubs.calls, _FEW_ARGUMENTS + _ARGUMENTS_PER_BYTE * stubs.nbytes):
        raise CorruptCheckpointError(f"{path}: the arguments of the calls in the pickle contain themselves", path)


def _has_few_arguments(calls: Sequence[Call], limit: int) -> bool:
    """Whether the arguments of all calls have few parts, those that are referred to twice counted twice."""
    count = 0
    for call in calls:
        todo = [call.args, call.kwargs]
        while todo:
            part = todo.pop()
            if isinstance(part, (tuple, list, frozenset)):
                count += len(part)
                if count > limit:
                    return False
                todo.extend(inner for inner in part if isinstance(inner, (tuple, list, frozenset)))
    return True
