"""Bytes that go through a real flusher process arrive as they were, with checksums filled in."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from datastates.errors import ClosedError
from datastates.plan import Seal
from flusher.rig import SLAB, TIMEOUT, Rig, image_of, partials


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, SLAB, SLAB + 1, 5 * SLAB + 777, 40 * SLAB])
def test_any_size(tmp_path: Path, nbytes: int) -> None:
    image = image_of(nbytes)
    with Rig() as rig:
        file = rig.save(tmp_path / "new" / "file.bin", image)
        published = rig.client.publish("a-1")
        record = file.durable.result(TIMEOUT)
        result = published.result(TIMEOUT)
        rig.wait_all_free()
    assert (tmp_path / "new" / "file.bin").read_bytes() == image
    assert record.nbytes == nbytes
    assert record.crc32 == tuple(zlib.crc32(image[i : i + SLAB]) for i in range(0, nbytes, SLAB))
    assert (result.path, result.nbytes, result.num_files) == (file.path, nbytes, 1)
    assert os.listdir(tmp_path / "new") == ["file.bin"]


def test_seals_are_zlib_crcs(tmp_path: Path) -> None:
    image = bytearray(image_of(5 * SLAB + 100))
    ranges = [(0, 10), (10, 10), (100, 3 * SLAB + 5), (100, SLAB), (4 * SLAB, 5 * SLAB)]
    offsets = [20, 24, 3 * SLAB + 5, 4 * SLAB - 2, 5 * SLAB + 96]  # one straddles two slabs
    seals = tuple(Seal(offset, *covered) for offset, covered in zip(offsets, ranges, strict=True))
    # what is expected: no range covers another seal, except those that begin behind it
    for seal in sorted(seals, key=lambda seal: seal.offset):
        struct.pack_into("<I", image, seal.offset, zlib.crc32(image[seal.begin : seal.end]))
    sent = bytearray(image)
    for seal in seals:
        sent[seal.offset : seal.offset + 4] = b"\0\0\0\0"
    with Rig(num_slabs=2) as rig:
        file = rig.save(tmp_path / "f", bytes(sent), seals=seals)
        rig.client.publish("a-1").result(TIMEOUT)
        crcs = file.durable.result(TIMEOUT).crc32
    assert (tmp_path / "f").read_bytes() == bytes(image)
    assert crcs == tuple(zlib.crc32(image[i : i + SLAB]) for i in range(0, len(image), SLAB))


def test_many_seals_need_several_messages(tmp_path: Path) -> None:
    image = bytearray(10 * 5000)
    seals = tuple(Seal(10 * i + 6, 10 * i, 10 * i + 6) for i in range(5000))
    with Rig() as rig:
        rig.save(tmp_path / "f", bytes(image), seals=seals)
        rig.client.publish("a-1").result(TIMEOUT)
    expected = (bytes(6) + struct.pack("<I", zlib.crc32(bytes(6)))) * 5000
    assert (tmp_path / "f").read_bytes() == expected


def test_files_interleave(tmp_path: Path) -> None:
    images = [image_of(7 * SLAB + n, n) for n in range(4)]
    with Rig() as rig:
        files = [rig.open(tmp_path / f"f{n}", image) for n, image in enumerate(images)]
        published = rig.client.publish("a-1")
        for index in range(8):
            for file, image in zip(files, images, strict=True):
                if index * SLAB < len(image):
                    rig.send_slab(file, image, index)
        assert published.result(TIMEOUT).num_files == 4
    for n, image in enumerate(images):
        assert (tmp_path / f"f{n}").read_bytes() == image


def test_events(tmp_path: Path) -> None:
    image = image_of(3 * SLAB)
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": image}, "a-1")
    names = [event["event"] for event in rig.events]
    assert sorted(names) == ["committed", "durable", "flush", "flush", "flush"]
    flushes = [event for event in rig.events if event["event"] == "flush"]
    assert {event["index"] for event in flushes} == {0, 1, 2}
    assert all(event["begin"] < event["end"] and event["nbytes"] == SLAB for event in flushes)
    committed = rig.events[names.index("committed")]
    assert committed["attempt"] == "a-1" and committed["nbytes"] == len(image)


def test_the_same_path_twice_keeps_the_later(tmp_path: Path) -> None:
    first, second = image_of(6 * SLAB, 1), image_of(100, 2)
    with Rig() as rig:
        slow = rig.open(tmp_path / "f", first, "a-1")
        futures = [rig.client.publish("a-1")]
        quick = rig.save(tmp_path / "f", second, "a-2")
        futures.append(rig.client.publish("a-2"))
        quick.durable.result(TIMEOUT)
        assert not futures[1].done()
        rig.send(slow, first)
        for future in futures:
            future.result(TIMEOUT)
    assert (tmp_path / "f").read_bytes() == second


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.bin")
    with Rig() as rig:
        rig.save(path, b"abc")
        rig.client.publish("a-1").result(TIMEOUT)
    with open(os.fsencode(path), "rb") as file:
        assert file.read() == b"abc"


def test_prefault_reserves_the_cache(tmp_path: Path) -> None:
    with Rig() as rig:
        assert os.fstat(rig.fd).st_blocks == 0
        rig.client.prefault().result(TIMEOUT)
        assert os.fstat(rig.fd).st_blocks * 512 == rig.nbytes


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        with Rig() as rig:
            rig.checkpoint(tmp_path / "deep" / "s1", {"f": b"abc"}, "a-1")
    finally:
        os.umask(old)
    for path in (tmp_path / "deep").rglob("*"):
        full = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == full & ~mask, path


def test_an_overwritten_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with Rig() as rig:
        rig.save(path, b"new")
        rig.client.publish("a-1").result(TIMEOUT)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_process_is_light(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": image_of(20 * SLAB)}, "a-1")
        maps = Path(f"/proc/{rig.client.pid}/maps").read_text()
        assert "torch" not in maps and "numpy" not in maps
        rollup = Path(f"/proc/{rig.client.pid}/smaps_rollup").read_text()
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
        assert private < 30 * 1024, rollup
        assert os.getsid(rig.client.pid) == rig.client.pid
        assert os.readlink(f"/proc/{rig.client.pid}/cwd") == "/"


def test_the_modules_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, datastates.flusher.client, datastates.flusher.process, datastates.recovery\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": b"abc"}, "a-1")
        pid = rig.client.pid
    rig.client.close(TIMEOUT)  # again: nothing
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert not any(thread.name == "datastates-flusher-client" for thread in threading.enumerate())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_closed_client_refuses(tmp_path: Path) -> None:
    with Rig() as rig:
        file = rig.open(tmp_path / "f", b"abc")
    for call in (
        lambda: rig.open(tmp_path / "g", b"abc"),
        lambda: rig.client.flush_slab(file, 0, 0, 3),
        lambda: rig.client.publish("a-2"),
        lambda: rig.commit(tmp_path),
        lambda: rig.client.abort("a-1", "why"),
        lambda: rig.client.prefault(),
    ):
        with pytest.raises(ClosedError):
            call()
    assert file.durable.exception(TIMEOUT) is not None
    assert os.listdir(tmp_path) == []


def test_a_forked_child_cannot_use_it(tmp_path: Path) -> None:
    with Rig() as rig:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                rig.client.close(1)
                rig.open(tmp_path / "f", b"abc")
            except ClosedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        rig.save(tmp_path / "g", b"abc")
        rig.client.publish("a-1").result(TIMEOUT)
    assert (tmp_path / "g").read_bytes() == b"abc"
    assert partials(tmp_path) == []


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with Rig() as rig:
        file = rig.open(tmp_path / "f", image_of(SLAB + 1))
        for index, nbytes in ((1, 1), (0, 5)):
            with pytest.raises(ValueError, match="expected slab 0"):
                rig.client.flush_slab(file, index, 0, nbytes)
        with pytest.raises(ValueError, match="opened in attempt"):
            rig.open(tmp_path / "f", b"abc")
        with pytest.raises(ValueError, match="attempt id"):
            rig.open(tmp_path / "g", b"abc", "a/b")
        with pytest.raises(ValueError, match="absolute"):
            rig.open("relative", b"abc")
        with pytest.raises(ValueError, match="multiple of 4096"):
            rig.client.open_file(str(tmp_path / "h"), 10, 100, (), "a-1")
        with pytest.raises(ValueError, match="behind its range"):
            rig.open(tmp_path / "h", b"abcdef", seals=(Seal(4, 0, 2),))
        with pytest.raises(ValueError, match="no files in it"):
            rig.commit(tmp_path / "elsewhere")
