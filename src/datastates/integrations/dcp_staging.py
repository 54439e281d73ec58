"""What ``dcp.async_save`` copies inside of the call: all but large tensors, whose memory the fence protects.

DCP plans a save in a thread of its own, from what is made here. So that state has to be one that nobody changes:
containers and objects are copied, small tensors are cloned, large ones are aliases that follow no rebinding of
``.data``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from datastates.cache_copies import CacheCopies
from datastates.captures import Captures
from datastates.formats.pickling import PICKLE_FAILURES, unpicklable
from datastates.staging_job import torn_error
from datastates.state import EagerRule, alias, has_its_bytes, has_own_storage, named_tensors, version_of


class StagedState(dict[str, Any]):
    """The state that DCP's thread gets from the writer: the first use says which thread it is.

    Source: ``save_wrapper`` and ``_stateful_to_state_dict`` of torch 2.13, which ask it for its items before all else.
    """

    def __init__(self, on_use: Callable[[], None], on_pickle: Callable[[], NoReturn]) -> None:
        """Args:
        on_use: called by whoever asks for the items.
        on_pickle: called when it is to be sent to another process; raises.
        """
        super().__init__()
        self._on_use = on_use
        self._on_pickle = on_pickle

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._on_use()
        return super().items()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._on_pickle()


@dataclass
class Snapshot:
    """A state as it is at this moment.

    Attributes:
        state: containers of its own; nothing in it changes but through the memory of large tensors.
        is_complete: every tensor that may change before the fence was copied; otherwise they have to be staged before
            the caller may go on.
        devices: those of tensors that are copied later.
    """

    state: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = True
    devices: set[torch.device] = field(default_factory=set)
    _storages: set[int] = field(default_factory=set)
    _versions: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    @property
    def is_independent(self) -> bool:
        """Whether all tensors were copied, to host memory: nothing that training does reaches it."""
        return self.is_complete and not self._versions and not self.devices

    def check_versions(self, name: str) -> None:
        """Raise TornSnapshotError, for the save of this name, if a tensor was changed in place since the snapshot.

        Sees what autograd's version counters see.
        """
        torn = tuple(fqn for fqn, tensor, version in self._versions if version_of(tensor) != version)
        if torn:
            raise torn_error(name, torn)

    def leave(self, tensor: torch.Tensor, fqn: str) -> torch.Tensor:
        """A tensor over the same memory, to be copied later."""
        local = local_part(tensor)
        if local.device.type != "meta":  # whoever plans it says that it cannot be saved
            self._note(local)
        self._versions.append((fqn, alias(local), version_of(local)))
        return tensor if isinstance(tensor, ShardedTensor) else tensor.detach()

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; that of a device's tensor is made there, in the order of the current stream, and staged later.

        Called with autograd off: a copy follows no gradient, and need not be detached.
        """
        made = tensor.clone()
        if made.device.type not in ("cpu", "meta"):
            self._note(local_part(made))
        return made

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of a tensor of the state."""
        return has_own_storage(tensor) and tensor.untyped_storage().data_ptr() in self._storages

    def _note(self, local: torch.Tensor) -> None:
        self.devices.add(local.device)
        if has_own_storage(local):
            self._storages.add(local.untyped_storage().data_ptr())


def take_snapshot(state: dict[str, Any], captures: Captures, copies: CacheCopies, rule: EagerRule) -> Snapshot:
    """Copy what may change before the fence closes, as far as there is room; the rest stays where it is.

    Args:
        state: nested; not changed. Its tensors may be of any kind, `DTensor` and `ShardedTensor` included.
        captures: counts the copies of tensors.
        copies: makes those that it has no room for.
        rule: which tensors are copied.

    Raises:
        StateError: an object cannot be copied; names it.
    """
    made = Snapshot()
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for fqn, tensor in named_tensors(state).values():
            memo[id(tensor)] = _taken(made, fqn, tensor, captures, copies, rule)
    try:
        made.state = copy.deepcopy(dict(state), memo)
    except (*PICKLE_FAILURES, copy.Error) as error:
        raise unpicklable(state, error) from error
    return made


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: of a `ShardedTensor` the first shard, for those have but one as a rule."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    return tensor


def _taken(
    made: Snapshot, fqn: str, tensor: torch.Tensor, captures: Captures, copies: CacheCopies, rule: EagerRule
) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):  # of parameters and moments, which nothing changes but the optimizer
        return made.leave(tensor, fqn)
    local = local_part(tensor)
    if not has_own_storage(local) and local.device.type != "meta":
        captures.take(local.numel() * local.element_size())
        return made.clone(tensor)
    if not rule(fqn, local) or not has_its_bytes(local):  # whoever plans it says that it has none
        return made.leave(tensor, fqn)
    if captures.take(local.numel() * local.element_size()):
        return made.clone(tensor)
    copy_of_local = copies.copy(local)
    if copy_of_local is not None:
        return _like(tensor, copy_of_local)
    made.is_complete = False
    return made.leave(tensor, fqn)


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is distributed like another, of which this rank holds ``local``."""
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
