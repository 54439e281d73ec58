"""The plan of a state's file, as the config asks for it and earlier saves have taught."""

from __future__ import annotations

from datastates import formats
from datastates.captures import Captures
from datastates.config import CheckpointConfig
from datastates.plan import FilePlan
from datastates.state import EagerRule, IsEager


class StatePlanner:
    """Plans files of states, and remembers how those of earlier ones were laid out. Thread safe."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._planner = formats.Planner()
        self._eager_bytes = config.eager_bytes
        self._format = config.format

    def plan(
        self, state: object, path: str, captures: Captures, is_eager: IsEager | None, torn_fqns: frozenset[str]
    ) -> FilePlan:
        """Plan a file and copy what is eager of it.

        Args:
            state: nested containers of tensors and Python objects.
            path: of the file; its suffix chooses the format unless the config does.
            captures: takes the copies.
            is_eager: names further tensors to copy, whatever their size.
            torn_fqns: tensors that have changed too early once: these are copied, too.

        Raises:
            StateError: a leaf cannot be saved; names its fqn.
        """
        rule = EagerRule(self._eager_bytes, _volatile(torn_fqns, is_eager))
        return self._planner.plan(state, formats.format_for(path, self._format), captures, rule)


def _volatile(torn: frozenset[str], is_eager: IsEager | None) -> IsEager | None:
    """Says of a tensor whether it is eager though it is large; None: none is, and nobody need ask."""
    if not torn:
        return is_eager
    return lambda fqn, tensor: fqn in torn or (is_eager is not None and is_eager(fqn, tensor))
