"""The trainer's side of the flusher: hands work over, hears of its end, replaces a process that died."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from datastates.config import DIRECT_IO_BYTES
from datastates.errors import ClosedError, CommitError, ReentranceError, StorageError
from datastates.events import EventLog, now
from datastates.flusher import launch
from datastates.flusher.ledger import PREFAULT_BYTES, Ledger
from datastates.flusher.protocol import (
    Abort,
    Begin,
    Commit,
    FlushSlab,
    Prefault,
    Publish,
    shortened,
)
from datastates.flusher.supervisor import Supervisor
from datastates.flusher.work import Attempt, CommitResult, FlushFile, running_future
from datastates.life_cycle import LifeCycle
from datastates.node_parts import NodePart
from datastates.partial_names import is_attempt
from datastates.plan import SEAL_NBYTES, PackedSeals, Seal
from datastates.tier_settings import TierSettings

__all__ = ["CommitResult", "FlushFile", "FlusherClient"]


class FlusherClient:
    """One rank's flusher, seen from the trainer.

    Thread safe. No method waits for storage or for the process, except `close`. A thread of its own
    (``datastates-flusher-client``) hears the answers; futures and callbacks run on it. When the process dies,
    that thread starts another over the same memory and gives it all that is not finished.

    In a forked child every method raises ClosedError, and `close` does nothing: the flusher is the parent's.
    """

    def __init__(
        self,
        cache_fd: int,
        cache_nbytes: int,
        *,
        rank: int,
        world_size: int,
        on_slab_free: Callable[[int], None],
        events: EventLog,
        num_writers: int = 3,
        commit_timeout_seconds: float = 600.0,
        grace_seconds: float = 30.0,
        tiers: tuple[TierSettings, ...] = (),
        carry_timeout_seconds: float = 600.0,
        node: NodePart | None = None,
        command: tuple[str, ...] = launch.COMMAND,
    ) -> None:
        """Start the process; does not wait until it works.

        Args:
            cache_fd: the host cache, a descriptor that can be mapped. Duplicated here.
            cache_nbytes: its size.
            rank: this process's rank, from 0.
            world_size: ranks that take part in every checkpoint.
            on_slab_free: called with a slab's offset when its memory may be used again; must be quick.
            events: receives ``flush``, ``durable``, ``committed``, ``failed``, ``carried``, ``carry_failed``.
            num_writers: writes in flight.
            commit_timeout_seconds: how long a rank whose part is durable waits for the others.
            grace_seconds: how long the process goes on after SIGTERM.
            tiers: where the process carries checkpoints to; the first one is where they are saved.
            carry_timeout_seconds: how long it goes on with that after `close`, or after the trainer's end.
            node: what this rank's node saves of each checkpoint: what is called committed is that part then. None: the
                ranks share the directory.
            command: how the process is started.

        Raises:
            FlusherDiedError: it cannot be started.
        """
        self._owner = os.getpid()
        self._user = 0  # the thread that is in `_locked`, 0 while there is none
        self._rank = rank
        self._cache_nbytes = cache_nbytes
        settings = launch.Settings(
            -1,
            cache_fd,
            -1,
            self._owner,
            cache_nbytes,
            rank,
            world_size,
            num_writers,
            commit_timeout_seconds,
            grace_seconds,
            tiers,
            carry_timeout_seconds,
            node,
        )
        self._ledger = Ledger(rank, on_slab_free, events)
        self._supervisor = Supervisor(settings, command, self._ledger)

    def __repr__(self) -> str:
        return f"FlusherClient(rank={self._rank}, {self._supervisor.life.value}, {self._ledger!r})"

    @property
    def pid(self) -> int:
        """The process's id; 0 while none runs. Another after it was replaced."""
        self._check_owner()
        return self._supervisor.pid

    def begin(self, attempt: str, directory: str) -> None:
        """This rank takes part in the checkpoint ``directory``; idempotent, and of no need to what follows.

        If the trainer dies before it has called `commit` or `abort`, the other ranks hear of it at once.

        Args:
            attempt: the same id on all ranks.
            directory: absolute path, the same on all ranks.

        Raises:
            ClosedError: the client is closed, or belongs to another process.
        """
        with self._locked():
            known = self._attempt(attempt)
            if not known.folder:
                known.folder = os.path.normpath(directory)
                self._supervisor.post(Begin(attempt, known.folder))

    def open_file(
        self,
        path: str,
        nbytes: int,
        slab_bytes: int,
        seals: Sequence[Seal],
        attempt: str,
        free_bytes_check: bool = True,
    ) -> FlushFile:
        """Begin a file; its slabs follow through `flush_slab`.

        Args:
            path: absolute final path; directories are made.
            nbytes: size of the file.
            slab_bytes: size of all slabs but the last, a multiple of 4096.
            seals: checksums to fill in.
            attempt: the id of what it becomes visible with: letters, digits, ``_`` and ``-``.
            free_bytes_check: refuse at once if the file system reports less free space than ``nbytes``.

        Raises:
            ValueError: an argument is not as described, or the attempt has the path already or is complete.
            ClosedError: the client is closed, or belongs to another process.
        """
        _check_file(path, nbytes, slab_bytes, seals)
        with self._locked():
            known = self._attempt(attempt)
            if known.request is not None:
                raise ValueError(f"attempt {attempt} was completed: {path} cannot be added to it")
            if any(file.path == path for file in known.files):
                raise ValueError(f"{path} was opened in attempt {attempt} before")
            file = FlushFile(self._ledger.next_number(), path, nbytes, slab_bytes, seals, attempt, now())
            file.check_free = free_bytes_check
            if known.abort is not None:
                file.lose(known.error or CommitError(f"attempt {attempt} was aborted: {known.abort.cause}"))
            else:
                self._ledger.add(known, file)
                self._supervisor.post(*file.opening())
            return file

    def flush_slab(self, file: FlushFile, index: int, cache_offset: int, nbytes: int) -> None:
        """Hand over the next slab of a file; its memory belongs to the flusher until ``on_slab_free``.

        If the file is lost the slab is free again at once.

        Raises:
            ValueError: it is not the next slab, or not of the size that the file has there.
            ClosedError: the client is closed, or belongs to another process.
        """
        with self._locked():
            expected = min(file.slab_bytes, file.nbytes - index * file.slab_bytes)
            if index != file.next_index or nbytes != expected or cache_offset + nbytes > self._cache_nbytes:
                raise ValueError(
                    f"{file.path}: slab {index} of {nbytes} bytes at {cache_offset} of the cache, expected slab "
                    f"{file.next_index} of {expected} bytes inside of {self._cache_nbytes}"
                )
            file.next_index += 1
            if file.error is not None:
                self._ledger.free(cache_offset)
                self._supervisor.wake()
                return
            slab = FlushSlab(file.number, index, cache_offset, nbytes)
            file.unwritten[index] = slab
            self._supervisor.post(slab)

    def publish(self, attempt: str) -> Future[CommitResult]:
        """Make the attempt's files visible one by one, each as soon as it is durable; there is no manifest."""
        with self._locked():
            return self._request(self._attempt(attempt), Publish(attempt))

    def commit(self, attempt: str, directory: str, *, step_or_tag: str, update_latest: bool) -> Future[CommitResult]:
        """This rank's part of the checkpoint ``directory`` is the files opened under the attempt (perhaps none).

        The future ends when the checkpoint is committed: the files of all ranks durable and visible. It raises
        StorageError (a file of this rank), CommitError (another rank, or aborted) or FlusherDiedError.

        Args:
            attempt: the same id on all ranks.
            directory: absolute path, the same on all ranks.
            step_or_tag: goes into the records, and into ``latest``.
            update_latest: replace ``latest`` beside the directory.

        Raises:
            ValueError: a file of the attempt lies outside of the directory.
            ClosedError: the client is closed, or belongs to another process.
        """
        directory = os.path.normpath(directory)
        with self._locked():
            known = self._attempt(attempt)
            outside = [file.path for file in known.files if not file.path.startswith(directory + os.sep)]
            if outside or not os.path.isabs(directory):
                raise ValueError(f"{directory} is no absolute path, or {outside} are no files in it")
            return self._request(known, Commit(attempt, directory, step_or_tag, update_latest))

    def abort(self, attempt: str, cause: str, directory: str = "") -> None:
        """Give an attempt up: its partial files are removed, its futures raise CommitError.

        The other ranks learn of it through the checkpoint directory: that of `commit`, called before or after,
        or the one given here. No effect once this rank's part is complete and another rank may count on it.
        """
        with self._locked():
            if attempt in self._ledger.settled:
                return
            known = self._attempt(attempt)
            if known.abort is None:
                self._send_abort(known, cause, directory or known.directory)

    def prefault(self) -> Future[None]:
        """Have the pages of the host cache reserved in the background. The future raises StorageError."""
        with self._locked():
            future = running_future(type(None))
            self._ledger.prefaults.append(future)
            self._supervisor.post(Prefault(PREFAULT_BYTES))
            return future

    def close(self, timeout: float | None) -> None:
        """Finish everything that was asked for, then end the process; idempotent.

        What is incomplete (files without all slabs, attempts neither published nor committed) is given up.

        Raises:
            WaitTimeoutError: not done within ``timeout`` seconds; process and thread go on by themselves.
        """
        if os.getpid() == self._owner:
            self._supervisor.close(timeout)

    # -- called with the lock held, on any thread

    def _attempt(self, name: str) -> Attempt:
        if not is_attempt(name):
            raise ValueError(f"{name!r} is no attempt id: 1 to 64 letters, digits, '_' and '-'")
        return self._ledger.attempt(name)

    def _request(self, attempt: Attempt, request: Publish | Commit) -> Future[CommitResult]:
        if attempt.request is not None:
            raise ValueError(f"attempt {attempt.name} was completed before")
        attempt.request = request
        if isinstance(attempt.error, (StorageError, CommitError)):
            attempt.error.tag = attempt.tag  # it came before the tag was known
        if attempt.abort is None and (attempt.error is None or isinstance(request, Publish)):
            self._supervisor.post(request)
        elif isinstance(request, Commit) and (attempt.abort is None or not attempt.abort.directory):
            cause = str(attempt.error) if attempt.abort is None else attempt.abort.cause
            self._send_abort(attempt, cause, request.directory)
        if attempt.is_told:
            self._ledger.end(attempt)
            self._supervisor.wake()
        return attempt.future

    def _send_abort(self, attempt: Attempt, cause: str, directory: str) -> None:
        attempt.abort = Abort(attempt.name, shortened(cause), directory)
        attempt.num_unanswered += 1
        attempt.is_told = False
        self._supervisor.post(attempt.abort)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(f"this flusher belongs to process {self._owner}, not to its child {os.getpid()}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Not to be entered twice by one thread: a signal handler may have interrupted a change that is half made.

        The lock itself may be, so that such a handler is refused instead of waiting for itself.
        """
        self._check_owner()
        if self._user == threading.get_ident():
            raise ReentranceError(ReentranceError.ADVICE)
        with self._supervisor.lock:
            if self._supervisor.life is not LifeCycle.OPEN:
                raise ClosedError(f"the flusher client is {self._supervisor.life.value}")
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = 0


def _check_file(path: str, nbytes: int, slab_bytes: int, seals: Sequence[Seal]) -> None:
    if not os.path.isabs(path) or os.path.normpath(path) != path:
        raise ValueError(f"{path!r} is no normal absolute path")
    if nbytes < 0 or slab_bytes <= 0 or slab_bytes % DIRECT_IO_BYTES:
        raise ValueError(f"{path}: {nbytes} bytes in slabs of {slab_bytes}, expected a multiple of {DIRECT_IO_BYTES}")
    if isinstance(seals, PackedSeals):  # as they are laid out, but perhaps for another file
        seals = seals[-1:]
    for seal in seals:
        offset, begin, end = seal
        if not 0 <= begin <= end <= offset <= nbytes - SEAL_NBYTES:
            raise ValueError(f"{path}: {seal} does not lie behind its range and inside of {nbytes} bytes")
