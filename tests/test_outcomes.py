"""Which failures are still to be raised when saves settle in another order than they were begun."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from datastates.attempt import Attempt
from datastates.errors import StorageError
from datastates.events import EventLog
from datastates.flusher.work import CommitResult
from datastates.outcomes import Outcomes


class Saves:
    """Begins two checkpoints, one after the other, and settles them in any order."""

    def __init__(self, outcomes: Outcomes, tmp_path) -> None:
        self._outcomes = outcomes
        self.attempts = []
        for number in range(2):
            path = str(tmp_path / str(number))
            self.attempts.append(Attempt(str(number), path, path, str(number), begin=float(number)))
            outcomes.add(self.attempts[-1])

    def settle(self, number: int, error: BaseException | None = None) -> None:
        done: Future[CommitResult] = Future()
        if error is None:
            done.set_result(CommitResult(str(number), self.attempts[number].path, str(number), 0, 0))
        else:
            done.set_exception(error)
        self._outcomes.settle(self.attempts[number], done)


@pytest.fixture
def saves(tmp_path):
    events = EventLog(0, None, None)
    outcomes = Outcomes(events, lambda _: None, forgiving=True)
    yield Saves(outcomes, tmp_path), outcomes
    events.close()


def test_a_younger_checkpoint_makes_up_for_an_older_one(saves):
    two, outcomes = saves
    two.settle(0, StorageError("lost"))
    two.settle(1)
    outcomes.raise_failure()


def test_an_older_one_does_not_make_up_for_a_younger_one_that_was_lost_first(saves):
    two, outcomes = saves
    two.settle(1, StorageError("lost"))
    two.settle(0)
    with pytest.raises(StorageError, match="lost"):
        outcomes.raise_failure()
    outcomes.raise_failure()  # told
