"""The host cache: one bounded piece of shared memory, cut into slabs, that a save passes through.

It is a ``memfd``: both processes map it, no mount's size limits it, and it vanishes with its last owner.
Its size is the whole host memory that checkpoints ever take, however large the state and however many saves
are in flight.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass

import torch

from datastates.errors import ClosedError, HostCacheError, WaitTimeoutError

MEMORY_RESERVE_BYTES = 64 << 20
"""Memory that must stay available beside the cache: the constant of the promise 'cache + 64 MiB'."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A reserved part of the cache.

    Attributes:
        offset: bytes from the start of the cache; names the slab.
        memory: uint8 tensor over the slab. It belongs to the holder until `HostCache.release`.
    """

    offset: int
    memory: torch.Tensor


class HostCache:
    """Hands out slabs of equal size and takes them back, from any thread.

    Thread safe. `reserve` blocks while all slabs are taken, which is what bounds the memory of a save.
    """

    def __init__(self, nbytes: int, slab_bytes: int) -> None:
        """Make and map the cache; its pages are not touched yet.

        Args:
            nbytes: size in bytes; rounded down to whole slabs.
            slab_bytes: size of a slab in bytes, a multiple of the page size.

        Raises:
            HostCacheError: it is larger than the memory that this process may still take.
        """
        self.num_slabs = nbytes // slab_bytes
        self.slab_bytes = slab_bytes
        self.nbytes = self.num_slabs * slab_bytes
        _check_memory(self.nbytes)
        self.descriptor = os.memfd_create("datastates-host-cache", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            mapping = mmap.mmap(self.descriptor, self.nbytes)
        except OSError as error:
            os.close(self.descriptor)
            raise HostCacheError(
                f"host cache of {self.nbytes / 2**30:.2f} GiB cannot be made: {error}; lower host_cache_size"
            ) from error
        # The tensor and every view of it hold the mapping: memory is unmapped when the last of them goes.
        self._memory: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        self._condition = threading.Condition()  # protects _free and _closed
        self._free = list(range(0, self.nbytes, slab_bytes))[::-1]  # a stack: slabs in use stay few and warm
        self._closed = False

    def __repr__(self) -> str:
        return f"HostCache({self.num_slabs} slabs of {self.slab_bytes} bytes, {self.num_free} free)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def memory(self) -> torch.Tensor:
        """The whole cache as a uint8 tensor; valid until `close`."""
        if self._memory is None:
            raise ClosedError("the host cache is closed")
        return self._memory

    def try_reserve(self) -> Slab | None:
        """A free slab, or None at once when there is none."""
        with self._condition:
            return self._take() if self._free or self._closed else None

    def reserve(self, timeout: float | None = None) -> Slab:
        """A free slab; blocks until there is one.

        Raises:
            WaitTimeoutError: none came free within ``timeout`` seconds.
            ClosedError: the cache was closed.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._free or self._closed, timeout):
                raise WaitTimeoutError(f"no slab of the host cache came free within {timeout} s: {self!r}")
            return self._take()

    def release(self, offset: int) -> None:
        """Give the slab at ``offset`` back. Its memory may be reused at once."""
        with self._condition:
            if offset in self._free or offset % self.slab_bytes or not 0 <= offset < self.nbytes:
                raise ValueError(f"offset {offset} is no reserved slab of {self!r}")
            self._free.append(offset)
            self._condition.notify()

    def close(self) -> None:
        """Let go of the memory; idempotent. Threads that wait in `reserve` get ClosedError.

        The memory is unmapped at once, or with the last tensor over a slab.
        """
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        self._memory = None
        os.close(self.descriptor)

    def _take(self) -> Slab:
        if self._closed:
            raise ClosedError("the host cache is closed")
        offset = self._free.pop()
        return Slab(offset, self.memory[offset : offset + self.slab_bytes])


def available_memory_bytes() -> int:
    """Memory that this process may still take before the kernel would have to kill: machine and cgroup.

    Source: ``MemAvailable`` of proc(5); ``memory.max`` and ``memory.current`` of the kernel's cgroup-v2 document.
    """
    available = [_meminfo_available()]
    for directory in _cgroup_directories():
        limit, current = (_read_number(os.path.join(directory, name)) for name in ("memory.max", "memory.current"))
        if limit is not None and current is not None:
            cached = _cgroup_file_bytes(directory)
            available.append(limit - current + cached)
    return max(min(available), 0)


def _check_memory(nbytes: int) -> None:
    available = available_memory_bytes()
    if nbytes + MEMORY_RESERVE_BYTES > available:
        raise HostCacheError(
            f"host cache of {nbytes / 2**30:.2f} GiB asked for, but only {available / 2**30:.2f} GiB of memory are "
            f"available to all processes of this machine together (memory and cgroup limits); set host_cache_size "
            f"to at most {max(available - MEMORY_RESERVE_BYTES, 0) / 2**30:.2f} divided by the number of processes here"
        )


def _meminfo_available() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise HostCacheError("/proc/meminfo has no MemAvailable: a Linux kernel of 3.14 or newer is needed")


def _cgroup_directories() -> list[str]:
    """The cgroup-v2 folders of this process, innermost first; empty without cgroup v2."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as lines:
            paths = [line.strip().split(":", 2)[2] for line in lines if line.startswith("0::")]
    except OSError:
        return []
    directories = []
    for path in paths:
        parts = [part for part in path.split("/") if part]
        directories += ["/".join(["/sys/fs/cgroup", *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return directories


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_file_bytes(directory: str) -> int:
    """Page cache that the kernel can drop within this cgroup."""
    try:
        with open(os.path.join(directory, "memory.stat"), encoding="ascii") as lines:
            stat = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return 0
    return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
