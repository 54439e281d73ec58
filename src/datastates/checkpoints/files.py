"""The files of one rank of a checkpoint, as they are saved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from datastates.attempt import Attempt, SaveHandle
from datastates.checkpoints import random_states
from datastates.checkpoints.parts import fingerprint_of, split
from datastates.checkpoints.states import FINGERPRINTS, RANDOM_STATES, check_entries, eager_rule, state_of
from datastates.checkpoints.summary import Shared, Summary, file_name, summary_name
from datastates.errors import StateError, WaitTimeoutError
from datastates.nodes.grouping import Nodes
from datastates.ranks import Ranks
from datastates.saver import Saver
from datastates.state import IsEager


class Files:
    """Saves this rank's part of each checkpoint."""

    def __init__(
        self,
        ranks: Ranks,
        run_id: str,
        *,
        replicated: bool | frozenset[str],
        saves_random_states: bool,
        suffix: str,
        timeout: float,
        nodes: Nodes | None = None,
    ) -> None:
        """Args:
        ranks: all that save together.
        run_id: equal on all of them, unlike in any other run.
        replicated: names of the entries that are the same on all ranks; True: all.
        saves_random_states: whether they are added.
        suffix: of the names of files with states.
        timeout: seconds to wait for other ranks at the first save with replicated entries.
        nodes: where they share no directory: each gets a whole copy of replicated entries, and of what the
            checkpoint says of itself.
        """
        self._ranks = ranks
        self._sharers = tuple(range(ranks.size)) if nodes is None else nodes.part.ranks
        self._run_id = run_id
        self._replicated = replicated
        self._saves_random_states = saves_random_states
        self._suffix = suffix
        self._timeout = timeout
        self._is_compared = False
        self._has_told = False  # this rank's structure, and not heard of all others yet
        self._num_compared = 0
        self._has_compared = False  # in the save that is being made

    def save(
        self,
        saver: Saver,
        attempt: Attempt,
        step: int,
        serial: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        is_eager: IsEager | None,
    ) -> SaveHandle:
        """Save the state of this rank, and on the first what the checkpoint says of itself; see `Checkpointer.save`.

        Raises:
            StateError: the state cannot be saved, or a replicated entry is not the same on all ranks.
            WaitTimeoutError: at the first save with such entries: not all ranks save.
        """
        check_entries(state)
        path = os.path.join(attempt.path, file_name(self._ranks.rank, self._suffix))
        if attempt.is_skipped:
            return saver.save({}, path, attempt=attempt)
        tree, shared = self._tree(state)
        rank = self._ranks.rank
        if rank == self._sharers[0]:
            entries = (*state, RANDOM_STATES) if self._saves_random_states else tuple(state)
            summary = Summary(step, serial, self._ranks.size, self._suffix, entries, shared, metrics)
            # before the state: what is staged then is the whole checkpoint, which outlives this process
            saver.save(summary.to_state(), os.path.join(attempt.path, summary_name(self._suffix)), attempt=attempt)
        handle = saver.save(tree, path, attempt=attempt, is_eager=eager_rule(state, is_eager))
        self._has_compared = False
        return handle

    def _tree(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Shared]]:
        """What this rank's file holds, and where the replicated entries lie."""
        wanted = set(state) if self._replicated is True else set(self._replicated or ())
        unknown = sorted(wanted - set(state))
        if unknown:
            raise StateError(f"{unknown[0]!r} is declared as replicated, and is not in the state", unknown[0])
        tree: dict[str, Any] = {}
        shared: dict[str, Shared] = {}
        for name, value in state.items():
            found = state_of(name, value)
            if name not in wanted:
                tree[name] = found
                continue
            part = split(found, self._sharers.index(self._ranks.rank), len(self._sharers), name)
            owners = tuple(self._sharers[index] for index in part.shared.ranks)
            is_alone = len(self._sharers) == 1 < self._ranks.size  # on its node
            fingerprint = fingerprint_of(found, name) if is_alone else part.shared.fingerprint
            shared[name] = Shared(owners, fingerprint)
            if not part.is_empty:
                tree[name] = part.tree
        if shared and self._ranks.size > 1:
            self._compare({name: one.fingerprint for name, one in shared.items()})
            tree[FINGERPRINTS] = {name: one.fingerprint for name, one in shared.items()}
        if self._saves_random_states:
            tree[RANDOM_STATES] = random_states.capture()
        return tree, shared

    def decline(self) -> None:
        """This rank could not save: the others need not wait for its structure, and compare at their next save."""
        has_compared, self._has_compared = self._has_compared, False
        if self._replicated and not (self._is_compared or has_compared or self._has_told):
            self._ranks.tell(self._comparison, json.dumps(None))
            self._num_compared += 1

    @property
    def _comparison(self) -> str:
        """The name of the one that is next, the same on all ranks: each answers once to each."""
        return f"datastates/{self._run_id}/{self._num_compared}"

    def _compare(self, fingerprints: dict[str, int]) -> None:
        """Until it was so once: do all ranks have the same structure? A mistake shows here, rather than at a load."""
        if self._is_compared:
            return
        if not self._has_told:
            self._ranks.tell(self._comparison, json.dumps(fingerprints))
            self._has_told = True
        try:
            known = [json.loads(found) for found in self._ranks.hear(self._comparison, self._timeout)]
        except WaitTimeoutError as error:  # whoever comes later finds what this rank has told, and does not tell again
            raise WaitTimeoutError(f"replicated entries are compared when they are first saved: {error}") from error
        self._has_told = False
        self._has_compared = True
        self._num_compared += 1
        if None in known:  # that rank gives this checkpoint up, which all will hear
            return
        for rank, found in enumerate(known):
            for name, fingerprint in fingerprints.items():
                if found.get(name) != fingerprint:
                    message = (
                        f"{name!r} is declared as replicated, and is not the same on all ranks: names, dtypes or shapes"
                        f" of rank {rank} are others than those of rank {self._ranks.rank}"
                    )
                    raise StateError(message, name)
        self._is_compared = True
