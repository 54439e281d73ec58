"""From the parts of nodes to whole checkpoints: who has committed, told and heard through the job's store.

For each attempt there are these keys::

    <attempt>/part/<node>      the node has committed its part, or why it has not
    <attempt>/failed           a node has not, or does not wait for the others any more
    <attempt>/whole            node 0 has heard so of all nodes, or why not
    <attempt>/known/<node>     the node has that on record: its ranks may say so

Everything happens on a thread of its own, over a connection of its own to the store. Training waits for none of it. A
call of the store ends when the network lets it, which may be never: a second thread ends what is too late by then.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from datastates.attempt import Attempt
from datastates.errors import ClosedError, CommitError, CorruptCheckpointError, StorageError
from datastates.events import now
from datastates.flusher.work import CommitResult, running_future
from datastates.manifest import LATEST_NAME, read_commit
from datastates.node_parts import NodePart
from datastates.storage import write_atomically
from datastates.whole_records import mark_whole

logger = logging.getLogger(__name__)

FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 0.005, 0.25

OWN_NODE_SECONDS = 5.0
"""So much longer than its node's first rank another rank waits, to hear why that one has given up."""

ANSWER_SECONDS = 5.0
"""So long after its time an attempt is given up whose store does not answer; so long a close waits for the store."""


class Store(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(slots=True, eq=False)
class _Followed:
    """An attempt on its way.

    Attributes:
        part: what this node has committed, or why it has not.
        whole: done when all nodes have.
        is_told: this node's part is known in the store.
        is_recording: all nodes have, and this one puts that on record: storage may take its time.
        end: what it has come to, which the others perhaps do not know yet.
    """

    attempt: Attempt
    number: int
    deadline: float
    part: CommitResult | None
    error: BaseException | None
    whole: Future[CommitResult] = field(default_factory=lambda: running_future(CommitResult))
    is_told: bool = False
    is_recording: bool = False
    end: _End | None = None

    def key(self, kind: str, node: int | None = None) -> str:
        return f"{self.attempt.name}/{kind}" if node is None else f"{self.attempt.name}/{kind}/{node}"


class Following:
    """Follows the parts that this node commits until all nodes have theirs. Thread safe."""

    def __init__(self, part: NodePart, rank: int, store: Callable[[], Store], timeout: float) -> None:
        """Args:
        part: what this rank's node saves of each checkpoint.
        rank: this process's.
        store: opens a connection to the job's store that nobody else uses.
        timeout: seconds to wait for the other nodes, once this one's part is committed.
        """
        self._part = part
        self._is_first = rank == part.first_rank
        self._timeout = timeout
        self._open_store = store
        self._condition = threading.Condition()  # protects the fields below
        self._followed: list[_Followed] = []
        self._num_followed = 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._store: Store | None = None  # of the thread
        self._unrecorded: list[Attempt] = []  # likewise: whole, and that could not be put on record
        self._last_named = -1  # likewise: the number of the attempt that `latest` names

    def follow(self, attempt: Attempt, part: Future[CommitResult]) -> Future[CommitResult]:
        """Done when all nodes have committed their parts, and this one has it on record; blocks for nothing.

        Args:
            attempt: the checkpoint.
            part: done when this node's part is committed.
        """
        whole: Future[CommitResult] = running_future(CommitResult)
        with self._condition:
            number = self._num_followed
            self._num_followed += 1
        part.add_done_callback(lambda done: self._add(attempt, number, done, whole))
        return whole

    def give_up(self, attempt: Attempt, error: BaseException) -> None:
        """This node has no part of an attempt: the others need not wait for it."""
        failed: Future[CommitResult] = running_future(CommitResult)
        failed.set_exception(error)
        self.follow(attempt, failed)

    def close(self, timeout: float | None = None) -> None:
        """End the threads; idempotent. What is not whole yet fails with ClosedError: the next start finds out.

        A thread whose store does not answer is left behind. What is being recorded is waited for, up to the timeout.
        """
        begin = now()
        with self._condition:
            self._is_closed = True
            threads = list(self._threads)
            self._condition.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():  # a callback may close
                self._join(thread, begin, math.inf if timeout is None else timeout)
        for one in self._open():
            self._end(one, one.end or _End(one.error or _closed(one.attempt)))

    def _join(self, thread: threading.Thread, begin: float, timeout: float) -> None:
        """Wait for a thread that has been told to end."""
        thread.join(max(begin + min(timeout, ANSWER_SECONDS) - now(), 0.0))
        while thread.is_alive() and now() < begin + timeout and any(one.is_recording for one in self._open()):
            thread.join(LAST_POLL_SECONDS)

    def _add(self, attempt: Attempt, number: int, done: Future[CommitResult], whole: Future[CommitResult]) -> None:
        error = done.exception()
        patience = self._timeout if self._is_first else self._timeout + OWN_NODE_SECONDS
        one = _Followed(attempt, number, now() + patience, None if error else done.result(), error, whole)
        with self._condition:
            if not self._is_closed:
                self._followed.append(one)
                if not self._threads:
                    for name, target in (("datastates-nodes", self._work), ("datastates-nodes-late", self._end_late)):
                        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                        self._threads[-1].start()
                self._condition.notify_all()
                return
        _settle(one, _End(error or _closed(attempt)))

    def _work(self) -> None:
        """The thread: for as long as there may be attempts to follow."""
        delay = FIRST_POLL_SECONDS
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed or self._followed)
                followed, is_closed = list(self._followed), self._is_closed
            ended = [one for one in followed if self._has_ended(one, is_closed)]
            with self._condition:
                if self._is_closed and not self._followed:
                    return
                delay = FIRST_POLL_SECONDS if ended else min(2 * delay, LAST_POLL_SECONDS)
                if self._followed and not self._is_closed and self._condition.wait(delay):
                    delay = FIRST_POLL_SECONDS  # there is something new

    def _has_ended(self, one: _Followed, is_closed: bool) -> bool:
        """Take an attempt as far as it goes now; whether that is the end."""
        try:
            end = self._step(one)
        except RuntimeError as error:  # what torch raises when the store does not answer
            end = _End(_lost(one, f"the job's store, which rank 0 keeps, cannot be reached: {error}"))
        except Exception as error:  # the top of a thread: whoever waits must hear of it
            logger.exception("%s: following it has failed by a defect", one.attempt.path)
            end = _End(error)
        if end is None and is_closed:
            end = _End(_closed(one.attempt))
        if end is not None:
            self._end(one, end)
        return end is not None

    def _end_late(self) -> None:
        """The second thread: gives up what the first one does not come to, since the store does not answer it."""
        while True:
            with self._condition:
                if self._is_closed:
                    return
                end = min((one.deadline for one in self._followed), default=math.inf) + ANSWER_SECONDS
                self._condition.wait(min(max(end - now(), LAST_POLL_SECONDS), threading.TIMEOUT_MAX))
            for one in self._open():
                if not one.is_recording and now() > one.deadline + ANSWER_SECONDS:
                    text = f"the job's store, which rank 0 keeps, has not answered within {self._timeout:g} s"
                    self._end(one, one.end or _End(one.error or _lost(one, text)))

    def _open(self) -> list[_Followed]:
        with self._condition:
            return list(self._followed)

    def _end(self, one: _Followed, end: _End) -> None:
        """Settle an attempt, once: what another thread has settled stays so."""
        with self._condition:
            if one not in self._followed:
                return
            self._followed.remove(one)
        _settle(one, end)

    def _step(self, one: _Followed) -> _End | None:
        """The end of an attempt, None while it is open."""
        store = self._store = self._store or self._open_store()
        known = one.key("known", self._part.index)
        if not self._is_first:
            if one.error is not None and not store.check(
                [one.key("failed")]
            ):  # perhaps there is no first rank any more
                _tell(store, one.key("failed"), {self._part.index: str(one.error)})
            return self._heard(store, one, known) if one.error is None else _End(one.error)
        if not one.is_told:
            self._tell_part(store, one)
        if self._part.index == 0:
            self._decide(store, one)
        end = self._heard(store, one, one.key("whole")) if one.error is None else _End(one.error)
        if end is not None and end.error is None:
            one.is_recording = True
            end = self._record(one)
            one.is_recording = False
        one.end = end
        if end is not None:
            if end.error is not None and not store.check([one.key("whole")]):  # nor may the others take it for whole
                _tell(store, one.key("failed"), {self._part.index: str(end.error)})
            _tell(store, known, end.causes or ({} if end.error is None else {self._part.index: str(end.error)}))
        return end

    def _tell_part(self, store: Store, one: _Followed) -> None:
        causes = {} if one.error is None else {self._part.index: str(one.error)}
        if causes:  # before the part: who finds all parts, and no failure then, may call it whole
            _tell(store, one.key("failed"), causes)
        _tell(store, one.key("part", self._part.index), causes)
        one.is_told = True

    def _decide(self, store: Store, one: _Followed) -> None:
        """Node 0: the checkpoint is whole when all have their parts, and never when one has failed or is too late."""
        if store.check([one.key("whole")]):
            return
        keys = {node: one.key("part", node) for node in range(self._part.num_nodes)}
        is_late = now() > one.deadline
        are_there = store.check(list(keys.values()))
        if store.check([one.key("failed")]):
            _tell(store, one.key("whole"), _read(store, one.key("failed")))
        elif are_there:
            _tell(store, one.key("whole"), {})
        elif is_late:
            missing = [node for node, key in keys.items() if not store.check([key])]
            text = f"it has not committed its part within {self._timeout:g} s"
            if missing:  # else the last has told its part just now, perhaps a failed one: the next round looks
                _tell(store, one.key("whole"), dict.fromkeys(missing, text))

    def _heard(self, store: Store, one: _Followed, key: str) -> _End | None:
        """What an answer says, None while it has not come, and may come yet."""
        if store.check([key]):
            causes = _read(store, key)
            if not causes:
                return _End()
            ranks = {self._part.nodes[node].ranks[0]: cause for node, cause in causes.items()}
            what = "; ".join(f"{self._part.described(node)}: {cause}" for node, cause in causes.items())
            return _End(CommitError(f"{one.attempt.path} is not whole: {what}", ranks), causes)
        if now() > one.deadline:
            return _End(_lost(one, f"whether all nodes have committed is not known within {self._timeout:g} s"))
        return None

    def _record(self, one: _Followed) -> _End:
        """Put it on record that the checkpoint is whole, and name it, unless a younger one is named already."""
        attempt = one.attempt
        self._unrecorded = [earlier for earlier in self._unrecorded if not _has_caught_up(earlier)]
        try:
            mark_whole(attempt.path, attempt.name)
            if attempt.update_latest and one.number > self._last_named:
                pointer = os.path.join(os.path.dirname(attempt.path), LATEST_NAME)
                write_atomically(pointer, attempt.tag.encode("utf-8", "surrogateescape"))
                self._last_named = one.number
        except StorageError as error:
            self._unrecorded.append(attempt)
            return _End(error)
        return _End()


@dataclass(frozen=True, slots=True)
class _End:
    """What an attempt has come to: whole, or lost for a reason.

    Attributes:
        error: why it is lost.
        causes: what nodes have said of it, by node, where that is why.
    """

    error: BaseException | None = None
    causes: dict[int, str] = field(default_factory=dict)


def _has_caught_up(attempt: Attempt) -> bool:
    """Put on record that an attempt is whole, which storage has refused before; False where it still does."""
    try:
        record = read_commit(attempt.path)
        if record is not None and record.attempt == attempt.name:  # neither removed nor saved again meanwhile
            mark_whole(attempt.path, attempt.name)
    except CorruptCheckpointError:
        return True  # there is nothing any more that could be called whole
    except StorageError:
        return False
    return True


def _settle(one: _Followed, end: _End) -> None:
    if end.error is None and one.part is not None:
        one.whole.set_result(one.part)
    else:
        one.whole.set_exception(end.error or one.error or _closed(one.attempt))


def _tell(store: Store, key: str, causes: dict[int, str]) -> None:
    store.set(key, json.dumps({str(node): cause for node, cause in causes.items()}))


def _read(store: Store, key: str) -> dict[int, str]:
    return {int(node): str(cause) for node, cause in json.loads(store.get(key)).items()}


def _lost(one: _Followed, what: str) -> CommitError:
    return CommitError(f"{one.attempt.path}: {what}; this node's part is committed, the next start finds out")


def _closed(attempt: Attempt) -> ClosedError:
    return ClosedError(
        f"{attempt.path}: closed before it was known whether all nodes have committed; this node's part is, the next"
        " start finds out"
    )
