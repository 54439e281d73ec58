"""Reads of one file: straight into memory, past the page cache or from it, however the system answers."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import threading
import zlib
from typing import Any

import pytest
import safetensors.torch
import torch

from datastates import load
from datastates.config import DIRECT_IO_BYTES
from datastates.direct_memory import memory_alignment
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.page_cache import cached_nbytes
from datastates.reading import TILE_BYTES, Digests, FileReader, Tile, copy_bytes, fresh_memory, page_ceil, page_floor

NBYTES = 3 * TILE_BYTES + 12345


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(NBYTES)


@pytest.fixture
def path(tmp_path: pathlib.Path, content: bytes) -> str:
    path = tmp_path / "x"
    path.write_bytes(content)
    return str(path)


def read_whole(file: FileReader, **options: Any) -> bytes:
    memory = fresh_memory(page_ceil(file.nbytes))
    file.run([Tile(0, file.nbytes, memoryview(memory))], **options)
    return memory[: file.nbytes]


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_whole_file(path: str, content: bytes, num_threads: int, is_cached: bool) -> None:
    if not is_cached:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with FileReader(path, num_threads=num_threads) as file:
        assert read_whole(file) == content


def test_parts_for_sinks_and_memory(path: str, content: bytes) -> None:
    found: dict[int, bytes] = {}

    def take(begin: int) -> Any:
        return lambda data: found.__setitem__(begin, bytes(data))

    begin, end = 5000, TILE_BYTES + 4999
    memory = fresh_memory(page_ceil(end) - page_floor(begin))
    tiles = [
        Tile(77, 4000, sinks=((77, 99, take(77)), (3000, 4000, take(3000)))),
        Tile(begin, end, memoryview(memory)),
        Tile(NBYTES - 3, NBYTES, sinks=((NBYTES - 3, NBYTES, take(NBYTES - 3)),)),
    ]
    with FileReader(path) as file:
        file.run(tiles)
    assert found == {77: content[77:99], 3000: content[3000:4000], NBYTES - 3: content[-3:]}
    assert memory[begin - page_floor(begin) : end - page_floor(begin)] == content[begin:end]


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("begin", [0, 77, 4096])
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_memory_that_lies_anywhere(
    path: str, content: bytes, monkeypatch: pytest.MonkeyPatch, is_cached: bool, begin: int, shift: int
) -> None:
    """In step with the file's pages (shift 0) or not; what lies around it stays as it was."""
    monkeypatch.setattr("datastates.reading.cached_nbytes", lambda _descriptor, _begin, nbytes: nbytes * is_cached)
    for nbytes in (10, 5000, TILE_BYTES + 6000, NBYTES - begin):
        memory = memoryview(fresh_memory(nbytes + 3 * DIRECT_IO_BYTES))
        first = begin % DIRECT_IO_BYTES + shift
        memory[:] = b"#" * len(memory)
        digests = Digests()
        tile = Tile(begin, begin + nbytes, target=memory[first : first + nbytes])
        with FileReader(path) as file:
            file.run([tile], digests)
        assert memory[first : first + nbytes] == content[begin : begin + nbytes]
        assert set(bytes(memory[:first])) <= {ord("#")} and set(bytes(memory[first + nbytes :])) == {ord("#")}
        assert digests.of(begin, begin + nbytes) == zlib.crc32(content[begin : begin + nbytes])


def test_memory_in_step_with_the_pages_of_the_file_needs_no_copy(
    path: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastates.reading.cached_nbytes", lambda *_: 0)
    copied: list[int] = []
    monkeypatch.setattr("datastates.reading.copy_bytes", lambda target, source: copied.append(len(source)))
    memory = memoryview(fresh_memory(NBYTES + DIRECT_IO_BYTES))
    with FileReader(path) as file:
        if file._direct < 0:
            pytest.skip("the file system of the tests has no O_DIRECT")
        file.run([Tile(77, NBYTES, target=memory[77:NBYTES])])
    assert sum(copied) < 2 * DIRECT_IO_BYTES
    assert memory[DIRECT_IO_BYTES : page_floor(NBYTES)] == content[DIRECT_IO_BYTES : page_floor(NBYTES)]


@pytest.mark.parametrize("is_told", [True, False])
def test_how_memory_must_lie(path: str, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    """As the kernel says; a page where it says nothing. Reads into memory that lies so succeed."""
    if not is_told:
        monkeypatch.setattr("datastates.direct_memory._libc", object())
    with FileReader(path) as file:
        alignment = file._memory_alignment
        assert DIRECT_IO_BYTES % alignment == 0 and (is_told or alignment == DIRECT_IO_BYTES)
        if file._direct < 0:
            return
        memory = memoryview(fresh_memory(4 * DIRECT_IO_BYTES))
        part = memory[alignment : alignment + DIRECT_IO_BYTES]
        assert os.preadv(file._direct, [part], DIRECT_IO_BYTES) == DIRECT_IO_BYTES
        assert part == file.read(DIRECT_IO_BYTES, DIRECT_IO_BYTES)
    assert memory_alignment(file._descriptor, DIRECT_IO_BYTES) == DIRECT_IO_BYTES  # closed: an answer, no exception


def test_a_copy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes do not fit into 2"):
        copy_bytes(memoryview(bytearray(2)), memoryview(bytearray(3)))


def test_digests_of_any_range_that_the_cuts_allow(path: str, content: bytes) -> None:
    cuts, digests = [100, 5000, TILE_BYTES, 2 * TILE_BYTES + 1], Digests()
    with FileReader(path) as file:
        read_whole(file, digests=digests, cuts=cuts)
    for begin, end in [(0, 100), (100, 5000), (5000, 2 * TILE_BYTES + 1), (0, NBYTES), (TILE_BYTES, NBYTES)]:
        assert digests.of(begin, end) == zlib.crc32(content[begin:end])
    assert digests.of(50, 100) is None and digests.of(0, 90) is None
    assert digests.of(0, 0) == 0


def test_progress_is_all_that_was_read(path: str) -> None:
    done: list[int] = []
    with FileReader(path) as file:
        read_whole(file, progress=done.append)
    assert sum(done) == NBYTES


def test_a_file_system_without_direct_reads(path: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse ``O_DIRECT`` when the file is opened, some when it is read."""
    original_open, original_read = os.open, os.preadv
    direct: set[int] = set()

    def refusing_open(path: str, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original_open(path, flags, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing_open)
        with FileReader(path) as file:
            assert read_whole(file) == content

    def marking_open(path: str, flags: int, *arguments: Any) -> int:
        descriptor = original_open(path, flags, *arguments)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refusing_read(descriptor: int, *arguments: Any) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original_read(descriptor, *arguments)

    monkeypatch.setattr(os, "open", marking_open)
    monkeypatch.setattr(os, "preadv", refusing_read)
    monkeypatch.setattr("datastates.reading.cached_nbytes", lambda *_: 0)
    with FileReader(path) as file:
        assert read_whole(file) == content


@pytest.mark.parametrize("successor", [b"", b"another file"])
def test_a_file_that_is_replaced_while_it_is_opened_is_still_one(
    path: str, content: bytes, successor: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, num_direct = os.open, 0

    def replacing_open(name: str, flags: int, *arguments: Any) -> int:
        nonlocal num_direct
        if flags & os.O_DIRECT:
            num_direct += 1
            os.unlink(path)
            if successor:
                pathlib.Path(path).write_bytes(successor)
        return original(name, flags, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", replacing_open)
        file = FileReader(path)
    monkeypatch.setattr("datastates.reading.cached_nbytes", lambda *_: 0)
    with file:
        assert read_whole(file) == content
    assert num_direct == 1


def test_short_and_interrupted_reads_go_on(path: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = os.preadv, 0

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))
        return original(descriptor, [buffers[0][: 512 * 1024]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with FileReader(path, num_threads=1) as file:
        assert read_whole(file) == content
    assert count > NBYTES // (512 * 1024)


def test_an_error_of_the_device_names_path_and_offset(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == TILE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with (
        FileReader(path) as file,
        pytest.raises(StorageError, match=rf"at {TILE_BYTES} of {path}.*Input/output") as caught,
    ):
        read_whole(file)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, path)


def test_a_file_that_ends_early(path: str) -> None:
    with FileReader(path) as file:
        os.truncate(path, TILE_BYTES + 10)
        with pytest.raises(CorruptCheckpointError, match=f"the file ends at {TILE_BYTES + 10}, expected") as caught:
            read_whole(file)
    assert caught.value.offset == TILE_BYTES + 10


def test_what_cannot_be_opened(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no file .*absent"):
        FileReader(str(tmp_path / "absent"))
    with pytest.raises(IsADirectoryError):
        FileReader(str(tmp_path))
    (tmp_path / "x").write_bytes(b"")
    with FileReader(str(tmp_path / "x")) as file:
        assert read_whole(file) == b""


def test_all_threads_and_descriptors_are_gone(path: str) -> None:
    before = os.listdir("/proc/self/fd")
    with FileReader(path) as file:
        read_whole(file)
        file.close()
    assert os.listdir("/proc/self/fd") == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("datastates-read")]


def test_the_page_cache_is_asked_without_reading(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    cold = cached_nbytes(descriptor, 0, NBYTES)
    assert cached_nbytes(descriptor, 0, NBYTES) == cold
    os.pread(descriptor, NBYTES, 0)
    warm = cached_nbytes(descriptor, 0, NBYTES)
    os.close(descriptor)
    assert warm >= cold  # equal where the kernel does not tell, or keeps all (tmpfs)
    assert cached_nbytes(descriptor, 0, NBYTES) == 0  # closed: an answer, no exception


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_no_file_is_mapped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Some network file systems refuse to map files; others do it page by page."""
    state = {"w": torch.arange(1 << 19), "b": torch.ones(3)}
    if suffix == ".pt":
        torch.save(state, tmp_path / f"x{suffix}")
    else:
        safetensors.torch.save_file(state, tmp_path / f"x{suffix}")
    original = mmap.mmap

    def refusing(descriptor: int, *arguments: Any, **options: Any) -> mmap.mmap:
        if descriptor != -1:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return original(descriptor, *arguments, **options)

    monkeypatch.setattr(mmap, "mmap", refusing)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", None)
    loaded = load(tmp_path / f"x{suffix}")
    assert torch.equal(loaded["w"], state["w"]) and torch.equal(loaded["b"], state["b"])
    targets = {"w": torch.zeros(1 << 19, dtype=torch.int64), "b": torch.zeros(3)}
    load(tmp_path / f"x{suffix}", into=targets)
    assert torch.equal(targets["w"], state["w"])


PEAK = """
import sys, torch
from datastates import load

def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

nbytes = int(sys.argv[1])
for path in sys.argv[3:]:
    targets = {f"w{index}": torch.ones(nbytes // 16) for index in range(4)}
    wider = {name: target.double() for name, target in targets.items()}
    load(sys.argv[2])  # what is imported on the way counts for nobody
    for into in (None, targets, wider):
        before = memory("VmRSS:")
        open("/proc/self/clear_refs", "w").write("5")
        state = load(path, into=into)
        print(memory("VmHWM:") - before - (nbytes if into is None else 0))
        del state
"""


def test_memory_is_bounded(tmp_path: pathlib.Path, run_script: Any) -> None:
    """The state and 64 MiB; nothing but 64 MiB where the state has its memory already."""
    nbytes, state = 96 << 20, {f"w{index}": torch.ones(6 << 20) for index in range(4)}
    torch.save({"small": torch.ones(3)}, tmp_path / "small.pt")
    torch.save(state, tmp_path / "x.pt")
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    paths = tmp_path / "small.pt", tmp_path / "x.pt", tmp_path / "x.safetensors"
    peaks = list(map(int, run_script(PEAK, nbytes, *paths).stdout.split()))
    assert len(peaks) == 6 and max(peaks) <= 64 << 20, peaks


def test_what_is_no_ordinary_file_is_refused_and_blocks_nobody(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(StorageError, match="no ordinary file"):
            FileReader(path)
