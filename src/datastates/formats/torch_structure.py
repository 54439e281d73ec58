"""What a torch file owes to the structure of its state alone, kept from one save to the next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from datastates.copying import copy_to_bytes
from datastates.formats.geometry import Geometry, Looks, Memory
from datastates.formats.torch_layout import Layout, Source
from datastates.formats.torch_skeleton import Skeleton, TensorPickles
from datastates.gathering import MIN_PIECES, gathered
from datastates.plan import FilePlan
from datastates.segment_table import Windows, versions_of
from datastates.state import Capture, version_of


@dataclass(frozen=True, eq=False)
class Form:
    """What a state looks like apart from its values and its memory.

    Attributes:
        looks: recognises the tensors, in the order of the pickle.
        keys: which keys and positions of all containers have tensors and containers; the names follow from it. None
            where no tensor is asked about by its name, all being small.
        limit: tensors of at most so many bytes are small: eager.
        names: fqn of each tensor that is not small, by position.
    """

    looks: Looks
    keys: list[object] | None
    limit: int
    names: dict[int, str]


@dataclass(frozen=True)
class Choice:
    """What decides about the place of each tensor of a form.

    Attributes:
        owners: per tensor the position of the first one with the same bytes.
        volatile: positions of the tensors that are eager though they are not small.
        is_postponed: there is no room for copies of eager tensors: they are staged first, and ``save()`` waits for it.
    """

    owners: list[int]
    volatile: set[int]
    is_postponed: bool


@dataclass(frozen=True, eq=False)
class Structure:
    """A state's form and memory, and the file that follows from them.

    Attributes:
        memory: where the tensors' bytes were.
        pickles: what rebuilds each tensor.
        eager: positions of the tensors whose bytes are copied at once, in file order.
        eager_sizes: bytes of each of them.
        late: positions of the others that own bytes, in file order.
        late_sizes: bytes of each of them.
        late_itemsizes: bytes of an element of each of them.
        bundled: those of the late ones that are eager: copies of them are taken on their device.
        is_on_host: whether none of the late ones is on a device.
        has_graphs: whether one of them requires a gradient, and may refer to a whole graph of autograd.
    """

    form: Form
    choice: Choice
    memory: Memory
    pickles: list[bytes]
    eager: list[int]
    eager_sizes: list[int]
    late: list[int]
    late_sizes: list[int]
    late_itemsizes: list[int]
    bundled: frozenset[int]
    is_on_host: bool
    has_graphs: bool
    layout: Layout

    @property
    def num_tensors(self) -> int:
        return len(self.choice.owners)

    def copies(self, tensors: list[torch.Tensor]) -> Sequence[bytes | bytearray]:
        """The bytes of the tensors that are copied at once."""
        if len(self.eager) >= MIN_PIECES:
            copies = gathered(list(map(self.memory.addresses.__getitem__, self.eager)), self.eager_sizes)
            if copies is not None:
                return copies
        return [copy_to_bytes(tensors[position]) for position in self.eager]

    def sources(
        self, tensors: list[torch.Tensor], storages: list[torch.UntypedStorage], capture: Capture | None
    ) -> Windows | list[Source] | None:
        """Where the bytes of the late tensors come from; None where ``capture`` refuses.

        Args:
            tensors: of a state of this structure, in this memory.
            storages: theirs.
            capture: takes the bytes of eager tensors of a device; None refuses.
        """
        if self.is_on_host:
            late = [tensors[position] for position in self.late]
            if self.has_graphs:
                late = [tensor.detach() for tensor in late]
            watched, versions = versions_of(late)
            kept = [storages[position] for position in self.late]
            names, offsets, addresses, storage_nbytes = self._places
            return Windows(names, kept, offsets, self.late_sizes, addresses, storage_nbytes, watched, versions)
        sources = [self._source(position, tensors[position], capture) for position in self.late]
        known = [source for source in sources if source is not None]
        return known if len(known) == len(sources) else None

    def fill(
        self, skeleton: Skeleton, copies: Sequence[bytes | bytearray], sources: Windows | Sequence[Source]
    ) -> FilePlan | None:
        """The plan of a file; None where the pickle has outgrown its place."""
        return self.layout.fill(skeleton.filled(self.pickles), copies, sources)

    @functools.cached_property
    def _places(self) -> tuple[list[str], list[int], list[int], list[int]]:
        """Of the late tensors: names, first byte in the storage, address, length of the storage."""
        memory, names = self.memory, [self.form.names.get(position, "") for position in self.late]
        elements = zip(self.late, self.late_itemsizes, strict=True)
        offsets = [memory.offsets[position] * itemsize for position, itemsize in elements]
        addresses = [memory.addresses[position] for position in self.late]
        return names, offsets, addresses, [memory.storage_nbytes[position] for position in self.late]

    def _source(self, position: int, tensor: torch.Tensor, capture: Capture | None) -> Source | None:
        name = self.form.names.get(position, "")
        if position not in self.bundled:
            return Source(tensor.detach(), name, version_of(tensor))
        captured = None if capture is None else capture(tensor)
        return None if captured is None else Source(captured, name)


def build(skeleton: Skeleton, geometry: Geometry, form: Form, memory: Memory, choice: Choice) -> Structure | None:
    """Lay out a file; None where the tensors are of too many kinds, or there is no room for copies of a device's."""
    eager = _eager(geometry, form.limit, choice)
    bundled = frozenset(position for position in eager if not _is_on_host(geometry.devices[position]))
    if bundled and choice.is_postponed:
        return None
    locations = _locations(skeleton.tensors, geometry.devices)
    keys, empty, owning = _storage_keys(geometry.nbytes, choice.owners, locations)
    at_once = set() if choice.is_postponed else {*eager} - bundled
    is_first = {*eager} if choice.is_postponed else bundled
    captured = [position for position in owning if position in at_once]
    late = [position for position in owning if position in is_first]
    late += [position for position in owning if position not in at_once and position not in is_first]
    try:
        pickles = TensorPickles().write(geometry, locations, skeleton.tensors, keys)
    except OverflowError:
        return None
    sizes = [{keys[position]: geometry.nbytes[position] for position in part} for part in (captured, late)]
    num_pending = len(is_first) if choice.is_postponed else 0
    layout = Layout(skeleton.filled(pickles), sizes[0], empty, sizes[1], num_pending)
    return Structure(
        form,
        choice,
        memory,
        pickles,
        captured,
        list(sizes[0].values()),
        late,
        list(sizes[1].values()),
        [geometry.dtypes[position].itemsize for position in late],
        bundled,
        all(_is_on_host(device) for device in {geometry.devices[position] for position in late}),
        any(geometry.requires_grad[position] for position in late),
        layout,
    )


def _eager(geometry: Geometry, limit: int, choice: Choice) -> list[int]:
    """Positions of the eager tensors that own bytes."""
    columns = enumerate(zip(geometry.nbytes, choice.owners, geometry.shapes, strict=True))
    return [
        n
        for n, (nbytes, owner, shape) in columns
        if owner == n and nbytes and (nbytes <= limit or n in choice.volatile or not shape)
    ]


def _storage_keys(
    lengths: list[int], owners: list[int], locations: list[str]
) -> tuple[list[str], list[str], list[int]]:
    """The key of each tensor's storage, those of storages without bytes, and the positions that own bytes.

    Tensors without bytes share one storage per location.
    """
    keys: list[str] = []
    empty: dict[str, str] = {}
    owning: list[int] = []
    for position, (owner, nbytes) in enumerate(zip(owners, lengths, strict=True)):
        known = keys[owner] if owner != position else None if nbytes else empty.get(locations[position])
        key = str(len(owning) + len(empty)) if known is None else known
        keys.append(key)
        if known is None and nbytes:
            owning.append(position)
        elif known is None:
            empty[locations[position]] = key
    return keys, list(empty.values()), owning


def _locations(tensors: list[torch.Tensor], devices: list[torch.device]) -> list[str]:
    """What torch calls the device of each tensor in a file."""
    storages = {device: tensors[devices.index(device)].untyped_storage() for device in set(devices)}
    tags = {device: torch.serialization.location_tag(storage) for device, storage in storages.items()}
    return [tags[device] for device in devices]


def _is_on_host(device: torch.device) -> bool:
    return device.type == "cpu"
