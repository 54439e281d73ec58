"""The same states in the other file format: one file as one, a folder file by file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

from datastates import reader
from datastates.conversion.places import check_place, write_one
from datastates.conversion.sources import Content, Kind, Source, format_of, load_checked, open_source
from datastates.errors import CheckpointNotFoundError, StorageError
from datastates.manifest import LATEST_NAME
from datastates.state import named_tensors
from datastates.storage import write_atomically
from datastates.system_calls import storage_errors
from datastates.universal.building import Conversion, Item, Progress, build, copy_item
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.names import is_model_file
from datastates.universal.writing import OutFile

_TORCH, _SAFETENSORS = "torch", "safetensors"
_SUFFIXES = {_TORCH: re.compile(r"\.safetensors$"), _SAFETENSORS: re.compile(r"\.(pt|pth|bin|ckpt)$")}
_NEW_SUFFIX = {_TORCH: ".pt", _SAFETENSORS: ".safetensors"}
_KINDS = {_TORCH: "zip", _SAFETENSORS: "safetensors"}  # what `reader.format_of` says of them
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # DeepSpeed drops them beside its checkpoints


def convert_to_torch(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    trust: bool = False,
    force: bool = False,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write files as ``torch.save`` does: those of safetensors, and of torch's older forms. Others are copied.

    What is one state becomes one file: a file, a folder of Hugging Face, a distributed checkpoint. Any other folder
    becomes a folder, file by file; one of DeepSpeed's gets ``latest`` and ``zero_to_fp32.py`` beside it, too. Names,
    dtypes, tied tensors, the tree and all that is no tensor stay as they are; tensors are those of the CPU.

    The result appears whole or not at all, durable; a folder is taken up where a killed conversion has left off. Every
    source is compared with its checksums first. Takes some tens of MiB of memory per worker; a file that has no
    directory (torch before 1.6, compressed) is loaded whole, and the tensors of a distributed checkpoint are loaded one
    by one. Blocks.

    Args:
        source: a file or folder. Nothing in it is changed.
        out: the file or folder to be made.
        trust: load what is more than plain data, by running code of the source.
        force: replace what is at ``out``, when the new one is durable.
        num_workers: threads for a folder; None: as many as there are processors, at most 8.
        progress: called with the bytes written so far and those in all, one call at a time.

    Raises:
        CheckpointNotFoundError: there is no such source.
        CorruptCheckpointError: a file is damaged.
        ForeignObjectError: a file holds more than plain data, and ``trust`` is not set.
        StorageError: ``out`` is there already, two files would get one name, there is no room, or storage refuses.
    """
    return _convert(source, out, _TORCH, trust, force, num_workers, progress)


def convert_to_safetensors(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    trust: bool = False,
    force: bool = False,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write files in this package's safetensors format, which the stock library opens, too. See `convert_to_torch`.

    ``*.pt``, ``*.pth``, ``*.bin`` and ``*.ckpt`` get the suffix ``.safetensors``, except in folders of DeepSpeed, which
    finds its files by their names. Views of one storage that are not the same elements are stored apart.
    """
    return _convert(source, out, _SAFETENSORS, trust, force, num_workers, progress)


def _convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    layout: str,
    trust: bool,
    force: bool,
    num_workers: int | None,
    progress: Progress | None,
) -> Conversion:
    opened, target = open_source(source), os.path.abspath(os.fspath(out))
    check_place(opened.path, target, force)
    with MappedFiles(opened.path, weights_only=not trust, whole=True) as files:
        if opened.kind is not Kind.FOLDER:
            return _convert_one(opened, target, layout, force, files, progress)
        items = list(_items(opened, layout, files))
        origin = f"{layout} files of {opened.path}"
        done = build(items, target, origin, files, num_workers, progress, replace=force)
    if any(map(is_model_file, opened.names().all)):
        _place_beside(os.path.dirname(opened.path), target)
    return done


def _convert_one(
    source: Source, out: str, layout: str, force: bool, files: MappedFiles, progress: Progress | None
) -> Conversion:
    if source.kind is Kind.FILE and reader.format_of(source.path) == _KINDS[layout]:
        reader.verify(source.path)
        file = OutFile("", copy_of=source.path, nbytes=os.path.getsize(source.path))
        return write_one(file, out, files, force=force, num_items=1, progress=progress)
    content = source.content(files)
    num_items = len(named_tensors(content.state))
    return write_one(_out_file(content, layout), out, files, force=force, num_items=num_items, progress=progress)


def _out_file(content: Content, layout: str, name: str = "") -> OutFile:
    nbytes = sum(tensor.numel() * tensor.itemsize for _, tensor in named_tensors(content.state).values())
    return OutFile(name, content.state, content.joined, layout, nbytes=nbytes)


def _items(source: Source, layout: str, files: MappedFiles) -> Iterator[Item]:
    names = source.names()
    if not names.all:
        raise CheckpointNotFoundError(f"{source.path} holds no file of a checkpoint")
    fixed = {os.path.dirname(name) for name in names.all if is_model_file(os.path.basename(name))}
    taken: dict[str, str] = {}
    for name in names.all:
        path = names.path(name)
        kind = format_of(path)
        is_converted = kind is not None and kind != _KINDS[layout]
        keeps_name = layout == _SAFETENSORS and os.path.dirname(name) in fixed  # DeepSpeed finds its files by name
        out_name = name if keeps_name or not is_converted else _SUFFIXES[layout].sub(_NEW_SUFFIX[layout], name)
        if out_name in taken:
            raise StorageError(f"{source.path}: {taken[out_name]} and {name} would both be {out_name}: move one away")
        taken[out_name] = name
        if is_converted:
            yield _item(path, out_name, layout, files)
            continue
        if kind is not None:
            reader.verify(path)
        yield copy_item(out_name, path)


def _item(path: str, out_name: str, layout: str, files: MappedFiles) -> Item:
    content = Content(load_checked(path, files))  # all before threads look up where they are mapped
    return Item(out_name, os.path.getsize(path), lambda: iter([_out_file(content, layout, out_name)]))


def _place_beside(source: str, target: str) -> None:
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
