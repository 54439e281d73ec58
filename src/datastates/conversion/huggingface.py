"""To the folder of a Hugging Face model: shards of safetensors and an index.

Source: huggingface_hub, ``split_torch_state_dict_into_shards`` for names and the rule of filling; transformers,
``PreTrainedModel.save_pretrained`` for what else is in the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import torch

from datastates.conversion.places import check_place
from datastates.conversion.sources import CONFIG_NAME, INDEX_NAMES, WHOLE_NAMES, open_source
from datastates.conversion.weights import as_content, weights_of
from datastates.errors import CheckpointNotFoundError, ConfigError
from datastates.universal.building import Conversion, Item, Progress, build, copy_item
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.weights import Weights
from datastates.universal.writing import FLAT, OutFile

MAX_SHARD_BYTES = 5 * 10**9
"""As ``save_pretrained`` had for years; shards of that size load everywhere."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|K|M|G|T)(|i)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_COPIED_NAMES = (CONFIG_NAME, "generation_config.json")


def parse_size(text: str) -> int:
    """A number of bytes: ``"5GB"`` are 5 * 10**9 as for Hugging Face, ``"5GiB"`` 5 * 2**30.

    Raises:
        ConfigError: it is no size, or less than a byte.
    """
    found = _SIZE.fullmatch(text.strip())
    nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()]) if found else 0
    if nbytes < 1:
        raise ConfigError(f"{text!r} is no size: write one as 500MB, 5GB or 2GiB")
    return nbytes


def convert_to_huggingface(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: str | os.PathLike[str] | None = None,
    key: str | None = None,
    trust: bool = False,
    force: bool = False,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write the weights of a model as a folder for ``from_pretrained``.

    The names of the weights stay as they are: they must be those of the model. Of tied weights the first is written;
    transformers ties the others again. One shard is ``model.safetensors``, several are named in an index. The folder
    appears whole or not at all, durable. Takes some tens of MiB of memory per worker. Blocks.

    Args:
        source: a file or folder. Nothing in it is changed.
        out: the folder to be made.
        dtype: of the floating-point weights; None: as they are stored, with ZeRO fp32.
        max_shard_bytes: size of a shard; only one with a single, larger weight exceeds it.
        config: the ``config.json`` of the model. None: the one beside the source, if there is any.
        key: dotted name of the part of the state that holds the weights. None: one of the usual names, or all.
        trust: load what is more than plain data, by running code of the source; partitions of ZeRO always are.
        force: replace what is at ``out``.
        num_workers: threads; None: as many as there are processors, at most 8.
        progress: called with the bytes written so far and those in all, one call at a time.

    Raises:
        CheckpointNotFoundError: there is no such source or no such config.
        CorruptCheckpointError: a file is missing or damaged.
        ForeignObjectError: a file holds more than plain data, and ``trust`` is not set.
        StateError: it cannot be told which tensors are the weights, or safetensors has no such dtype.
        StorageError: ``out`` is there already, there is no room, or storage refuses.
        TopologyError: the weights are spread over model-parallel ranks.
    """
    opened, target = open_source(source), os.path.abspath(os.fspath(out))
    check_place(opened.path, target, force)
    copied = _beside(opened.directory, config)
    with MappedFiles(opened.path, weights_only=not trust, whole=True) as files:
        weights = {name: one for name, one in weights_of(opened, files, key, dtype).items() if one.owner == name}
        items = [*_shards(weights, max_shard_bytes), *(copy_item(name, path) for name, path in copied.items())]
        origin = f"huggingface {dtype} {max_shard_bytes} {key} of {opened.path}"
        return build(items, target, origin, files, num_workers, progress, replace=force)


def _beside(directory: str, config: str | os.PathLike[str] | None) -> dict[str, str]:
    """Paths of the files to be copied, by their names in the result."""
    found = {name: os.path.join(directory, name) for name in _COPIED_NAMES}
    found = {name: path for name, path in found.items() if os.path.isfile(path)}
    if config is not None:
        found[CONFIG_NAME] = os.path.abspath(os.fspath(config))
        if not os.path.isfile(found[CONFIG_NAME]):
            raise CheckpointNotFoundError(f"there is no file {found[CONFIG_NAME]}")
    return found


def _shards(weights: Weights, max_shard_bytes: int) -> Iterator[Item]:
    parts = list(_parts(weights, max_shard_bytes))
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = WHOLE_NAMES[0] if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        index.update(dict.fromkeys(part, name))
        yield _shard(name, part)
    if len(parts) > 1:
        metadata = {
            "total_parameters": sum(one.shape.numel() for one in weights.values()),
            "total_size": sum(one.nbytes for one in weights.values()),
        }
        text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(index.items()))}, indent=2) + "\n"
        yield Item(INDEX_NAMES[0], len(text), lambda: iter([OutFile(INDEX_NAMES[0], data=text.encode())]))


def _shard(name: str, part: Weights) -> Item:
    content = as_content(part)
    nbytes = sum(one.nbytes for one in part.values())
    return Item(name, nbytes, lambda: iter([OutFile(name, content.state, content.joined, FLAT)]))


def _parts(weights: Weights, max_shard_bytes: int) -> Iterator[Weights]:
    part: Weights = {}
    nbytes = 0
    for name, one in weights.items():
        if part and nbytes + one.nbytes > max_shard_bytes:
            yield part
            part, nbytes = {}, 0
        part[name] = one
        nbytes += one.nbytes
    yield part
