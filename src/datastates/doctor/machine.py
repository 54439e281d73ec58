"""Whether the host caches of all ranks of this machine fit its memory and its limits."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datastates.config import GIB, MIB, CheckpointConfig
from datastates.doctor.findings import Finding, good, warning, wrong
from datastates.figures import figure

BESIDE_CACHE_BYTES = 64 * MIB
"""Memory that a rank's engine and its flusher process take beside the host cache, at most."""

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA and of AMD
_NO_LIMIT = 1 << 60  # version 1 of cgroups says "no limit" by the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and limits of this machine, as a process started now would meet them. Bytes.

    Attributes:
        memory_nbytes: of the machine.
        available_nbytes: of that what could be had now.
        cgroup_nbytes: what this process's control group may use, None where there is no limit.
        memlock_nbytes: RLIMIT_MEMLOCK, None where there is no limit.
        has_accelerator: the driver of one is loaded, so that host caches may get pinned.
    """

    memory_nbytes: int
    available_nbytes: int
    cgroup_nbytes: int | None
    memlock_nbytes: int | None
    has_accelerator: bool

    @classmethod
    def now(cls) -> Machine:
        """This machine."""
        memory = _memory_info(Path("/proc/meminfo").read_text("ascii"))
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        memlock = None if limit == resource.RLIM_INFINITY else limit
        has_accelerator = any(os.path.exists(path) for path in _DRIVERS)
        return cls(memory["MemTotal"], memory["MemAvailable"], cgroup_limit(Path("/")), memlock, has_accelerator)

    @property
    def usable_nbytes(self) -> int:
        """What all processes of the job may use at most."""
        return self.memory_nbytes if self.cgroup_nbytes is None else min(self.memory_nbytes, self.cgroup_nbytes)


def cgroup_limit(root: Path) -> int | None:
    """The lowest memory limit of this process's control group and all above it, None where there is none.

    Args:
        root: where ``proc/self/cgroup`` and ``sys/fs/cgroup`` are.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.max) and cgroup-v1/memory.rst.
    """
    with contextlib.suppress(FileNotFoundError):
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
        limits = [limit for line in lines for limit in _limits_of(root / "sys/fs/cgroup", line)]
        return min(limits, default=None)
    return None


def memory_findings(config: CheckpointConfig, num_ranks: int, machine: Machine) -> Iterator[Finding]:
    """Whether so many ranks with these settings fit the machine beside everything else."""
    per_rank = config.host_cache_bytes + config.eager_budget_bytes + BESIDE_CACHE_BYTES
    needed = num_ranks * per_rank
    who = "1 rank takes" if num_ranks == 1 else f"{num_ranks} ranks take"
    each = "" if num_ranks == 1 else " each"
    what = f"{who} {_gib(needed)} ({_gib(config.host_cache_bytes)} of host cache{each})"
    limit = "the memory of this machine" if machine.cgroup_nbytes is None else "what this job's control group may use"
    most = max((machine.usable_nbytes // num_ranks - (per_rank - config.host_cache_bytes)) // MIB * MIB, 0)
    advice = f"lower host_cache_size to less than {figure(most / GIB)}, leaving room for the training itself"
    if needed > machine.usable_nbytes:
        yield wrong("memory", f"{what}: more than {limit}, {_gib(machine.usable_nbytes)}", advice)
    elif needed > machine.available_nbytes:
        message = f"{what}: more than the {_gib(machine.available_nbytes)} that are available now"
        yield warning("memory", message, advice)
    elif 2 * needed > machine.usable_nbytes:
        message = f"{what}: more than half of {limit}, {_gib(machine.usable_nbytes)}"
        yield warning("memory", message, "see that the training itself (offloading, data loaders) fits beside it")
    else:
        yield good("memory", f"{what} of {_gib(machine.usable_nbytes)}")
    if config.pin_host_cache and machine.has_accelerator:
        yield _memlock_finding(needed, machine.memlock_nbytes)


def _memlock_finding(needed: int, limit: int | None) -> Finding:
    if limit is None or limit >= needed:
        return good("memlock", "the limit on locked memory allows the host caches to be pinned")
    message = f"ulimit -l allows {_gib(limit)} of locked memory, the host caches take {_gib(needed)}"
    advice = "ulimit -l unlimited; where the driver counts pinned memory, copies from the device are slower without"
    return warning("memlock", message, advice)


def _limits_of(mounted: Path, line: str) -> Iterator[int]:
    """The limits that one line of ``/proc/self/cgroup`` leads to: of the group and those above it."""
    hierarchy, controllers, group = line.split(":", 2)
    if hierarchy == "0":
        base, name = mounted, "memory.max"
    elif "memory" in controllers.split(","):
        base, name = mounted / "memory", "memory.limit_in_bytes"
    else:
        return
    folder = base / group.strip("/")
    while True:
        # inside of a container the named folder may not be there: its own is mounted at the top then
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / name).read_text("ascii"))
            if limit < _NO_LIMIT:
                yield limit
        if folder == base:
            return
        folder = folder.parent


def _memory_info(text: str) -> dict[str, int]:
    """Bytes by name. Source: proc_meminfo(5): each is given in units of 1024 bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def _gib(nbytes: int) -> str:
    return f"{figure(nbytes / GIB)} GiB" if nbytes >= GIB else f"{figure(nbytes / MIB)} MiB"
