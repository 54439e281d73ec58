"""A storage reader for ``torch.distributed.checkpoint``: large parallel reads, straight into the planner's tensors.

DCP's planner says which part of which chunk goes where, so any number of ranks and any mesh can load; of a chunk that
is larger than what is wanted only the ranges are read that hold it.

Source: ``_load_state_dict`` in torch/distributed/checkpoint/state_dict_loader.py, torch 2.13.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from datastates.attempt_folder import has_attempts
from datastates.catalog import list_checkpoints
from datastates.contents.distributed_metadata import METADATA_NAME
from datastates.conversion.distributed_reading import check_places, load_metadata
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, MismatchError
from datastates.integrations.dcp_items import Item, merged_tiles
from datastates.integrations.dcp_writer import open_writers
from datastates.integrity import RACES, record_of, record_stamp, verify_file
from datastates.manifest import CommitRecord
from datastates.paths import resolved
from datastates.ranks import Ranks
from datastates.reading import TILE_BYTES, Digests, FileReader
from datastates.recovery import committed_record
from datastates.saver import open_savers

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_SECONDS = 600.0
"""So long a load waits for the saves of this process that are in flight."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadReport:
    """What a load has read on this rank.

    Attributes:
        nbytes: read from files, what lies between wanted ranges included.
        verified_nbytes: of tensors and objects whose checksums were compared.
        unverified: names of the tensors that were read in part, so that no checksum covers just what was read; also
            those that have none.
    """

    nbytes: int
    verified_nbytes: int
    unverified: tuple[str, ...]


class DataStatesReader(FileSystemReader):
    """Reads checkpoints that `DataStatesWriter` has written, and those of torch's own ``FileSystemWriter``.

    A folder of ours that was never committed is refused; a commit that a crash has cut is completed first. A load waits
    for the saves of this process: it overwrites the state. Tensors and objects that are read whole are compared with
    their checksums; `report` names those of which only a part was wanted. ``datastates verify`` compares everything.

    The metadata is a pickle, of which only torch's own classes are loaded. Objects in the state are loaded by DCP's
    planner, which runs whatever their pickles say: load only checkpoints that you trust.

    Attributes:
        report: what the last load has read; None before.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = True, trust: bool = False) -> None:
        """Args:
        path: the checkpoint's folder.
        check: compare checksums.
        trust: load metadata that names other classes than torch's own, as custom planners may write.
        """
        super().__init__(path)
        self.report: ReadReport | None = None
        self._check = check
        self._trust = trust
        self._record: CommitRecord | None = None
        self._stamp: tuple[int, int, int] | None = None  # of the save that the metadata are of
        self._metadata: Metadata | None = None

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds. Blocks for saves in flight.

        Args:
            kwargs: ``rank``: what that rank has written for itself alone, as with ``use_collectives=False``.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or one that was never completed.
            CorruptCheckpointError: the metadata is damaged.
            ForeignObjectError: it needs ``trust``.
            WaitTimeoutError: a save in flight takes too long.
        """
        directory = resolved(os.path.join(os.fspath(self.path), ""))
        _wait_for_saves(directory)
        path = os.fspath(self._get_metadata_path(kwargs.get("rank")))
        metadata = self._metadata_of_one_save(directory, path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _metadata_of_one_save(self, directory: str, path: str) -> Metadata:
        """Metadata and the record that they belong to, read again where the checkpoint was saved again meanwhile."""
        for _ in range(RACES):
            before = record_stamp(path)
            try:
                return self._checked_metadata(directory, path)
            except (CorruptCheckpointError, CheckpointNotFoundError):
                if record_stamp(path) == before:
                    raise
        return self._checked_metadata(directory, path)

    def _checked_metadata(self, directory: str, path: str) -> Metadata:
        _record_of(directory)  # completes a commit, if need be, before the stamp is taken
        self._stamp = record_stamp(path)
        self._record = _record_of(directory)
        if not os.path.isfile(path):
            raise CheckpointNotFoundError(f"{directory} holds no distributed checkpoint: there is no {path}")
        file = record_of(path) if self._record is not None and self._check else None
        for problem in [] if file is None else verify_file(directory, file):
            raise CorruptCheckpointError(f"{path}: {problem.message}", path)
        metadata = load_metadata(path, trust=self._trust)
        check_places(metadata, directory)
        self._check_same()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the planner's tensors. Blocks until all are filled.

        Raises:
            CorruptCheckpointError: a file is missing, cut or damaged; names the tensor. Some tensors may be filled.
            CheckpointNotFoundError: it was saved again, or removed, meanwhile. Tensors may be filled from either save.
            StorageError: the device or file system fails.
        """
        try:
            self.report = self._read_plan(plan, planner)
        except CorruptCheckpointError:
            self._check_same()
            raise
        self._check_same()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _check_same(self) -> None:
        """Raise CheckpointNotFoundError where the checkpoint is not the one any more that the metadata are of.

        All ranks look when they have read. Between that and the moment when they took the stamp was a collective of
        DCP, so what all of them find unchanged was one save for all.
        """
        if record_stamp(os.path.join(os.fspath(self.path), METADATA_NAME)) != self._stamp:
            message = f"{self.path} was saved again, or removed, while it was being loaded; load it again as a whole"
            raise CheckpointNotFoundError(message)

    def _read_plan(self, plan: LoadPlan, planner: LoadPlanner) -> ReadReport:
        by_file: dict[str, list[ReadItem]] = {}
        transformed = []
        for request in plan.items:
            info = self.storage_data[request.storage_index]
            if info.transform_descriptors:
                transformed.append(request)
            else:
                by_file.setdefault(info.relative_path, []).append(request)
        totals = _Totals()
        for name, requests in sorted(by_file.items()):
            transformed += self._read_file(name, requests, planner, totals)
        if transformed:  # streams of somebody's extension, and tensors that are no plain rows
            super().read_data(dataclasses.replace(plan, items=transformed), planner).wait()
            totals.unverified.update(request.storage_index.fqn for request in transformed)
        if totals.unverified:
            logger.debug("%s: %d tensors were not compared with checksums", self.path, len(totals.unverified))
        return ReadReport(totals.nbytes, totals.verified_nbytes, tuple(sorted(totals.unverified)))

    def _read_file(self, name: str, requests: list[ReadItem], planner: LoadPlanner, totals: _Totals) -> list[ReadItem]:
        """Read what is wanted of one file; gives what only torch's own reader can read."""
        path = os.path.join(os.fspath(self.path), name)
        items = list(self._items(requests, planner))
        try:
            with FileReader(path) as file:
                self._check_size(file, name)
                odd = self._read_items(file, items, totals)
        except CheckpointNotFoundError as error:
            raise CorruptCheckpointError(f"{path} is missing, a part of the checkpoint", path) from error
        left: list[ReadItem] = []
        for item in items:
            for request in item.objects:
                planner.load_bytes(request, io.BytesIO(item.data))
            if item in odd:
                left += [request for request, _ in item.wanted]
                continue
            _note_written([target for _, target in item.wanted])
            for request, target in item.wanted:
                planner.commit_tensor(request, target)
        return left

    def _read_items(self, file: FileReader, items: list[Item], totals: _Totals) -> list[Item]:
        small = [item for item in items if item.is_small]
        tiles = merged_tiles(file, small, self._check)
        file.run(tiles)
        totals.nbytes += sum(tile.end - tile.begin for tile in tiles)
        for item in small:
            if item.nbytes > TILE_BYTES:
                item.read_whole(file, memoryview(file.read(item.begin, item.nbytes)), self._check)
                totals.nbytes += item.nbytes
        totals.verified_nbytes += sum(item.nbytes for item in small) if self._check else 0
        found = [(item, item.data_begin(file, self._check)) for item in items if not item.is_small]
        placed = [(item, *place) for item, place in found if place is not None]
        digests = Digests()
        cuts = sorted({offset for item, begin, _ in placed for offset in (begin, begin + item.data_nbytes)})
        tiles = [tile for item, begin, _ in placed for tile in item.tiles(begin)]
        file.run(tiles, digests if self._check else None, cuts)
        totals.nbytes += sum(tile.end - tile.begin for tile in tiles)
        for item, begin, crc in placed:
            end = begin + item.data_nbytes
            actual = None if crc is None else digests.of(begin, end)
            if actual is None:
                totals.unverified.add(item.fqn)
            elif actual != crc:
                raise item.damage(file, begin, end)
            else:
                totals.verified_nbytes += item.data_nbytes
        return [item for item, place in found if place is None]

    def _items(self, requests: Iterable[ReadItem], planner: LoadPlanner) -> Iterator[Item]:
        """What is wanted, by item of the file."""
        items: dict[MetadataIndex, Item] = {}
        heads: dict[tuple[torch.dtype | None, tuple[int, ...]], bytes] = {}
        for request in requests:
            index = request.storage_index
            item = items.get(index)
            if item is None:
                info = self.storage_data[index]
                item = items[index] = Item(index.fqn, info.offset, info.length, *self._kind(request), heads=heads)
            if request.type == LoadItemType.BYTE_IO:
                item.objects.append(request)
                continue
            target = planner.resolve_tensor(request).detach()
            if tuple(target.shape) != tuple(request.lengths):
                message = f"{index.fqn}: a part of shape {tuple(request.lengths)} is to fill {tuple(target.shape)}"
                raise MismatchError(message, mismatched={index.fqn: message})
            item.wanted.append((request, target))
        return iter(items.values())

    def _kind(self, request: ReadItem) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Dtype and shape of a chunk; no dtype for an object."""
        index = request.storage_index
        entry = None if self._metadata is None else self._metadata.state_dict_metadata.get(index.fqn)
        if request.type == LoadItemType.BYTE_IO or not isinstance(entry, TensorStorageMetadata):
            return None, ()
        offset = tuple(index.offset or (0,) * len(entry.size))
        hinted = entry.chunks[index.index : index.index + 1] if index.index is not None else []
        for chunk in (*hinted, *entry.chunks):
            if tuple(chunk.offsets) == offset:
                return entry.properties.dtype, tuple(chunk.sizes)
        raise CorruptCheckpointError(
            f"{self.path}: its metadata has no chunk of {index.fqn} at {offset}", fqn=index.fqn
        )

    def _check_size(self, file: FileReader, name: str) -> None:
        expected = None if self._record is None else self._record.file_nbytes.get(name)
        if expected is not None and expected != file.nbytes:
            message = f"{file.path}: {file.nbytes} bytes found, {expected} expected by the checkpoint's record"
            raise CorruptCheckpointError(message, file.path)


@dataclasses.dataclass(slots=True)
class _Totals:
    nbytes: int = 0
    verified_nbytes: int = 0
    unverified: set[str] = dataclasses.field(default_factory=set)


def newest_checkpoint(
    directory: str | os.PathLike[str], process_group: distributed.ProcessGroup | None = None
) -> str | None:
    """The folder of the newest complete checkpoint below a folder, by the time of its commit; None where there is none.

    A collective: rank 0 looks, completes commits that a crash has cut, and all ranks are told the same.

    Raises:
        StorageError: the folder cannot be read.
    """
    return Ranks(process_group).agree(lambda: _newest(os.fspath(directory)))


def _newest(directory: str) -> str | None:
    if not os.path.isdir(directory):
        return None
    for record in reversed(list_checkpoints(directory)):
        try:
            is_ready = record.is_complete or (not record.is_committed and committed_record(record.path) is not None)
        except CorruptCheckpointError:
            is_ready = False
        if is_ready and os.path.isfile(os.path.join(record.path, METADATA_NAME)):
            return record.path
        if not is_ready:
            logger.warning("checkpoint %s is passed over: %s", record.path, record.problem)
    return None


def _wait_for_saves(directory: str) -> None:
    """Loading overwrites the state, and may be of what is being saved."""
    for writer in open_writers():
        writer.settle(SAVE_TIMEOUT_SECONDS)
    for saver in open_savers():
        saver.wait_staged(SAVE_TIMEOUT_SECONDS)
        saver.wait_for(directory, SAVE_TIMEOUT_SECONDS)


def _record_of(directory: str) -> CommitRecord | None:
    """What makes a checkpoint of ours complete; None for one of torch.

    Raises:
        CheckpointNotFoundError: it is ours and was never completed.
    """
    if not has_attempts(directory):
        return None
    record = committed_record(directory)
    if record is None:
        raise CheckpointNotFoundError(
            f"{directory} holds a checkpoint that was never completed; load another one (its folder may be deleted)"
        )
    return record


def _note_written(targets: list[torch.Tensor]) -> None:
    """Memory was written behind the back of autograd."""
    bumped = [target for target in targets if not target.is_inference()]
    if bumped:
        torch.autograd.graph.increment_version(bumped)
