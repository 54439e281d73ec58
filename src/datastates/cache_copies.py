"""Copies of many small tensors in the host cache, for a save whose file is not planned yet.

Such copies have to wait for the plan somewhere, and there may be more of them than may lie beside the host cache. So
slabs of it are taken for them. They are staged from there, like any other tensor, and given back.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from datastates.captures import EagerBudget
from datastates.copying import is_flat
from datastates.errors import ClosedError
from datastates.host_cache import HostCache, Slab
from datastates.state import has_own_storage

ALIGNMENT = 64
"""Every copy begins at a multiple of it: of the largest element, and of what one core reads at a time."""


class CacheCopies:
    """The copies that one save makes; owned by the save until it is staged.

    Takes slabs that nobody else needs at that moment, and never more than the budget allows: staging, which waits for
    free slabs, has to go on with the others. `copy` is for the thread that saves, `release` for any.
    """

    def __init__(self, cache: HostCache, budget: EagerBudget) -> None:
        """Args:
        cache: where slabs come from.
        budget: how much of the cache may be taken for copies, over all saves in flight.
        """
        self._cache = cache
        self._budget = budget
        self._lock = threading.Lock()  # protects all below; nothing is copied to a slab that is given back meanwhile
        self._slabs: list[Slab] = []
        self._is_released = False
        self._memory: torch.Tensor | None = None  # the youngest slab
        self._filled_nbytes = 0  # of that
        self._elements: dict[torch.dtype, tuple[torch.Tensor, int]] = {}  # its, and where in the cache

    def __repr__(self) -> str:
        return f"CacheCopies({len(self._slabs)} slabs of {self._cache!r})"

    @property
    def is_empty(self) -> bool:
        """Whether no copy was made."""
        return not self._slabs

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor of the same elements, dtype, shape and strides, whose memory nobody else changes until `release`.

        None where there is no room, or it is no contiguous tensor of the host's memory.

        Raises:
            ClosedError: the host cache is closed.
        """
        nbytes = tensor.numel() * tensor.itemsize
        if not nbytes or tensor.device.type != "cpu" or not has_own_storage(tensor) or not is_flat(tensor):
            return None
        with self._lock:
            memory = self._room(nbytes)
            if memory is None:
                return None
            begin = self._filled_nbytes
            ctypes.memmove(memory.data_ptr() + begin, tensor.data_ptr(), nbytes)
            self._filled_nbytes += nbytes + -nbytes % ALIGNMENT
            found = self._elements.get(tensor.dtype)
            if found is None:
                elements = memory.view(tensor.dtype)
                found = self._elements[tensor.dtype] = elements, int(elements.storage_offset())
            return found[0].as_strided(tensor.shape, tensor.stride(), found[1] + begin // tensor.itemsize)

    def release(self) -> None:
        """Give the slabs back: the copies hold anything from now on; idempotent."""
        with self._lock:
            slabs, self._slabs, self._memory, self._is_released = self._slabs, [], None, True
            self._elements.clear()
        for slab in slabs:
            self._cache.release(slab.offset)
            self._budget.give_back(self._cache.slab_bytes)

    def _room(self, nbytes: int) -> torch.Tensor | None:
        """The memory whose unfilled end has so many bytes."""
        if self._is_released or nbytes > self._cache.slab_bytes:
            return None
        if self._memory is None or self._filled_nbytes + nbytes > self._cache.slab_bytes:
            slab = self._take()
            if slab is None:
                return None
            self._slabs.append(slab)
            # not the version counter of the whole cache, which every copy by torch's own means would raise
            self._memory, self._filled_nbytes = slab.memory.data, 0
            self._elements.clear()
        return self._memory

    def _take(self) -> Slab | None:
        if not self._budget.take(self._cache.slab_bytes):
            return None
        try:
            slab = self._cache.try_reserve()
        except ClosedError:
            self._budget.give_back(self._cache.slab_bytes)
            raise
        if slab is None:
            self._budget.give_back(self._cache.slab_bytes)
        return slab
