"""What a checkpoint of ``torch.distributed.checkpoint`` holds, as a list."""

from __future__ import annotations

import math
import os

from datastates.contents.distributed_metadata import Place, read_distributed
from datastates.contents.dtypes import ITEMSIZES
from datastates.contents.listing import FileListing, TensorRecord, ValueRecord
from datastates.reading import FileReader

KIND = "distributed"


def list_distributed(path: str | os.PathLike[str]) -> FileListing:
    """List the state of a distributed checkpoint. Reads its metadata, no tensor.

    A tensor has the shape that all ranks' parts make up; its storage is the file of its first chunk, its offset that of
    the archive in which the chunk lies there.

    Args:
        path: of the metadata.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is malformed.
        StorageError: it cannot be read.
    """
    with FileReader(os.fspath(path)) as file:
        found = read_distributed(file)
    places: dict[str, Place] = {}
    for place in found.places:
        places.setdefault(place.fqn, place)
    tensors, values = [], []
    for fqn, kind in found.kinds.items():
        if kind.dtype is None:
            values.append(ValueRecord(fqn, "object", ""))
            continue
        place = places.get(fqn, Place(fqn, "", 0, 0))
        nbytes = math.prod(kind.shape) * ITEMSIZES[kind.dtype]
        tensors.append(TensorRecord(fqn, kind.dtype, kind.shape, nbytes, place.begin, place.file))
    return FileListing(file.path, KIND, file.nbytes, tuple(tensors), tuple(values))
