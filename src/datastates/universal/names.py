"""The files of a DeepSpeed checkpoint: which rank each belongs to, by its name.

Numbers are read as numbers and names matched as a whole: ``rank_1`` is not ``rank_10``. Where the folder has a commit
record, it says which files belong to the checkpoint, not the listing.
Source: deepspeed 0.19.8, runtime/engine.py, ``_get_ckpt_name`` and ``_get_rank_zero_ckpt_name``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from datastates.errors import CheckpointNotFoundError
from datastates.manifest import read_commit, read_latest
from datastates.system_calls import storage_errors

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_ZERO3_MODEL = re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")

Rank = tuple[int, int]
"""(data-parallel rank, model-parallel rank): the two numbers in a name."""


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's files, those of other kinds left out.

    Attributes:
        directory: the checkpoint's folder.
        optimizer: the optimizer files of ZeRO.
        model: the model files; with ZeRO 3 one per rank, else under data-parallel rank 0.
        all: the names of all files of the checkpoint, relative, in order.
    """

    directory: str
    optimizer: dict[Rank, str] = field(default_factory=dict)
    model: dict[Rank, str] = field(default_factory=dict)
    all: tuple[str, ...] = ()

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def data_parallel_ranks(self, mp_rank: int) -> list[int]:
        """The data-parallel ranks that left an optimizer file for a model-parallel rank, in order."""
        return sorted(dp for dp, mp in self.optimizer if mp == mp_rank)

    @property
    def model_parallel_ranks(self) -> list[int]:
        return sorted({mp for _, mp in self.optimizer})


def read_names(directory: str) -> Names:
    """Look into a checkpoint's folder.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        CorruptCheckpointError: its records are damaged.
        StorageError: it cannot be read.
    """
    if not os.path.isdir(directory):
        raise CheckpointNotFoundError(f"there is no checkpoint folder {directory}")
    record = read_commit(directory)
    names = sorted(_listed(directory) if record is None else record.file_nbytes)
    found = Names(directory, all=tuple(names))
    for name in names:
        if match := _OPTIMIZER.fullmatch(name):
            found.optimizer[int(match["dp"]), int(match["mp"])] = name
        elif match := _ZERO3_MODEL.fullmatch(name):
            found.model[int(match["dp"]), int(match["mp"])] = name
        elif match := _MODEL.fullmatch(name):
            found.model[0, int(match["mp"])] = name
    return found


def is_optimizer_file(name: str) -> bool:
    """Whether it is the name of an optimizer file of ZeRO."""
    return _OPTIMIZER.fullmatch(name) is not None


def is_model_file(name: str) -> bool:
    """Whether it is the name of a model file."""
    return _MODEL.fullmatch(name) is not None or _ZERO3_MODEL.fullmatch(name) is not None


def checkpoint_folder(path: str) -> str:
    """The folder of one checkpoint: the one given, or the one that ``latest`` in it names.

    Raises:
        CheckpointNotFoundError: there is no such folder.
    """
    path = os.path.abspath(path)
    tag = read_latest(path)
    folder = path if tag is None else os.path.join(path, tag)
    if tag == "" or not os.path.isdir(folder):
        where = f"{path} (its latest names {tag!r})" if tag is not None else path
        raise CheckpointNotFoundError(f"there is no checkpoint folder {where}")
    return folder


def _listed(directory: str) -> list[str]:
    """Relative paths of all files, hidden ones left out."""
    found = []
    with storage_errors("list", directory):
        for folder, folders, names in os.walk(directory):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.relpath(os.path.join(folder, name), directory) for name in names if name[0] != "."]
    return found
