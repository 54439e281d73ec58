"""Publishing: from durable files to a checkpoint that all ranks have completed.

One thread decides everything about attempts. Others hand it work through a queue, so the order of decisions
is the order of arrival; commits are decided strictly in the order in which they were asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue

from datastates.attempt_folder import AttemptLock, last_seen
from datastates.commit import roll_forward
from datastates.directories import fsync_directory
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.flusher.causes import answer_of, failure_from, failure_of, text_of
from datastates.flusher.incoming import ENDED, Attempt, FileState, IncomingFile
from datastates.flusher.meeting_point import MeetingPoint
from datastates.flusher.patience import Patience
from datastates.flusher.protocol import Abort, Answer, Begin, Commit, Publish, Settled, shortened
from datastates.flusher.writer import WritePipeline
from datastates.manifest import (
    ABORTED_NAME,
    LATEST_NAME,
    METADATA_NAME,
    UNFINISHED_NAME,
    CommitRecord,
    Failure,
    read_causes,
    write_causes,
)
from datastates.node_parts import NodePart
from datastates.recent_names import RecentNames
from datastates.recovery import remove_superseded
from datastates.storage import write_atomically
from datastates.system_calls import storage_errors

_FIRST_POLL_SECONDS = 0.01
_LAST_POLL_SECONDS = 1.0
_TRIES = 6  # at polls, so within a third of a second


class Committer:
    """Decides about attempts; owned by the flusher process, which starts `run` on a thread of its own."""

    def __init__(
        self,
        send: Callable[[Answer], bool],
        on_idle: Callable[[], None],
        on_committed: Callable[[str], None],
        *,
        rank: int,
        world_size: int,
        commit_timeout_seconds: float,
        node: NodePart | None = None,
    ) -> None:
        self._send = send
        self._on_idle = on_idle
        self._on_committed = on_committed
        self._rank = rank
        self._patience = Patience(commit_timeout_seconds)
        self._meeting_point = MeetingPoint(rank, world_size, node)
        self._ranks = self._meeting_point.ranks
        self._is_first = self._meeting_point.is_first  # where the ranks share a directory: rank 0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._attempts: dict[str, Attempt] = {}
        self._settled = RecentNames()
        self._order: list[Attempt] = []
        self._pipeline: WritePipeline | None = None
        self.num_lost = 0
        self.num_posted = 0
        self._num_done = 0

    @property
    def is_idle(self) -> bool:
        """Whether all that was posted is done and no attempt is left. Call it on the thread that posts requests."""
        return self._num_done == self.num_posted and not self._attempts

    def begin(self, message: Begin) -> None:
        """Others may wait for this rank's part of a checkpoint from now on, and are told if it does not come."""
        if len(self._ranks) > 1:
            self._post(lambda: self._note_folder(message))

    def add_file(self, file: IncomingFile) -> None:
        self._post(lambda: self._attempt(file.attempt).files.append(file))

    def request(self, message: Publish | Commit) -> None:
        """There will be no further files of the attempt."""
        self._post(lambda: self._begin(self._attempt(message.attempt), message))

    def abort(self, message: Abort) -> None:
        self._post(lambda: self._abort_asked(message))

    def abandon(self, cause: str, *, everything: bool) -> None:
        """The trainer will send nothing more: give up what is incomplete, or everything that can be given up."""
        self._post(lambda: self._abandon(cause, everything))

    def on_file_end(self, _: IncomingFile) -> None:
        """A file is durable or has failed. Called by the pipeline's threads."""
        self._inbox.put(_look_again)

    def run(self, pipeline: WritePipeline) -> None:
        """Decide, for ever."""
        self._pipeline = pipeline
        delay = _FIRST_POLL_SECONDS
        while True:
            try:
                action = self._inbox.get(timeout=delay if self._is_polling() else None)
                delay = _FIRST_POLL_SECONDS
            except Empty:
                action = _look_again
                delay = min(2 * delay, _LAST_POLL_SECONDS)
            self._do(action)
            with contextlib.suppress(Empty):
                while True:
                    self._do(self._inbox.get_nowait())
            for attempt in list(self._order):
                if not self._inbox.empty():
                    break  # an abort must not wait until all that could be committed is
                self._advance(attempt)
            self._on_idle()

    def _do(self, action: Callable[[], None]) -> None:
        action()
        if action is not _look_again:
            self._num_done += 1

    def _post(self, action: Callable[[], None]) -> None:
        self.num_posted += 1
        self._inbox.put(action)

    def _is_polling(self) -> bool:
        return any(attempt.deadline is not None for attempt in self._order)

    def _attempt(self, name: str) -> Attempt:
        return self._attempts.setdefault(name, Attempt(name))

    def _note_folder(self, message: Begin) -> None:
        if message.attempt not in self._settled:
            self._attempt(message.attempt).directory = message.directory

    def _begin(self, attempt: Attempt, message: Publish | Commit) -> None:
        attempt.request = message
        self._order.append(attempt)
        if isinstance(message, Commit):
            attempt.directory = message.directory
            try:
                attempt.lock = AttemptLock(message.directory, attempt.name)
            except StorageError as error:
                self._fail(attempt, Failure(str(error), error.errno, error.path))

    def _abort_asked(self, message: Abort) -> None:
        if message.attempt not in self._settled:
            self._abort(self._attempt(message.attempt), message.cause, message.directory)

    def _abort(self, attempt: Attempt, cause: str, directory: str) -> None:
        if self._meeting_point.is_bound(attempt):
            return  # promised, or decided: the outcome comes by itself
        attempt.directory = attempt.directory or directory
        self._fail(attempt, Failure(cause), {self._rank: cause})

    def _abandon(self, cause: str, everything: bool) -> None:
        self._patience.abandon()
        for attempt in list(self._attempts.values()):
            incomplete = [file for file in attempt.files if not file.is_received]
            if everything and attempt.deadline is not None and not self._is_first:
                self._end(attempt, Failure(f"{cause} before rank {self._ranks[0]} had committed"), {})
            elif attempt.request is None or everything:
                self._abort(attempt, f"{cause} before its part was complete", "")
            for file in incomplete:
                message = f"{file.path}: {cause} before all of it had arrived"
                self._pipe().fail(file, StorageError(message, path=file.path))

    def _advance(self, attempt: Attempt) -> None:
        if attempt.name not in self._attempts:
            return
        try:
            if isinstance(attempt.request, Publish):
                self._advance_files(attempt)
            elif isinstance(attempt.request, Commit):
                self._advance_commit(attempt, attempt.request)
        except (OSError, CorruptCheckpointError) as error:
            self._fail_or_retry(attempt, failure_from(error, attempt))

    def _advance_files(self, attempt: Attempt) -> None:
        for file in attempt.files:
            if file.state is FileState.DURABLE and file.partial is not None and not self._is_behind(attempt, file.path):
                file.partial.publish()
                file.state, file.partial = FileState.PUBLISHED, None
        failed = [file for file in attempt.files if file.state is FileState.FAILED]
        if failed and all(file.state in ENDED for file in attempt.files):
            self._fail(attempt, failure_of(failed[0]))
        elif all(file.state is FileState.PUBLISHED for file in attempt.files):
            self._settle(attempt, sum(file.nbytes for file in attempt.files), len(attempt.files))

    def _is_behind(self, attempt: Attempt, path: str) -> bool:
        """Whether the same path was asked for earlier and is not there yet: the last save must win."""
        earlier = self._order[: self._order.index(attempt)]
        return any(
            file.path == path and file.state in (FileState.RECEIVING, FileState.DURABLE)
            for other in earlier
            for file in other.files
        )

    def _advance_commit(self, attempt: Attempt, request: Commit) -> None:
        failed = [file for file in attempt.files if file.state is FileState.FAILED]
        if failed:
            self._fail(attempt, failure_of(failed[0]))
            return
        is_first = next(other for other in self._order if isinstance(other.request, Commit)) is attempt
        is_durable = all(file.state in ENDED for file in attempt.files)
        if not is_first or not is_durable or any(self._is_behind(attempt, file.path) for file in attempt.files):
            return
        record = self._meeting_point.record(attempt)
        if record is not None:
            self._announce(attempt, request, record)
            return
        causes = read_causes(attempt.directory, attempt.name, ABORTED_NAME)
        if causes is not None:
            self._fail(attempt, Failure(text_of(causes)), causes)
            return
        causes = None if self._is_first else read_causes(attempt.directory, attempt.name, UNFINISHED_NAME)
        if causes is not None:
            self._end(attempt, Failure(text_of(causes)), causes)
            return
        if not attempt.is_promised:
            self._meeting_point.promise(attempt, request.tag)
            attempt.is_promised = True
            attempt.deadline = attempt.deadline or self._patience.deadline()
        elif self._meeting_point.is_removed(attempt):
            message = f"{attempt.directory} was removed before this rank had seen it committed"
            self._end(attempt, Failure(message, errno.ENOENT, attempt.directory), {})
            return
        first = {self._ranks[0]}
        if self._is_first:
            self._decide(attempt, request)
        elif self._patience.has_ended(attempt.deadline, first) or self._patience.is_forsaken:
            seconds = self._patience.seconds(first)
            message = f"rank {self._ranks[0]} has not committed {attempt.directory} within {seconds:g} s"
            self._patience.give_up(first)
            self._end(attempt, Failure(message), {self._ranks[0]: message})  # it still may: the files stay

    def _decide(self, attempt: Attempt, request: Commit) -> None:
        """The first rank: commit when all ranks are there, give up when one has failed or the time is over."""
        causes = self._meeting_point.collect(attempt)
        missing = {rank for rank in self._ranks if rank not in attempt.manifests}
        if not causes and missing and self._patience.has_ended(attempt.deadline, missing):
            limit = f"not durable within {self._patience.seconds(missing):g} s"
            causes = {rank: limit + last_seen(attempt.directory, attempt.name, rank) for rank in sorted(missing)}
            self._patience.give_up(missing)
        elif not causes and missing and self._patience.is_forsaken:
            message = f"the trainer is gone, and the parts of ranks {sorted(missing)} have not come"
            causes_of_missing = dict.fromkeys(sorted(missing), message)
            self._end(attempt, Failure(message), causes_of_missing)  # the files stay for `recover`
            return
        if causes:
            self._fail(attempt, Failure(text_of(causes)), causes)
        elif not missing:
            self._commit(attempt, request)

    def _commit(self, attempt: Attempt, request: Commit) -> None:
        manifests = [attempt.manifests[rank] for rank in self._ranks]
        try:
            record = roll_forward(attempt.directory, manifests, request.tag)
        except OSError as error:
            self._fail_or_retry(attempt, failure_from(error, attempt))
            return
        self._announce(attempt, request, record)

    def _announce(self, attempt: Attempt, request: Commit, record: CommitRecord) -> None:
        """The checkpoint is committed. The first rank moves ``latest`` to it and removes what it replaces."""
        if self._is_first:
            pointer = os.path.join(os.path.dirname(attempt.directory), LATEST_NAME)
            try:
                with storage_errors("commit", attempt.directory):  # who renamed the record may have failed in this
                    fsync_directory(os.path.join(attempt.directory, METADATA_NAME))
                if request.update_latest:
                    write_atomically(pointer, request.tag.encode("utf-8", "surrogateescape"))
            except StorageError as error:
                self._fail_or_retry(attempt, failure_from(error, attempt))
                return
        if self._is_first:
            try:
                remove_superseded(attempt.directory, attempt.name)
            except OSError as error:
                self._warn(f"leftovers in {attempt.directory} stay: {error}")
        self._on_committed(attempt.directory)
        self._settle(attempt, record.nbytes, record.num_files)

    def _fail_or_retry(self, attempt: Attempt, failure: Failure) -> None:
        """Give an attempt up, unless others count on it: then try again at the next polls, and in the end leave it.

        What is left so can be rolled forward later: by its job's next start, or by rank 0 if this is another rank.
        """
        if not self._meeting_point.is_bound(attempt):
            self._fail(attempt, failure)
            return
        attempt.num_failures += 1
        attempt.deadline = attempt.deadline or self._patience.deadline()  # so that it polls
        if attempt.num_failures < _TRIES:
            return
        text = shortened(failure.message)
        if self._is_first:
            try:
                write_causes(attempt.directory, attempt.name, UNFINISHED_NAME, {self._rank: text}, self._rank)
            except StorageError as error:
                text += f"; the other ranks could not be told: {error}"
        self._end(attempt, Failure(text, failure.errno, failure.path), {})

    def _fail(self, attempt: Attempt, failure: Failure, causes: dict[int, str] | None = None) -> None:
        """Give an attempt up: remove its files and tell the other ranks."""
        text = shortened(failure.message)
        for file in attempt.files:
            self._pipe().fail(file, StorageError(text, failure.errno, failure.path or file.path))
        if attempt.directory:
            try:
                self._meeting_point.decline(attempt, failure, causes or {self._rank: text})
            except (StorageError, CorruptCheckpointError) as error:
                text += f"; the other ranks could not be told: {error}"
        self._end(attempt, Failure(text, failure.errno, failure.path), causes or {})

    def _settle(self, attempt: Attempt, nbytes: int, num_files: int) -> None:
        self._forget(attempt)
        self._settled.add(attempt.name)
        for file in attempt.files:
            file.state = FileState.PUBLISHED
        self._send(Settled(attempt.name, nbytes, num_files))

    def _end(self, attempt: Attempt, failure: Failure, causes: dict[int, str]) -> None:
        self._forget(attempt)
        self.num_lost += 1
        if not self._send(answer_of(attempt, failure, causes)):  # nobody else is left who could say so
            self._warn(f"{attempt.name} is lost: {failure.message}")

    def _warn(self, message: str) -> None:
        sys.stderr.write(f"datastates flusher, rank {self._rank}: {message}\n")
        sys.stderr.flush()

    def _forget(self, attempt: Attempt) -> None:
        """Let go of the attempt's files and lock; it is settled."""
        del self._attempts[attempt.name]
        if attempt in self._order:
            self._order.remove(attempt)
        for file in attempt.files:
            if file.partial is not None and file.state is not FileState.FAILED:
                file.partial.close()
        if attempt.lock is not None:
            attempt.lock.release()

    def _pipe(self) -> WritePipeline:
        if self._pipeline is None:
            raise RuntimeError("the committer does not run yet")
        return self._pipeline


def _look_again() -> None:
    """Nothing new but time, or the end of a file."""
