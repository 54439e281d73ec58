"""The flusher process: reads requests, has them done, ends when the trainer is gone and all work is done.

The main thread only reads and hands on; it never waits for storage, for another rank, or for the trainer to
read an answer. So the trainer can always send.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from datastates.errors import ProtocolError
from datastates.flusher.committer import Committer
from datastates.flusher.incoming import FileState, IncomingFile
from datastates.flusher.launch import Settings
from datastates.flusher.protocol import (
    MAX_MESSAGE_BYTES,
    Abort,
    Acknowledged,
    Answer,
    Begin,
    Carried,
    CarryFailed,
    Close,
    Commit,
    Finished,
    FlushSlab,
    Message,
    OpenFile,
    Prefault,
    Prefaulted,
    PrefaultFailed,
    Publish,
    SealTable,
    decode,
    encode,
    shortened,
)
from datastates.flusher.writer import WritePipeline
from datastates.tiers.carrier import Note, Step
from datastates.tiers.carriers import Carriers

EXIT_DONE = 0
EXIT_LOST = 1
EXIT_BROKEN = 70
"""An internal error (``EX_SOFTWARE`` of sysexits.h): the trainer starts another flusher."""

_ABANDON_SECONDS = 5.0  # to remove partial files and tell the trainer, once the grace time is over
_PARENT_POLL_SECONDS = 1.0  # only where there is no pidfd
_STACK_BYTES = 256 * 1024  # per thread: nothing here recurses
_CARRIER_STACK_BYTES = 8 << 20  # the library for object stores runs on it


class Channel:
    """The way back to the trainer, for any thread."""

    def __init__(self, connection: socket.socket, trainer_fd: int) -> None:
        self._connection = connection
        self._trainer_fd = trainer_fd
        self._lock = threading.Lock()  # one packet at a time, in order
        self._is_gone = False

    def send(self, message: Answer) -> bool:
        """Hand an answer to the kernel, which keeps it even if this process dies.

        Blocks while the trainer does not read. Returns False when the trainer is gone.
        """
        packet = encode(message)
        with self._lock:
            while not self._is_gone:
                try:
                    self._connection.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    return True
                except BlockingIOError:
                    self._wait()
                except (BrokenPipeError, ConnectionError):
                    self._is_gone = True
        return False

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._connection, select.POLLOUT)
        if self._trainer_fd >= 0:
            poller.register(self._trainer_fd, select.POLLIN)
        if any(descriptor == self._trainer_fd for descriptor, _ in poller.poll(1000)):
            self._is_gone = True


class FlusherProcess:
    """One rank's flusher; `run` is its life."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._socket = socket.socket(fileno=settings.socket_fd)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._channel = Channel(self._socket, settings.trainer_fd)
        self._files: dict[int, IncomingFile] = {}
        self._is_ending = False
        self._grace_end: float | None = None
        self._abandon_end: float | None = None
        self._carry_end: float | None = None
        self._carriers = Carriers(
            settings.tiers,
            rank=settings.rank,
            world_size=settings.world_size,
            patience_seconds=settings.commit_timeout_seconds,
            tell=self._tell,
            on_idle=self._wake,
        )
        self._committer = Committer(
            self._channel.send,
            self._wake,
            self._carriers.on_committed,
            rank=settings.rank,
            world_size=settings.world_size,
            commit_timeout_seconds=settings.commit_timeout_seconds,
            node=settings.node,
        )
        self._memory = mmap.mmap(settings.cache_fd, settings.cache_nbytes)
        self._pipeline = WritePipeline(
            self._memory,
            self._channel.send,
            self._committer.on_file_end,
            self._wake,
            _spawn,
            settings.num_writers,
        )
        _spawn("committer", lambda: self._committer.run(self._pipeline))
        self._carriers.start(_spawn_carrier)

    def run(self) -> int:
        """Work until the trainer is gone and nothing is left to do. Returns the exit status."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._wake_reader, select.POLLIN)
        if self._settings.trainer_fd >= 0:
            poller.register(self._settings.trainer_fd, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(self._poll_timeout())}
            if self._wake_reader in ready:
                _drain(self._wake_reader)
            if not self._is_ending and (self._receive() or self._is_trainer_gone(ready)):
                poller.unregister(self._socket)
                self._end("the trainer ended")
            if self._settings.trainer_fd in ready:
                poller.unregister(self._settings.trainer_fd)
            status = self._status()
            if status is not None:
                return status

    def _status(self) -> int | None:
        """The exit status if it is time to go."""
        if self._grace_end is not None and time.monotonic() > self._grace_end and self._abandon_end is None:
            self._abandon_end = time.monotonic() + _ABANDON_SECONDS
            self._committer.abandon("the flusher was terminated", everything=True)
        if self._abandon_end is not None and time.monotonic() > self._abandon_end:
            return EXIT_LOST
        if (self._is_ending or self._grace_end is not None) and self._committer.is_idle and self._pipeline.is_idle:
            if self._is_carrying():
                return None
            return EXIT_LOST if self._committer.num_lost else EXIT_DONE
        return None

    def _is_carrying(self) -> bool:
        """All else is done: whether to go on for the sake of further tiers. What is left then is for the next start."""
        if self._carriers.is_idle:
            return False
        if self._carry_end is None:
            self._carry_end = time.monotonic() + self._settings.carry_timeout_seconds
            self._memory.madvise(mmap.MADV_REMOVE)  # nobody reads the host cache any more: its memory goes back
            self._channel.send(Finished())
        return time.monotonic() < self._carry_end

    def _tell(self, note: Note) -> None:
        """Pass on what became of carrying a checkpoint; where nobody is left to be told, failures go to stderr."""
        times = (note.begin, note.end)
        if note.step is Step.CARRIED:
            self._channel.send(Carried(note.attempt, note.path, note.tier, note.nbytes, *times))
            return
        is_final = note.step is Step.GIVEN_UP
        message = shortened(note.error)
        if not self._channel.send(CarryFailed(note.attempt, note.path, note.tier, message, *times, is_final)):
            sys.stderr.write(f"datastates flusher, rank {self._settings.rank}: {note.path} to {note.tier}: {message}\n")
            sys.stderr.flush()

    def _poll_timeout(self) -> float | None:
        """Milliseconds until something has to be looked at without being told."""
        limits = [end for end in (self._grace_end, self._abandon_end) if end is not None][-1:]
        limits += [self._carry_end] if self._carry_end is not None else []
        seconds = [max(end - time.monotonic(), 0.0) + 0.001 for end in limits]
        if self._settings.trainer_fd < 0 and not self._is_ending:
            seconds.append(_PARENT_POLL_SECONDS)
        return min(seconds) * 1000 if seconds else None

    def _is_trainer_gone(self, ready: set[int]) -> bool:
        if self._settings.trainer_fd >= 0:
            return self._settings.trainer_fd in ready
        return os.getppid() != self._settings.trainer_pid

    def _end(self, cause: str) -> None:
        """Nothing more will come: finish what is complete, give up the rest."""
        self._is_ending = True
        self._committer.abandon(cause, everything=False)

    def _receive(self) -> bool:
        """Take all messages that are there. Returns whether they were the last."""
        while True:
            try:
                packet = self._socket.recv(MAX_MESSAGE_BYTES + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                continue  # said once, before what is left in the queue: it died without having read all answers
            if not packet:
                return True
            if len(packet) > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a packet of more than {MAX_MESSAGE_BYTES} bytes")
            message = decode(packet)
            if isinstance(message, Close):
                return True
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, FlushSlab):
            self._pipeline.add(self._file(message.file), message)
        elif isinstance(message, OpenFile):
            self._open(message)
        elif isinstance(message, (SealTable, Acknowledged)):
            file = self._file(message.file)
            file.describe(message)
            self._start_if_described(file)
        elif isinstance(message, (Publish, Commit)):
            self._committer.request(message)
        elif isinstance(message, Abort):
            self._committer.abort(message)
        elif isinstance(message, Begin):
            self._committer.begin(message)
        elif isinstance(message, Prefault):
            chunk_bytes = message.chunk_bytes
            _spawn("prefault", lambda: self._prefault(chunk_bytes))
        else:
            raise ProtocolError(f"a {type(message).__name__} came from the trainer")

    def _file(self, number: int) -> IncomingFile:
        try:
            return self._files[number]
        except KeyError:
            raise ProtocolError(f"file {number} was not opened") from None

    def _open(self, message: OpenFile) -> None:
        if message.file in self._files:
            raise ProtocolError(f"file {message.file} was opened twice")
        self._files = {
            number: file
            for number, file in self._files.items()
            if file.state is FileState.RECEIVING or not file.is_received
        }
        file = IncomingFile(message)
        self._files[message.file] = file
        self._committer.add_file(file)
        self._start_if_described(file)

    def _start_if_described(self, file: IncomingFile) -> None:
        if file.is_described:
            self._pipeline.start(file)

    def _prefault(self, chunk_bytes: int) -> None:
        """Reserve the pages of the host cache, so that the first save finds memory, or is told that there is none."""
        nbytes = self._settings.cache_nbytes
        try:
            for begin in range(0, nbytes, max(chunk_bytes, mmap.PAGESIZE)):
                os.posix_fallocate(self._settings.cache_fd, begin, min(chunk_bytes, nbytes - begin))
        except OSError as error:
            message = f"no memory for a host cache of {nbytes} bytes: {error.strerror}"
            self._channel.send(PrefaultFailed(message, error.errno))
        else:
            self._channel.send(Prefaulted(nbytes))

    def _on_terminate(self, *_: object) -> None:
        if self._grace_end is None:
            self._grace_end = time.monotonic() + self._settings.grace_seconds
            self._carriers.stop()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_writer, b"\0")


def main(arguments: Sequence[str]) -> int:
    """The life of a flusher process."""
    threading.stack_size(_STACK_BYTES)
    _allow_many_files()
    status = EXIT_BROKEN
    try:
        status = FlusherProcess(Settings.from_argument(arguments[0])).run()
    except Exception:  # noqa: BLE001 - the top of the process: said on stderr, and in the exit status
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # a thread may hang in a call to the disk for ever


def _spawn(name: str, body: Callable[[], None]) -> None:
    """Start a thread of which any exception ends the process: half a flusher is worse than none."""

    def run() -> None:
        try:
            body()
        except Exception:  # noqa: BLE001 - the top of a thread
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(EXIT_BROKEN)

    threading.Thread(target=run, name=name, daemon=True).start()


def _spawn_carrier(name: str, body: Callable[[], None]) -> None:
    """Start a thread that may call the library for object stores."""
    usual = threading.stack_size(_CARRIER_STACK_BYTES)
    try:
        _spawn(name, body)
    finally:
        threading.stack_size(usual)


def _allow_many_files() -> None:
    """Every file stays open, and so locked, until its checkpoint is committed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass
