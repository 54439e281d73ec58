"""The file that one rank writes of a distributed checkpoint: the items that DCP has planned for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from datastates.captures import Captures
from datastates.integrations.dcp_background import BackgroundSave
from datastates.integrations.dcp_image import ItemImage, add_item, order_of
from datastates.integrations.dcp_staging import Snapshot
from datastates.plan import FilePlan


class ItemFile:
    """Makes the byte image of such a file, objects and small tensors first.

    Attributes:
        results: where each item lies, for the checkpoint's metadata; filled by `plan`.
    """

    def __init__(
        self, path: str, items: Sequence[WriteItem], planner: SavePlanner, background: BackgroundSave | None
    ) -> None:
        """Args:
        path: of the file.
        items: what it shall hold.
        planner: gives tensors and objects.
        background: the asynchronous save whose state they are of, None where the caller waits.
        """
        self.results: list[WriteResult] = []
        self._path = path
        self._items = items
        self._planner = planner
        self._background = background

    def plan(self, captures: Captures, eager_bytes: int) -> FilePlan:
        """The image; called once.

        Args:
            captures: takes copies of what may change, those of the background save where there is one.
            eager_bytes: tensors of at most so many bytes are copied into the image.

        Raises:
            StateError: a tensor has no bytes.
            TornSnapshotError: a tensor was changed in place since the background save began.
        """
        image, background = ItemImage(), self._background
        take = self._take(captures, eager_bytes)
        for item in sorted(self._items, key=order_of):
            found = self._planner.resolve_data(item)
            if background is not None and isinstance(found, torch.Tensor):
                background.note_source(found)
            offset, nbytes = add_item(image, item, found, take, captures.capture)
            info = _StorageInfo(os.path.basename(self._path), offset, nbytes)
            self.results.append(WriteResult(item.index, nbytes, info))
        if background is not None:
            background.snapshot.check_versions(self._path)
            background.snapshot = Snapshot()
        return image.plan()

    def _take(self, captures: Captures, eager_bytes: int) -> Callable[[int], bool]:
        """Whether the image may hold the bytes of a small tensor itself; those of a snapshot are counted already."""
        if self._background is None:
            return lambda nbytes: nbytes <= eager_bytes and captures.take(nbytes)
        are_counted = self._background.snapshot.is_complete and self._background.promise.copies.is_empty
        return lambda nbytes: are_counted and nbytes <= eager_bytes
