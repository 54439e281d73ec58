"""The file formats: functions from a state to the byte image of a file, pure but for what `Planner` remembers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from datastates.captures import Captures
from datastates.errors import ConfigError
from datastates.formats import safetensors, torch_layout, torch_zip
from datastates.formats.torch_planner import TorchPlanner
from datastates.plan import FilePlan
from datastates.state import Capture, EagerRule, IsEager

_PLANNERS = {torch_layout.NAME: torch_zip.plan, safetensors.NAME: safetensors.plan}


def format_for(path: str, configured: str | None) -> str:
    """The format of a file: as configured, else by its name, else torch's."""
    if path.endswith(".safetensors"):
        return safetensors.NAME
    return _known(configured) if configured is not None else torch_layout.NAME


def plan(state: object, format: str, capture: Capture, is_eager: IsEager) -> FilePlan:  # noqa: A002
    """The byte image of a file that holds ``state``.

    Captures the bytes of eager tensors and serialises everything that is not a tensor before it returns; lazy
    tensors are only aliased. Blocks for as long as ``capture`` does; must run on the thread that calls ``save()``.

    Args:
        state: any nested state; it is not changed.
        format: ``"torch"`` or ``"safetensors"``.
        capture: takes the bytes of an eager tensor.
        is_eager: says which tensors are eager. Those that no container leads to always are.

    Raises:
        StateError: a leaf cannot be saved; names its fqn.
        ConfigError: there is no such format.
    """
    planner = _PLANNERS[_known(format)]
    with _collector_paused():
        return planner(state, capture, is_eager)


class Planner:
    """Plans as `plan` does, and remembers how the files of earlier states were laid out. Thread safe.

    It keeps no tensor. Where neither names nor shapes nor devices have changed, 20,000 small tensors cost a tenth.
    """

    def __init__(self) -> None:
        self._torch = TorchPlanner()

    def plan(self, state: object, format: str, captures: Captures, rule: EagerRule) -> FilePlan:  # noqa: A002
        """See `plan`; ``captures`` takes the bytes of eager tensors, those that ``rule`` names.

        Raises:
            StateError: a leaf cannot be saved; names its fqn.
            ConfigError: there is no such format.
        """
        if _known(format) == torch_layout.NAME:
            with _collector_paused():
                made = self._torch.plan(state, captures.take, rule, captures.hold, captures.capture)
            if made is not None:
                return made
        return plan(state, format, captures.capture, rule)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A plan makes many small objects and no cycles: the garbage collector would double the time for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _known(format: str) -> str:  # noqa: A002
    if format not in _PLANNERS:
        raise ConfigError(f"unknown format {format!r}: use one of {', '.join(sorted(_PLANNERS))}")
    return format
