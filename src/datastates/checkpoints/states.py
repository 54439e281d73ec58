"""The entries of a state as people give them: modules, optimizers and other stateful objects, tensors, plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeGuard

import torch

from datastates.errors import StateError
from datastates.fqns import join
from datastates.state import IsEager, has_own_storage

RANDOM_STATES = "random_states"
"""The entry that is added to every checkpoint, unless that is switched off."""

FINGERPRINTS = "fingerprints"
"""The entry of each rank's file with the fingerprints of the replicated entries, where several ranks have saved."""

RESERVED = frozenset({RANDOM_STATES, FINGERPRINTS})

_NAME = re.compile(r"[^.\0]+")


class Stateful(Protocol):
    """What gives its state and takes it back: modules, optimizers, schedulers, samplers, data loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether an object gives its state and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_entries(state: object) -> Mapping[str, Any]:
    """The state, if it is a mapping from names to what can be saved under a name.

    Raises:
        StateError: it is not; names the entry.
    """
    if not isinstance(state, Mapping) or not state:
        raise StateError(f"the state is a {type(state).__name__}, expected names and what to save: {{'model': model}}")
    for name in state:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise StateError(f"an entry is called {name!r}, expected a text without dots")
        if name in RESERVED:
            raise StateError(f"{name!r} is the name of an entry that is added by itself: give yours another", name)
    return state


def state_of(name: str, value: Any) -> Any:
    """What is saved of one entry: the state of a stateful object, anything else as it is.

    Raises:
        StateError: a stateful object is hidden in a container: it would be pickled whole.
    """
    if is_stateful(value):
        return value.state_dict()
    for key, child in _items(value):
        if not isinstance(child, torch.Tensor) and is_stateful(child):
            message = f"{join(name, key)} is a {type(child).__name__}: give it an entry of its own, or its state_dict()"
            raise StateError(message, join(name, key))
    return value


def eager_rule(state: Mapping[str, Any], is_eager: IsEager | None) -> IsEager:
    """Which large tensors change before the next optimizer's step: the buffers of modules, and what ``is_eager`` says.

    A forward pass changes buffers (running statistics, caches). Where a state dict was given instead of its module,
    nobody can tell which they are.
    """
    names: set[str] = set()
    places: set[int] = set()
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            for fqn, buffer in value.named_buffers(remove_duplicate=False):
                names.add(join(name, fqn))
                places |= {buffer.data_ptr()} if has_own_storage(buffer) else set()

    def is_volatile(fqn: str, tensor: torch.Tensor) -> bool:
        if fqn in names or (has_own_storage(tensor) and tensor.data_ptr() in places):
            return True
        return is_eager is not None and is_eager(fqn, tensor)

    return is_volatile


def _items(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()
