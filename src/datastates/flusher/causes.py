"""Why an attempt is lost, as its trainer and the other ranks are told."""

from __future__ import annotations

from datastates.errors import CorruptCheckpointError, StorageError
from datastates.flusher.incoming import Attempt, IncomingFile
from datastates.flusher.protocol import AttemptFailed, shortened
from datastates.manifest import Failure

_MAX_CAUSES = 16  # a message must stay below its limit; the rest is in the record of the abort


def failure_from(error: OSError | CorruptCheckpointError, attempt: Attempt) -> Failure:
    path = error.filename if isinstance(error, OSError) and not isinstance(error, StorageError) else error.path
    code = error.errno if isinstance(error, OSError) else None
    return Failure(str(error), code, str(path or attempt.directory))


def failure_of(file: IncomingFile) -> Failure:
    error = file.error
    return Failure("failed") if error is None else Failure(str(error), error.errno, error.path)


def text_of(causes: dict[int, str]) -> str:
    first = ", ".join(f"rank {rank}: {cause}" for rank, cause in list(causes.items())[:_MAX_CAUSES])
    return f"not committed because of {first}"


def answer_of(attempt: Attempt, failure: Failure, causes: dict[int, str]) -> AttemptFailed:
    """What the trainer is told: the failure, and the causes by rank."""
    ranks = {str(rank): shortened(cause) for rank, cause in list(causes.items())[:_MAX_CAUSES]}
    return AttemptFailed(attempt.name, shortened(failure.message), failure.errno, failure.path, ranks)
