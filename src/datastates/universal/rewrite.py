"""A checkpoint rewritten with all of its files in the torch format, for tools that read nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from datastates import reader
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError
from datastates.manifest import LATEST_NAME
from datastates.storage import write_atomically
from datastates.system_calls import storage_errors
from datastates.universal.building import Conversion, Item, Progress, build
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.names import checkpoint_folder, read_names
from datastates.universal.writing import OutFile

_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # DeepSpeed drops them beside its checkpoints
_SAFETENSORS = ".safetensors"


def convert_to_torch(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint again, its safetensors files as torch files of the same names, all others as they are.

    What reads DeepSpeed's checkpoints reads the result, without this package: ``zero_to_fp32.py`` is copied beside it,
    and ``latest`` names it, where there is none yet. The result appears whole or not at all, and a killed conversion is
    taken up, as with `convert_to_universal`. Blocks; the pickles in the files are executed.

    Args:
        checkpoint: the folder of one checkpoint, or one that has ``latest`` in it. Nothing in it is changed.
        out: the folder to be made. Nothing may be there.
        num_workers: threads; None: as many as there are processors, at most 8.
        progress: called with the bytes written so far and those in all; from the workers, one call at a time.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or it is empty.
        CorruptCheckpointError: a file is damaged.
        StorageError: ``out`` is there already, there is no room, or storage refuses.
    """
    folder, target = checkpoint_folder(os.fspath(checkpoint)), os.path.abspath(os.fspath(out))
    names = read_names(folder)
    if not names.all:
        raise CheckpointNotFoundError(f"{folder} holds no file of a checkpoint")
    with MappedFiles() as files:
        items = [_item(names.path(name), name, files) for name in names.all]
        done = build(items, target, f"torch files of {folder}", files, num_workers, progress)
    place_beside(os.path.dirname(folder), target)
    return done


def _item(path: str, name: str, files: MappedFiles) -> Item:
    nbytes = os.path.getsize(path)
    if not _is_safetensors(path):
        return Item(name, nbytes, lambda: iter([OutFile(name, copy_of=path)]))
    out_name = name.removesuffix(_SAFETENSORS) + ".pt" if name.endswith(_SAFETENSORS) else name

    def make() -> Iterator[OutFile]:
        yield OutFile(out_name, state)

    state = files.load(path)
    return Item(name, nbytes, make)


def _is_safetensors(path: str) -> bool:
    try:
        return reader.format_of(path) == "safetensors"
    except CorruptCheckpointError:
        return False  # something else that belongs to the checkpoint


def place_beside(source: str, target: str) -> None:
    """Put what DeepSpeed's scripts expect into the folder above a checkpoint.

    Args:
        source: the folder above the original, where the scripts may be.
        target: the converted checkpoint; ``latest`` beside it will name it, unless there is one.
    """
    parent = os.path.dirname(target)
    for name in _SCRIPTS:
        script, copy = os.path.join(source, name), os.path.join(parent, name)
        if os.path.isfile(script) and not os.path.lexists(copy):
            with storage_errors("copy", copy):
                shutil.copy2(script, copy)
    latest = os.path.join(parent, LATEST_NAME)
    if not os.path.lexists(latest):
        write_atomically(latest, os.fsencode(os.path.basename(target)))
