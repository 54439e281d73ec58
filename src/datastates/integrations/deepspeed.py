"""DeepSpeed: what its own adapter for this engine lacks, repaired at run time.

DeepSpeed 0.19.8 ships ``DataStatesCheckpointEngine``, which imports ``datastates.CheckpointEngine``. Left alone
it never writes ``latest``, never waits before the optimizer step, loses what is in flight at exit, and raises when
it is cleaned up twice. `repair` replaces those methods, when the engine is constructed and only where they are
defective, and puts the fence, the commit and the draining of saves around four methods of ``DeepSpeedEngine``.

Source: deepspeed 0.19.8, runtime/checkpoint_engine/datastates_checkpoint_engine.py and runtime/engine.py.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import print_dist
from torch import distributed

from datastates import __version__, manifest, recovery
from datastates.checkpoint_engine import CheckpointEngine, check_committed
from datastates.config import CheckpointConfig
from datastates.errors import CheckpointNotFoundError, DataStatesError
from datastates.events import now
from datastates.integrations import draining, nvme
from datastates.integrations.agreement import agreed_at_leisure, barrier, settle
from datastates.integrations.hazards import eager_rule, hazards_of
from datastates.integrations.resharding import resharded
from datastates.nodes.agreement import agree_on_whole
from datastates.tiers.nearest import FETCH_SECONDS, fetch_latest, fetch_named

logger = logging.getLogger(__name__)

_MARK = "_is_of_datastates"


def repair() -> None:
    """Repair the adapter and hook into the engine; idempotent, once per process.

    An adapter that brings its own ``get_commit_info`` has been repaired upstream and is left alone, as is an engine
    method that is wrapped already.
    """
    if "get_commit_info" not in vars(DataStatesCheckpointEngine):
        for method in (create, commit, cleanup):
            _replace(DataStatesCheckpointEngine, method)
    draining.repair()
    for wrap in (save_checkpoint, load_checkpoint, _take_model_step, destroy):
        if not hasattr(getattr(DeepSpeedEngine, wrap.__name__), _MARK):
            _replace(DeepSpeedEngine, wrap(getattr(DeepSpeedEngine, wrap.__name__)))


def announce(config: CheckpointConfig) -> None:
    """Say on rank 0, where DeepSpeed prints, which engine is active.

    DeepSpeed's log shows warnings only, unless a script sets its level, and this is none.
    """
    text = f"{config.host_cache_bytes / 2**30:g} GiB of host cache per process, format {config.format or 'torch'}"
    print_dist(f"datastates {__version__} is the active checkpoint engine: {text}", ranks=[0])


def engine_of(engine: DeepSpeedEngine) -> CheckpointEngine | None:
    """This package's engine behind a DeepSpeed engine, None where another checkpoint engine is active."""
    inner = getattr(getattr(engine, "checkpoint_engine", None), "ckpt_engine", None)
    return inner if isinstance(inner, CheckpointEngine) else None


# ------------------------------------------------------------------------------------ methods of the adapter


def create(self: Any, info: Any) -> None:
    """Note which checkpoint the next files belong to; the repaired ``save_checkpoint`` has opened it."""
    self.commit_info = info


def commit(self: Any, info: Any) -> bool | None:
    """Block until all is durable: only ``save_16bit_model`` calls it, whose users read the file next."""
    if info is None:
        return None
    self.ckpt_engine.wait(persist=True)
    self.commit_info = None
    return True


def cleanup(self: Any) -> None:
    """Finish what is in flight and let go of the engine; idempotent."""
    inner, self.ckpt_engine = vars(self).get("ckpt_engine"), None
    if inner is not None:
        inner.close()


# -------------------------------------------------------------------------------- methods of DeepSpeedEngine


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """One checkpoint of all ranks: visible, and named by ``latest``, when all of it is durable."""

    @functools.wraps(original)
    def wrapper(self: DeepSpeedEngine, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(self)
        if engine is None or not save_dir:
            return original(self, save_dir, tag, *args, **kwargs)
        tag = str(f"global_step{self.global_steps}" if tag is None else tag)
        update_latest = _argument(args, kwargs, 1, "save_latest", True)
        begin = now()
        directory = os.path.join(save_dir, tag)
        hazards = hazards_of(self)
        engine.eager_rule = lambda state: eager_rule(state, hazards)
        try:
            with engine.checkpoint(directory, tag, update_latest=update_latest) as attempt:
                if nvme.is_swapping(self):
                    with nvme.without_copy(self):
                        result = original(self, save_dir, tag, *args, **kwargs)
                    nvme.save_swapped(self, engine, directory)
                else:
                    result = original(self, save_dir, tag, *args, **kwargs)
        finally:
            engine.eager_rule = None
        attempt.blocked_seconds = now() - begin
        engine.saver.events.record("save_checkpoint", begin, now(), attempt=attempt.name, path=attempt.directory)
        if engine.config.wait_on_save and not attempt.is_skipped:
            attempt.committed.result()
        return result

    return wrapper


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Saves in flight are settled first, an interrupted commit is completed, an incomplete checkpoint refused.

    What is not whole in the first tier is brought from the nearest that has it.
    """

    @functools.wraps(original)
    def wrapper(self: DeepSpeedEngine, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        if engine_of(self) is None:
            return original(self, load_dir, tag, *args, **kwargs)
        settle()  # another engine of this process may have saved what this one loads
        _recover(self, load_dir, tag)
        is_module_only = _argument(args, kwargs, 3, "load_module_only", False)
        with_states = _argument(args, kwargs, 1, "load_optimizer_states", True) and not is_module_only
        with resharded(self, load_dir, tag, with_states=with_states):
            if with_states and not self.load_universal_checkpoint():
                nvme.check_offload(self, load_dir, tag)
                if nvme.is_swapping(self):
                    return nvme.load_checkpoint(self, original, load_dir, tag, *args, **kwargs)
            return original(self, load_dir, tag, *args, **kwargs)

    return wrapper


def _take_model_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """The fence closes here: before loss scale, Muon's momentum, NVMe swapping, and any optimizer's step."""

    @functools.wraps(original)
    def wrapper(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(self)
        if engine is not None:
            engine.fence.close()
            engine.fence.note_step()
        return original(self, *args, **kwargs)

    return wrapper


def destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copies end before the optimizer frees its memory; the engine ends with everything durable."""

    @functools.wraps(original)
    def wrapper(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(self)
        if engine is not None:
            engine.wait()
        return original(self, *args, **kwargs)

    return wrapper


# ------------------------------------------------------------------------------------------------- details


def _replace(owner: type, replacement: Callable[..., Any]) -> None:
    setattr(replacement, _MARK, True)
    setattr(owner, replacement.__name__, replacement)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _fetch(engine: DeepSpeedEngine, load_dir: str, tag: Any) -> None:
    """Rank 0 brings what is to be loaded from a further tier, where the first one does not have it; all ranks wait.

    Raises:
        CheckpointNotFoundError: a checkpoint that was named, or that ``latest`` names, is whole in no tier.
    """
    inner = engine_of(engine)
    tiers = () if inner is None else inner.config.all_tiers
    if len(tiers) < 2 or engine.load_universal_checkpoint():
        return
    if tag is None:
        agreed_at_leisure(lambda: fetch_latest(tiers, load_dir), FETCH_SECONDS)
    else:
        agreed_at_leisure(lambda: fetch_named(tiers, os.path.join(load_dir, str(tag))), FETCH_SECONDS)


def _recover(engine: DeepSpeedEngine, load_dir: str, tag: Any) -> None:
    """Rank 0 completes or removes what an earlier run left behind; then every rank checks for itself.

    Where nodes share no directory the first rank of each does so, and all find out which checkpoints are whole.

    Raises:
        CheckpointNotFoundError: the checkpoint to load was never completed, or is not whole.
        CorruptCheckpointError: its record is damaged.
        StorageError: a node's directory cannot be read.
    """
    inner = engine_of(engine)
    nodes = None if inner is None else inner.nodes
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0 if nodes is None else nodes.is_first
    if os.path.isdir(load_dir) and is_first:
        try:
            for directory in recovery.clean_leftovers(load_dir):
                logger.info("%s: an earlier run was interrupted here; what it left was completed or removed", directory)
        except (DataStatesError, OSError) as error:
            # The check below says on every rank what is wrong; raising here would leave the others in the barrier.
            logger.warning("%s: what an interrupted run left could not be cleaned up: %s", load_dir, error)
    barrier()
    _fetch(engine, load_dir, tag)
    missing = {} if nodes is None else agree_on_whole(nodes, load_dir).missing
    if tag is None and not engine.load_universal_checkpoint():
        tag = manifest.read_latest(load_dir)
        if nodes is not None:
            tags = nodes.each(lambda: manifest.read_latest(load_dir))
            tag = tag or next((named for named in tags if named in missing), None)
    if tag is not None and str(tag) in missing:
        raise CheckpointNotFoundError(f"{os.path.join(load_dir, str(tag))} is not whole: {missing[str(tag)]}")
    if tag is not None:
        check_committed(os.path.join(load_dir, str(tag), "mp_rank_00_model_states.pt"))
