"""The saves that one rank has in flight, for those who wait for them."""

from __future__ import annotations

from collections.abc import Collection

from datastates.attempt import Attempt
from datastates.commit_requests import CommitRequests
from datastates.deadline import Deadline
from datastates.entrance import Entrance
from datastates.errors import SaveSkippedError
from datastates.outcomes import Outcomes
from datastates.paths import resolved
from datastates.staging import Staging
from datastates.tiers.watch import CarryWatch


class SavesInFlight:
    """Says which saves are in flight, waits for them, and raises what has become of them. Thread safe."""

    def __init__(
        self,
        entrance: Entrance,
        staging: Staging,
        requests: CommitRequests,
        outcomes: Outcomes,
        carry_watch: CarryWatch,
    ) -> None:
        self._entrance = entrance
        self._staging = staging
        self._requests = requests
        self._outcomes = outcomes
        self._carry_watch = carry_watch

    @property
    def is_open(self) -> bool:
        return self._entrance.is_open

    @property
    def is_busy(self) -> bool:
        """Whether an earlier save is not settled yet."""
        return bool(self._outcomes.unsettled)

    @property
    def unsettled(self) -> list[Attempt]:
        """The attempts in flight, oldest first."""
        return self._outcomes.unsettled

    @property
    def waiting(self) -> list[str]:
        """Names of the attempts that are not settled and not the oldest of those."""
        return [attempt.name for attempt in self._outcomes.unsettled[1:]]

    @property
    def torn_fqns(self) -> frozenset[str]:
        """Tensors that have changed too early once: to be copied inside of the call from then on."""
        return self._outcomes.torn_fqns

    def has_in_flight(self, path: str) -> bool:
        """Whether a save to this file, or to the checkpoint that it belongs to, is neither committed nor lost yet."""
        return bool(self._outcomes.unsettled) and bool(self._outcomes.pending(resolved(path)))

    def losses_in(self, folder: str) -> list[BaseException]:
        """Why checkpoints in a folder were lost, also where a later one that commits makes up for it.

        Those that `raise_failure` has told of are left out.
        """
        return self._outcomes.losses_in(folder)

    def drop(self, names: Collection[str], cause: str) -> None:
        """Give up attempts in favour of a younger one; those that are settled meanwhile stay as they are."""
        for attempt in self._outcomes.unsettled:
            if attempt.name in names and attempt.error is None:
                attempt.error = SaveSkippedError(f"{attempt.path}: dropped, {cause}")
                self._requests.give_up(attempt)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until every save so far is in the host cache, or lost. Raises WaitTimeoutError.

        From then on the state may be changed, and the death of this process does not lose it.
        """
        if not self._entrance.is_ours and (not self._staging.is_empty or self._outcomes.unsettled):
            self._entrance.check()  # the end of what was in flight when a child was forked is told to the parent
        self._staging.wait(timeout)

    def settle(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed or has failed; failures are left for `raise_failure`.

        Raises:
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        self.wait_staged(timeout)
        for attempt in self._outcomes.unsettled:
            deadline.wait(attempt.committed, f"{attempt.path}: not committed")

    def wait_committed(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed; includes `wait_staged`.

        Raises:
            DataStatesError: the first failure that has not been raised yet; all of them are in the log.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        self.settle(timeout)
        self.raise_failure()

    def wait_carried(self, timeout: float | None = None) -> None:
        """Block until every checkpoint so far is committed, and in all tiers that it is carried to.

        What the flusher has given up (removed at the first tier's limit, damaged, not kept by a tier's rules) is not
        waited for; the log has said so. Works also after `close`.

        Raises:
            DataStatesError: as `wait_committed`.
            WaitTimeoutError: not all is carried within ``timeout`` seconds; names what is not.
        """
        deadline = Deadline(timeout)
        if self.is_open:
            self.wait_committed(timeout)
        self._carry_watch.wait(deadline.left())

    def wait_for(self, path: str, timeout: float | None = None) -> None:
        """Block until no save to this file, or to its checkpoint, is in flight.

        Raises:
            DataStatesError: the youngest of those saves is lost, and nobody has been told: what is there is older. Not
                raised by a forgiving saver.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        path = resolved(path)
        if self._outcomes.pending(path):
            self.settle(timeout)
        error = self._outcomes.loss_of(path)
        if error is not None:
            raise error

    def raise_failure(self) -> None:
        """Raise the first background failure that has not been raised yet, and forget the others (they are logged)."""
        self._outcomes.raise_failure()
