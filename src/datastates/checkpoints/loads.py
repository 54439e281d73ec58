"""One checkpoint that is being loaded by one rank: its entries, whole or into what exists."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from typing import Any

import torch

from datastates import reader
from datastates.checkpoints.parts import join_parts
from datastates.checkpoints.states import FINGERPRINTS, RANDOM_STATES, RESERVED, is_stateful
from datastates.checkpoints.steps import StepRecord
from datastates.checkpoints.summary import Shared
from datastates.contents.listing import list_file
from datastates.errors import MismatchError, StateError, TopologyError
from datastates.formats.filling import why_not
from datastates.formats.request import MapLocation
from datastates.fqns import listed, near
from datastates.loading import tensors_by_name
from datastates.node_parts import ranges_of

_NAMES_SHOWN = 10


@dataclass(frozen=True)
class StepLoad:
    """Reads the entries of one checkpoint, for one rank.

    Attributes:
        record: the checkpoint.
        rank: of this process.
        world_size: of this job.
        map_location: as for `reader.load`; not for what is filled in place.
        weights_only: as for `reader.load`.
        check: compare what is read with its checksums.
    """

    record: StepRecord
    rank: int
    world_size: int
    map_location: MapLocation = None
    weights_only: bool = True
    check: bool = False

    def entries(self) -> list[str]:
        """Names of what this rank can load.

        Raises:
            TopologyError: another number of ranks has saved it, and no entry is replicated.
        """
        summary = self.record.summary
        if summary.world_size != self.world_size:
            if not summary.replicated:
                raise self._topology_error(list(summary.entries))
            return list(summary.replicated)
        own = [name for name in self._names_in_own_file() if name not in summary.replicated]
        return [name for name in (*summary.replicated, *own) if name not in RESERVED]

    def load(self, name: str) -> Any:
        """The state of one entry, in memory of its own.

        Raises:
            MismatchError: there is no such entry, or its parts do not fit together.
            TopologyError: it is not replicated, and another number of ranks has saved it.
            ForeignObjectError, CorruptCheckpointError, StorageError: as from `reader.load`.
        """
        shared = self._shared(name)
        parts = [self._read(rank, name, None) for rank in shared.ranks]
        return join_parts(parts, shared.ranks, name)

    def load_into(self, name: str, targets: Any, *, strict: bool) -> Any:
        """Fill the tensors of an entry in place; the result is its state, in which they stand.

        Raises:
            MismatchError: names or shapes differ; with ``strict`` any name. Where names differ, nothing was changed.
            StateError: a target cannot be filled.
            TopologyError, ForeignObjectError, CorruptCheckpointError, StorageError: as `load`.
        """
        shared = self._shared(name)
        named = tensors_by_name({name: targets})
        ambiguous = [fqn for fqn, tensors in named.items() if len(tensors) > 1]
        if ambiguous:
            raise StateError(f"several tensors are called {ambiguous[0]}, none is filled", ambiguous[0])
        there = {rank: self._tensor_names(rank, name) for rank in shared.ranks}
        self._check_names(name, set(named), {fqn for names in there.values() for fqn in names}, strict)
        parts = []
        for rank, names in there.items():
            into = {fqn: named[fqn][0] for fqn in names if fqn in named}
            parts.append(self._read(rank, name, into))
        return join_parts(parts, shared.ranks, name)

    def restore(self, state: MutableMapping[str, Any], name: str, *, strict: bool) -> None:
        """Give one entry of ``state`` back what was saved under its name; see `Checkpointer.load_latest`.

        Raises:
            As `load` and `load_into`, and what the entry's own ``load_state_dict`` raises.
        """
        target = state[name]
        if isinstance(target, torch.nn.Module):
            _restore_module(self, target, name, strict)
        elif is_stateful(target):
            target.load_state_dict(self.load(name))
        elif isinstance(target, torch.Tensor):
            self.load_into(name, target, strict=strict)
        elif tensors_by_name(target):
            state[name] = self.load_into(name, target, strict=strict)
        else:
            state[name] = _refilled(target, self.load(name))

    def random_states(self) -> dict[str, Any] | None:
        """The random states of this rank, None where there are none, or of another number of ranks."""
        if self.record.summary.world_size != self.world_size or RANDOM_STATES not in self._names_in_own_file():
            return None
        found: dict[str, Any] = self._read(self.rank, RANDOM_STATES, None)
        return found

    def _names_in_own_file(self) -> list[str]:
        """The entries in this rank's file."""
        path = self._path(self.rank)
        if not os.path.exists(path):
            return []  # it has saved nothing
        listing = list_file(path)
        leaves = [*(tensor.fqn for tensor in listing.tensors), *(value.fqn for value in listing.values)]
        return list(dict.fromkeys(fqn.partition(".")[0] for fqn in leaves))

    def _shared(self, name: str) -> Shared:
        """The ranks whose files hold the entry."""
        summary = self.record.summary
        if name in summary.replicated:
            shared = summary.replicated[name]
            self._check_fingerprints(name, shared)
            return shared
        if summary.world_size != self.world_size:
            raise self._topology_error([name])
        part = self.record.part
        if part is not None and self.rank not in part.ranks:
            raise TopologyError(
                f"{self.record.path} is the {part}, with the files of ranks {ranges_of(part.ranks)}; {name!r} of rank"
                f" {self.rank} is on {part.holder(self.rank)}: start each rank where its files are"
            )
        known = self._names_in_own_file()
        if name not in known:
            raise MismatchError(
                f"{self.record.path} has no entry {name!r} of rank {self.rank}{near(name, known)}; it has"
                f" {listed(known, _NAMES_SHOWN)}",
                (name,),
            )
        return Shared((self.rank,), 0)

    def _check_fingerprints(self, name: str, shared: Shared) -> None:
        """Raise MismatchError unless all ranks had the same structure when they saved a replicated entry."""
        for rank in self.record.ranks if self.record.summary.world_size > 1 else ():
            found = self._read(rank, FINGERPRINTS, None).get(name)
            if found != shared.fingerprint:
                raise MismatchError(
                    f"{self.record.path}: {name!r} was saved as replicated, and was not the same on all ranks: names,"
                    f" dtypes or shapes of rank {rank} are others than those of rank {self.record.ranks[0]}"
                )

    def _topology_error(self, names: list[str]) -> TopologyError:
        return TopologyError(
            f"{self.record.path} was saved by {self.record.summary.world_size} ranks, this job has {self.world_size}:"
            f" {listed(names, _NAMES_SHOWN)} cannot be loaded, since each rank has saved its own; what is the same on"
            " all ranks can be declared as replicated when it is saved"
        )

    def _path(self, rank: int) -> str:
        return os.path.join(self.record.path, self.record.summary.file_name(rank))

    def _tensor_names(self, rank: int, name: str) -> list[str]:
        found = [tensor.fqn for tensor in list_file(self._path(rank)).tensors]
        return [fqn for fqn in found if fqn == name or fqn.startswith(f"{name}.")]

    def _read(self, rank: int, name: str, into: Mapping[str, torch.Tensor] | None) -> Any:
        """What a rank's file has of an entry; with ``into`` without the tensors that have no target."""
        path = self._path(rank)
        if not into:
            options: dict[str, Any] = {"map_location": self.map_location}
        else:
            options = {"into": dict(into), "strict": False}
        loaded = reader.load(path, keys=[name], weights_only=self.weights_only, check=self.check, **options)
        return (loaded.state if into else loaded)[name]

    def _check_names(self, name: str, wanted: set[str], there: set[str], strict: bool) -> None:
        missing, unexpected = sorted(wanted - there), sorted(there - wanted)
        if (strict and (missing or unexpected)) or not wanted & there:
            lists = [
                f"{kind}: {listed(names, _NAMES_SHOWN)}"
                for kind, names in (("missing in the checkpoint", missing), ("without a target", unexpected))
                if names
            ]
            raise MismatchError(
                f"{self.record.path}: the tensors of {name!r} differ by name; {'; '.join(lists)}; nothing of it was"
                " changed",
                tuple(missing),
                tuple(unexpected),
            )


def _restore_module(load: StepLoad, module: torch.nn.Module, name: str, strict: bool) -> None:
    """Fill a module in place where its tensors lie in memory of their own; what is no tensor comes after."""
    targets = module.state_dict()
    named = tensors_by_name(targets)
    if named and not any(why_not(tensor) for tensors in named.values() for tensor in tensors):
        found = load.load_into(name, targets, strict=strict)
        for key in [key for key, value in found.items() if value is None and not strict]:
            del found[key]  # a tensor without a target, which was not loaded
        module.load_state_dict(found, strict=strict)  # its hooks, and its extra state; the tensors are their own
    else:
        module.load_state_dict(load.load(name), strict=strict)


def _refilled(target: Any, found: Any) -> Any:
    """Plain data: a container stays the object that the caller may hold as well; anything else is replaced."""
    if isinstance(target, MutableMapping) and isinstance(found, Mapping):
        target.clear()
        target.update(found)
        return target
    if isinstance(target, MutableSequence) and isinstance(found, list):
        target[:] = found
        return target
    if isinstance(target, MutableSet) and isinstance(found, (set, frozenset)):
        target.clear()
        target |= found
        return target
    return found
