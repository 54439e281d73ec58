"""Starting a flusher process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

from datastates.node_parts import NodePart
from datastates.tier_settings import TierSettings

_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()  # else the working directory, "/", is searched
COMMAND: tuple[str, ...] = (sys.executable, *_SAFE_PATH, "-m", "datastates.flusher")
"""How the process is started; its `Settings` follow as one argument."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a flusher process is told at its start.

    Attributes:
        socket_fd: its end of the socket.
        cache_fd: the host cache.
        trainer_fd: pidfd of the trainer, -1 where the kernel has none (before Linux 5.3).
        tiers: where checkpoints are carried to, the directory that they are saved in first.
        carry_timeout_seconds: how long that goes on when the trainer is gone.
        node: what this rank's node saves of each checkpoint, None where all ranks share the directory.
    """

    socket_fd: int
    cache_fd: int
    trainer_fd: int
    trainer_pid: int
    cache_nbytes: int
    rank: int
    world_size: int
    num_writers: int
    commit_timeout_seconds: float
    grace_seconds: float
    tiers: tuple[TierSettings, ...] = ()
    carry_timeout_seconds: float = 0.0
    node: NodePart | None = None

    def to_argument(self) -> str:
        node = None if self.node is None else self.node.to_fields()
        return json.dumps(asdict(self) | {"node": node})

    @classmethod
    def from_argument(cls, argument: str) -> Settings:
        fields = json.loads(argument)
        tiers = tuple(TierSettings(**tier) for tier in fields["tiers"])
        node = None if fields["node"] is None else NodePart.from_fields(fields["node"])
        return cls(**fields | {"tiers": tiers, "node": node})


def with_socket(settings: Settings, socket_fd: int) -> Settings:
    return replace(settings, socket_fd=socket_fd)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def start(settings: Settings, command: tuple[str, ...] = COMMAND) -> subprocess.Popen[bytes]:
    """Start a flusher in a session of its own, so that the terminal's signals do not reach it.

    It works in ``/``, so that it keeps no directory busy and imports nothing from the trainer's.

    Raises:
        OSError: there is no such program, or no memory for another process.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    descriptors = [settings.socket_fd, settings.cache_fd, settings.trainer_fd]
    return subprocess.Popen(
        [*command, settings.to_argument()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # what reads the trainer's output must not wait for the flusher's end
        cwd="/",
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *inherited])},
        pass_fds=[descriptor for descriptor in descriptors if descriptor >= 0],
        start_new_session=True,
    )
