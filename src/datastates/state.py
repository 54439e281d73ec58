"""What a state is made of: its tensors, their names, and how their bytes are captured.

A state is any Python object, as a rule nested dictionaries. Its tensors are *eager* (they may change before
the next optimizer step, so their bytes are taken inside ``save()``) or *lazy* (copied while training goes on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from datastates.copying import copy_to_bytes
from datastates.fqns import join

__all__ = [
    "Capture",
    "Captured",
    "EagerRule",
    "IsEager",
    "alias",
    "capture_host",
    "children",
    "default_is_eager",
    "has_its_bytes",
    "has_own_storage",
    "is_plain",
    "join",
    "named_tensors",
    "version_of",
]

IsEager = Callable[[str, torch.Tensor], bool]
"""Says of a tensor, given its fqn, whether its bytes must be captured inside ``save()``."""

#: Devices whose tensors show no storage; torch itself pickles a CPU copy of them.
#: Source: ``torch.Tensor._reduce_ex_internal``.
DEVICES_WITHOUT_STORAGE = frozenset({"xla", "maia", "mtia"})


CONTAINERS = (dict, list, tuple, set, frozenset)
"""What tensors are looked for in, their subclasses included."""


class Captured(Protocol):
    """The bytes of a captured tensor, on their way from its device; a `plan.Readable`."""

    nbytes: int

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``offset`` on."""


class Capture(Protocol):
    """Takes the bytes of an eager tensor, on the thread that calls ``save()``.

    The tensor is strided and on any device. The answer is one of

    * bytes: the row-major elements, conjugation and negation resolved, which nobody changes any more;
    * what gives those bytes when they have come from the device;
    * None: it cannot be captured now. The plan then keeps the tensor as a source before `FilePlan.eager_end`.
    """

    def __call__(self, tensor: torch.Tensor) -> bytes | bytearray | memoryview | Captured | None: ...


def capture_host(tensor: torch.Tensor) -> memoryview:
    """Capture a tensor of the host; never starts an OpenMP team."""
    return memoryview(copy_to_bytes(tensor))


@dataclass(frozen=True)
class EagerRule:
    """Eager are 0-dim tensors (step counters), those of few bytes, and those of which ``is_volatile`` says so.

    Attributes:
        threshold_bytes: tensors of at most so many bytes are eager.
        is_volatile: asked about larger ones; None: no others.
    """

    threshold_bytes: int
    is_volatile: IsEager | None = None

    def __call__(self, fqn: str, tensor: torch.Tensor) -> bool:
        if tensor.numel() * tensor.itemsize <= self.threshold_bytes or tensor.dim() == 0:
            return True
        return self.is_volatile is not None and self.is_volatile(fqn, tensor)


def default_is_eager(threshold_bytes: int) -> EagerRule:
    """Eager are 0-dim tensors (step counters) and those of at most ``threshold_bytes``."""
    return EagerRule(threshold_bytes)


def has_own_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a strided window over one storage: an ordinary tensor or parameter."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type not in DEVICES_WITHOUT_STORAGE
        and torch._C._has_storage(tensor)
    )


def has_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage is as long as the tensor needs.

    It is not where somebody has freed or shrunk it (``storage.resize_(0)``): the memory there belongs to others then.
    """
    if not tensor.numel():
        return True
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + span) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether shape, strides, dtype, ``requires_grad`` and a storage say all about the tensor."""
    return type(tensor) is torch.Tensor and not tensor.__dict__ and has_own_storage(tensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A detached ordinary tensor over the same memory, which no rebinding of ``tensor.data`` reaches."""
    detached = tensor.detach()
    return detached if type(detached) is torch.Tensor else detached.as_subclass(torch.Tensor)


def version_of(tensor: torch.Tensor) -> int:
    """``tensor._version``, or -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def children(container: object) -> Iterator[tuple[object, object]]:
    """Keys and values of a dictionary, list, tuple or set (subclasses, too); nothing for anything else."""
    if isinstance(container, dict):
        yield from container.items()
    elif isinstance(container, (list, tuple, set, frozenset)) and not isinstance(container, torch.Size):
        yield from enumerate(container)


def named_tensors(state: object) -> dict[int, tuple[str, torch.Tensor]]:
    """All tensors reachable through containers, by ``id``, each with the first fqn that leads to it.

    Containers are visited once, so cycles end. Tensors hidden in other objects are not found.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    visited: set[int] = set()
    stack: list[tuple[str, object]] = [("", state)]
    while stack:
        prefix, node = stack.pop()
        if isinstance(node, torch.Tensor):
            found.setdefault(id(node), (prefix, node))
            continue
        if id(node) in visited:
            continue
        inner = [(join(prefix, key), child) for key, child in children(node) if not isinstance(child, _LEAVES)]
        if inner:
            visited.add(id(node))
            stack.extend(reversed(inner))
    return found


_LEAVES = (str, int, float, bytes, type(None))
