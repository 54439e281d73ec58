"""The weights of a model, whatever they lie in: by name, without the state of the optimizer, not read yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from datastates import reader
from datastates.conversion.sources import Content, Kind, Source, untrusted
from datastates.errors import ForeignObjectError, StateError, TopologyError
from datastates.fqns import join, near
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.source import ZeroCheckpoint
from datastates.universal.weights import Weight, Weights, zero_weights

WEIGHT_KEYS = ("module", "model", "state_dict", "model_state_dict")
"""Under which names trainers put the weights of the model: DeepSpeed, Megatron, Lightning, and many scripts."""


def weights_of(source: Source, files: MappedFiles, key: str | None = None, dtype: torch.dtype | None = None) -> Weights:
    """The weights in a source, in the order of the model.

    Of ZeRO's partitions those that the optimizer keeps, which are fp32; of any other checkpoint those in the model.

    Args:
        source: any.
        files: loads the files, and owns what is mapped.
        key: dotted name of the part of the state that holds the weights. None: one of the usual names, or all.
        dtype: all floating-point weights are to be written as this; None: as they are.

    Raises:
        CheckpointNotFoundError: there are none.
        CorruptCheckpointError: a file is missing or damaged.
        ForeignObjectError: a file holds more than plain data, and ``files`` may load only that.
        StateError: it cannot be told which tensors are the weights.
        TopologyError: the weights are spread over model-parallel ranks.
    """
    if source.kind is Kind.FOLDER and source.names().optimizer and key is None:
        found = _zero_weights(source, files)
    else:
        found = _plain_weights(source.content(files), key, source.path)
    if not found:
        raise StateError(f"{source.path} holds no weights")
    if dtype is None:
        return found
    return {
        name: replace(weight, dtype=dtype) if weight.dtype.is_floating_point else weight
        for name, weight in found.items()
    }


def as_content(weights: Weights) -> Content:
    """The weights as a flat state; tied ones are one tensor in it."""
    owners = {name: one for name, one in weights.items() if one.owner == name}
    forms = {name: torch.empty(one.shape, dtype=one.dtype, device="cpu") for name, one in owners.items()}
    state = {name: forms[one.owner] for name, one in weights.items()}
    return Content(state, {name: one.elements for name, one in weights.items()})


def _zero_weights(source: Source, files: MappedFiles) -> Weights:
    """Those of `zero_weights`, after the files were compared with their checksums."""
    names = source.names()
    for name in (*names.optimizer.values(), *names.model.values()):
        reader.verify(names.path(name))
    try:
        checkpoint = ZeroCheckpoint(source.path, files)
        checkpoint.check_kind()
        if checkpoint.num_model_parallel > 1:
            raise TopologyError(
                f"{source.path}: the weights are spread over {checkpoint.num_model_parallel} model-parallel ranks;"
                " convert it --to universal, which puts them together"
            )
        return zero_weights(checkpoint)
    except ForeignObjectError as error:
        raise untrusted(source.path, error) from error


def _plain_weights(content: Content, key: str | None, path: str) -> Weights:
    state, prefix = _chosen(content.state, key, path)
    found: Weights = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise StateError(f"{path}: {name} is no strided tensor, which no file of weights can hold", name)
        window = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        owner = owners.setdefault(window, name) if tensor.numel() else name
        elements = content.joined.get(join(prefix, name), [tensor.detach()])
        found[name] = Weight(tensor.shape, tensor.dtype, elements, owner)
    return found


def _chosen(state: Any, key: str | None, path: str) -> tuple[Mapping[str, Any], str]:
    """The part of a state that is the weights, and its name."""
    if key is not None:
        return _by_key(state, key, path), key
    if not isinstance(state, dict):
        raise StateError(f"{path} holds a {type(state).__name__}, expected a dictionary of weights")
    inner = [name for name in WEIGHT_KEYS if _is_flat(state.get(name))]
    if len(inner) == 1:
        return state[inner[0]], inner[0]
    if _is_flat(state):
        return state, ""
    names = ", ".join(map(str, list(state)[:8]))
    raise StateError(
        f"{path}: it cannot be told which tensors are the weights: name their part of the state with key= (--key), one"
        f" of {names}"
    )


def _by_key(state: Any, key: str, path: str) -> Mapping[str, Any]:
    parts: dict[str, Any] = {}
    stack = [("", state)]
    while stack:
        prefix, node = stack.pop()
        if isinstance(node, dict):
            parts[prefix] = node
            stack.extend((join(prefix, name), child) for name, child in node.items())
    if key not in parts or not _is_flat(parts[key]):
        raise StateError(f"{path}: {key!r} is no dictionary of tensors by name{near(key, filter(None, parts))}")
    flat: Mapping[str, Any] = parts[key]
    return flat


def _is_flat(state: object) -> bool:
    """Whether it is a dictionary by strings in which tensors, and nothing that may hold further ones, are."""
    return (
        isinstance(state, dict)
        and any(isinstance(value, torch.Tensor) for value in state.values())
        and all(isinstance(name, str) for name in state)
        and not any(isinstance(value, (dict, list, tuple, set)) for value in state.values())
    )
