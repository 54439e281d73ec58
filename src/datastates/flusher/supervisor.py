"""Keeps one flusher process running: talks to it, and replaces it when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
from collections import deque
from dataclasses import replace

from datastates.errors import FlusherDiedError, ProtocolError, WaitTimeoutError
from datastates.flusher import launch
from datastates.flusher.ledger import Ledger
from datastates.flusher.protocol import MAX_MESSAGE_BYTES, Close, Finished, Request, decode, encode
from datastates.flusher.quick_socket import Inbox, send_at_once
from datastates.life_cycle import LifeCycle

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Deaths of the process, none of which did anything useful, before its work is given up."""

_REAP_SECONDS = 2.0  # between the end of the socket and the end of the process


class Supervisor:
    """The process of one rank's flusher, seen from the trainer, and the thread that listens to it.

    Requests are sent by the caller as far as the socket takes them at once, so that they are on their way even
    if the trainer dies then; the thread sends what is left. Everything else is done by the thread alone, also
    the start of another process, so it works when the interpreter can start no threads any more.
    """

    def __init__(self, settings: launch.Settings, command: tuple[str, ...], ledger: Ledger) -> None:
        """Start process and thread.

        Args:
            settings: for the process; the cache's descriptor is duplicated.
            command: how it is started.
            ledger: what is in flight; protected by `lock`.

        Raises:
            FlusherDiedError: the process cannot be started.
        """
        self._rank = settings.rank
        self._command = command
        self._cache_fd = os.dup(settings.cache_fd)
        self._trainer_fd = launch.open_pidfd(settings.trainer_pid)
        self._settings = replace(settings, cache_fd=self._cache_fd, trainer_fd=self._trainer_fd)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.lock = threading.RLock()  # protects the ledger and all fields below; see `FlusherClient._locked`
        self.life = LifeCycle.OPEN
        self._ledger = ledger
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_wanted = False  # there is work for a process, but none runs
        self._outgoing: deque[bytes] = deque()
        self._inbox = Inbox(MAX_MESSAGE_BYTES + 1)
        self._num_deaths = 0
        self._finished = threading.Event()  # all is done but the carrying to further tiers, or the thread has ended
        try:
            self._start()
        except OSError as error:
            self._close_descriptors()
            raise FlusherDiedError(f"the flusher process cannot be started: {error}") from error
        self._thread = threading.Thread(target=self._run, name="datastates-flusher-client", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        with self.lock:
            return 0 if self._process is None else self._process.pid

    def close(self, timeout: float | None) -> None:
        """Have everything finished that can be, then end process and thread. Raises WaitTimeoutError.

        Where checkpoints are still being carried to further tiers, process and thread go on with that by themselves.
        """
        with self.lock:
            if self.life is LifeCycle.OPEN:
                self.life = LifeCycle.CLOSING
                self._ledger.drop_prefaults()
                if self._process is not None:
                    self.post(Close())
                self.wake()
        if not self._finished.wait(timeout):
            raise WaitTimeoutError(f"flusher process {self.pid} is not done after {timeout} s; it goes on by itself")

    def post(self, *requests: Request) -> None:
        """Send now, with the lock held, as far as the socket takes it; the thread sends the rest."""
        if self._process is None:
            self._is_wanted = True  # the ledger has it: a new process is told all of the ledger
            self.wake()
            return
        self._outgoing.extend(encode(request) for request in requests)
        self._send_outgoing()
        if self._outgoing:
            self.wake()

    def _send_outgoing(self) -> None:
        while self._outgoing and self._socket is not None:
            try:
                send_at_once(self._socket.fileno(), self._outgoing[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionError):
                self._outgoing.clear()  # the thread will see the end of the process, too
                return
            self._outgoing.popleft()

    def _start(self) -> None:
        ours, theirs = launch.socket_pair()
        try:
            settings = launch.with_socket(self._settings, theirs.fileno())
            self._process = launch.start(settings, self._command)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self._is_wanted = False
        self._ledger.has_progress = False
        self._outgoing.clear()

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the flusher client of rank %d broke; saves in flight are lost", self._rank)
            self._give_up(error)
        finally:
            with self.lock:
                self.life = LifeCycle.CLOSED
                self._close_descriptors()
            self._finished.set()

    def _turn(self) -> bool:
        """Wait for something and deal with it. Returns False when there is nothing left to do for ever."""
        with self.lock:
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            if self._socket is not None:
                poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        is_woken = any(descriptor == self._wake_fd for descriptor, _ in poller.poll())
        if is_woken:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        with self.lock:
            self._send_outgoing()
            is_dead = self._process is not None and not self._receive()
        self._run_deferred()
        if is_dead:
            self._bury()
        with self.lock:
            if self._process is None and self.life is LifeCycle.CLOSING and not self._ledger.is_pending:
                return False
            is_wanted = self._process is None and (self._is_wanted or self.life is LifeCycle.CLOSING)
        if is_wanted:
            self._replace()
        self._run_deferred()
        return True

    def _run_deferred(self) -> None:
        """Run callbacks of users; they may call the client."""
        while True:
            with self.lock:
                actions = self._ledger.take_deferred()
            if not actions:
                return
            for action in actions:
                action()

    def _receive(self) -> bool:
        """Take all answers that are there. Returns False when no more can come."""
        while self._socket is not None:
            try:
                packet = self._inbox.receive(self._socket.fileno())
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # said once, before what is left in the queue: it died without having read all requests
            if not packet:
                return False
            try:
                message = decode(packet)
                if isinstance(message, Finished):
                    self._finished.set()
                else:
                    self._ledger.take(message)
            except ProtocolError:
                logger.exception("flusher process of rank %d is replaced", self._rank)
                return False
        return False

    def _bury(self) -> None:
        """Wait for the end of a process that does not answer any more; it must not write beside its successor."""
        with self.lock:
            process, connection = self._process, self._socket
            self._process, self._socket = None, None
            self._outgoing.clear()
            self._num_deaths = 1 if self._ledger.has_progress else self._num_deaths + 1
            is_carrying = len(self._settings.tiers) > 1 and self.life is LifeCycle.OPEN
            self._is_wanted = self._ledger.is_pending or is_carrying
            self._ledger.free_lost()
        if connection is not None:
            connection.close()
        if process is None:
            return
        try:
            status = process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if self._is_wanted:
            logger.warning("flusher process %d of rank %d ended with status %d", process.pid, self._rank, status)

    def _replace(self) -> None:
        """Start another process and give it all that is not finished."""
        if self._num_deaths >= MAX_DEATHS:
            self._give_up(None)
            return
        with self.lock:
            try:
                self._start()
            except OSError as error:
                logger.warning("no flusher process can be started: %s", error)
                self._num_deaths += 1
                self.wake()
                return
            requests = [*self._ledger.work(), *([Close()] if self.life is LifeCycle.CLOSING else [])]
            self.post(*requests)

    def _give_up(self, cause: Exception | None) -> None:
        error = FlusherDiedError(
            f"the flusher process of rank {self._rank} died {self._num_deaths} times without any progress: what was "
            "in flight is lost; its messages are on stderr, and dmesg tells whether memory ran out"
        )
        error.__cause__ = cause
        with self.lock:
            self._ledger.lose_all(error)
            self._num_deaths = 0
            self._is_wanted = False
            self.wake()
        self._run_deferred()

    def _close_descriptors(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for descriptor in (self._cache_fd, self._trainer_fd, self._wake_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._cache_fd = self._trainer_fd = self._wake_fd = -1
