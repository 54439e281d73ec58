"""Lightning: checkpoints of its ``Trainer`` (and of Fabric) saved lazily.

::

    trainer = Trainer(plugins=[DataStatesCheckpointIO(host_cache_gb=4)])

Works with the package ``lightning`` and with ``pytorch_lightning``, whose classes are not the same ones. What
``ModelCheckpoint`` does to files that are in flight is repaired when the plugin is made.

Source: lightning 2.6, fabric/plugins/io, pytorch/callbacks/model_checkpoint.py and
pytorch/trainer/connectors/checkpoint_connector.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from datastates import reader
from datastates.config import CheckpointConfig
from datastates.errors import CheckpointNotFoundError, ConfigError, DataStatesError
from datastates.integrations.agreement import barrier
from datastates.integrations.lone_files import LoneFiles
from datastates.integrations.stepped import STEPPED
from datastates.integrations.succession import Succession
from datastates.paths import resolved
from datastates.saver import open_savers
from datastates.state import IsEager, named_tensors
from datastates.storage import publish

logger = logging.getLogger(__name__)

_PACKAGES = {"lightning.fabric": "lightning.pytorch", "lightning_fabric": "pytorch_lightning"}
_TRAINERS = tuple(f"{package}.trainer." for package in _PACKAGES.values())
_MARK = "_is_of_datastates"

_REQUEUE_NAME = "hpc_ckpt_"
"""Beginning of the name of the file that a job under SLURM saves before it is put back into the queue."""

_RESTLESS_KEYS = ("averaging_state", "average_model_state")
"""Keys of states whose callbacks write to the weights between two steps: ``WeightAveraging`` (in the checkpoint itself)
and ``StochasticWeightAveraging`` (in the state of the callback)."""


def _fabric() -> Any:
    """The package to subclass from: one that this process has imported, else one that is installed."""
    names = sorted(_PACKAGES, key=lambda name: name not in sys.modules)
    for name in names:
        if name in sys.modules or importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(f"{name}.plugins")
    raise ImportError("neither lightning nor pytorch_lightning is installed: pip install 'datastates[lightning]'")


if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
else:
    _plugins = _fabric()
    CheckpointIO, TorchCheckpointIO = _plugins.CheckpointIO, _plugins.TorchCheckpointIO


class DataStatesCheckpointIO(CheckpointIO):
    """Saves lazily what Lightning hands over as one file: on rank 0, an ordinary file of torch.

    `save_checkpoint` returns before the parameters and states of the optimizers that step are copied; all else
    (buffers, callbacks, metrics, frozen weights) is copied inside it. Where none of the checkpoint's optimizers has
    stepped since the last ``fit``, it returns when the file is durable. A file appears under its name when it is
    complete. Loading waits for it; the end of ``fit`` (`teardown`) waits for all, and raises what was lost.

    Not used by strategies that write themselves: FSDP and model parallel with sharded checkpoints (folders of
    ``torch.distributed.checkpoint``), DeepSpeed.
    """

    def __init__(
        self, host_cache_gb: float = 4, *, is_lazy: Callable[[str, torch.Tensor], bool] | None = None, **settings: Any
    ) -> None:
        """Nothing is started yet: host cache and flusher process live from the first save to the end of ``fit``.

        Args:
            host_cache_gb: size of the host cache in gigabytes of 2**30 bytes.
            is_lazy: says of (fqn, tensor) that nothing but an optimizer's step changes it, although no optimizer
                has it: frozen weights, for example, which are copied inside the save otherwise.
            settings: further settings, by the names of `CheckpointConfig`'s fields.

        Raises:
            ConfigError: a setting is unknown or wrong, or one that Lightning's files do not allow.
        """
        self.config = CheckpointConfig.from_section({"host_cache_size": host_cache_gb, **settings})
        self.config.require_shared_directory("this plugin")
        self.config.refuse_tiers("this plugin")
        if self.config.format == "safetensors":
            raise ConfigError("format is 'safetensors', but Lightning loads its checkpoints with torch.load")
        if self.config.when_busy != "queue":
            raise ConfigError(
                f"when_busy is {self.config.when_busy!r}, but ModelCheckpoint counts on every file: leave it out"
            )
        self._is_lazy = is_lazy
        self._files: LoneFiles | None = None
        self._steps_before = STEPPED.num_steps
        self._handled_before: BaseException | None = None  # ``fit`` was called where this was caught
        self._has_restless_weights = False
        for fabric, pytorch in _PACKAGES.items():
            if f"{fabric}.plugins" in sys.modules:
                sys.modules[f"{fabric}.plugins"].CheckpointIO.register(type(self))
            if f"{pytorch}.callbacks" in sys.modules:
                _repair(sys.modules[f"{pytorch}.callbacks"].ModelCheckpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save a checkpoint as one file; see the class for when it returns.

        Raises:
            TypeError: there are ``storage_options``.
            ValueError: the path is not one of a local file system.
            StateError: the checkpoint cannot be saved; names the value. Nothing was written.
            DataStatesError: outside of training: the save has failed.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options, {storage_options!r} was given")
        target = _local(path)
        if target is None:
            raise ValueError(f"{path} is not in a local file system, and {type(self).__name__} writes to no other")
        if self._files is None:
            self._files = LoneFiles(self.config)
            self._handled_before = _handled_outside()
        is_requeue = os.path.basename(target).startswith(_REQUEUE_NAME)
        # Lightning takes every name with that beginning in it for such a file, also that of a partial file
        name = os.path.join(os.path.dirname(target), ".requeue.ckpt") if is_requeue else target
        guarded = STEPPED.eager_rule(self._steps_before)
        is_training = any(not guarded(fqn, tensor) for fqn, tensor in named_tensors(checkpoint).values())
        handle = self._files.save(checkpoint, name, self._eager_rule(guarded))
        if self._has_restless_weights or _has_restless_weights(checkpoint):
            self._files.saver.wait_staged()
        if is_requeue or self.config.wait_on_save or not is_training:
            self._files.wait_for(handle)
        if is_requeue:
            publish(name, target)

    def load_checkpoint(self, path: Any, map_location: Any | None = "cpu", weights_only: bool | None = None) -> Any:
        """Load a checkpoint, also one in flight: waits until it is there, and until all saves are copied.

        Args:
            path: a file of this plugin or of Lightning; an address that is not local is left to Lightning.
            map_location: as for ``torch.load``.
            weights_only: None: as True. False runs what is pickled in the file.

        Raises:
            CheckpointNotFoundError: there is no such file.
            CorruptCheckpointError: the file is damaged.
            ForeignObjectError: with ``weights_only``, the file holds more than plain data.
            DataStatesError: its save was in flight and is lost.
        """
        target = _local(path)
        for saver in open_savers():
            saver.wait_staged()
            if target is not None:
                saver.wait_for(target)
        if target is None:
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        if not os.path.exists(target):
            raise CheckpointNotFoundError(f"Checkpoint file not found: {path}")
        return reader.load(target, map_location, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or folder as soon as the youngest save, unless it is this, is complete. Returns at once."""
        target = _local(path)
        if target is None:
            TorchCheckpointIO().remove_checkpoint(path)
        else:
            with self._succession() as succession:
                succession.remove(target)

    def link_checkpoint(self, path: Any, link: Any) -> None:
        """Let a symbolic link point to a file once it is complete; ``ModelCheckpoint(save_last="link")`` comes here."""
        with self._succession() as succession:
            succession.link(os.fspath(path), os.fspath(link))

    def is_taken(self, path: str) -> bool:
        """Whether a local name is that of a file or link that is there, or will be, and that nobody wants removed."""
        with self._succession() as succession:
            if succession.is_doomed(path):
                return False
            is_coming = succession.awaits_link(path) or any(saver.has_in_flight(path) for saver in open_savers())
        return is_coming or os.path.exists(path)

    def wait(self, timeout: float | None = None) -> None:
        """Block until all that was saved is complete and durable, and what it replaces is gone.

        Raises:
            DataStatesError: a file is lost that nobody has saved again or removed.
            WaitTimeoutError: not within ``timeout`` seconds.
        """
        if self._files is not None:
            self._files.wait(timeout)

    def teardown(self) -> None:
        """The end of ``fit``, on all ranks: wait for all files, end the flusher process, free the host cache.

        After an error of the training, what is lost is in the log only.

        Raises:
            DataStatesError: a file is lost that nobody has saved again or removed.
        """
        error = sys.exc_info()[1]
        is_interrupted = error is not None and error is not self._handled_before
        files, self._files, self._handled_before = self._files, None, None
        self._steps_before = STEPPED.num_steps
        try:
            if files is not None:
                files.close()
        except DataStatesError:
            if not is_interrupted:
                raise
            logger.exception("datastates: not all checkpoints are there")
        finally:
            if not is_interrupted:
                barrier()  # the others look for files that rank 0 has saved

    @contextlib.contextmanager
    def copying_at_once(self) -> Iterator[None]:
        """Inside, each save copies all that it saves before it returns: the weights are about to be written to."""
        self._has_restless_weights = True
        try:
            yield
        finally:
            self._has_restless_weights = False

    @contextlib.contextmanager
    def _succession(self) -> Iterator[Succession]:
        """That of the files in flight; without any, one for what is to be done at once."""
        if self._files is not None:
            yield self._files.succession
        else:
            with contextlib.closing(Succession()) as succession:
                yield succession

    def _eager_rule(self, guarded: IsEager) -> IsEager:
        is_lazy = self._is_lazy
        if is_lazy is None:
            return guarded
        return lambda fqn, tensor: guarded(fqn, tensor) and not is_lazy(fqn, tensor)

    def __getstate__(self) -> dict[str, Any]:
        """Another process (``ddp_spawn``) starts its own flusher."""
        return {**self.__dict__, "_files": None, "_steps_before": 0, "_handled_before": None}


def _has_restless_weights(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a callback is at work that writes to the weights between two steps."""
    callbacks = checkpoint.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, Mapping) else ()
    parts = (checkpoint, *(state for state in states if isinstance(state, Mapping)))
    return any(part.get(key) is not None for part in parts for key in _RESTLESS_KEYS)


def _handled_outside() -> BaseException | None:
    """The exception that the caller of ``fit`` handles; None where there is none, or Lightning handles it."""
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None:
        return None
    catcher = str(error.__traceback__.tb_frame.f_globals.get("__name__"))
    return None if catcher.startswith(_TRAINERS) else error


def _local(path: Any) -> str | None:
    """A path of a local file system without its protocol; None for any other."""
    system, name = url_to_fs(os.fspath(path))
    return name if isinstance(system, LocalFileSystem) else None


def _plugin_of(trainer: Any) -> DataStatesCheckpointIO | None:
    """The plugin of a trainer, also where another one wraps it.

    Raises:
        ConfigError: it is wrapped by one that copies all by itself, and never tells it of the end of ``fit``.
    """
    outer = plugin = trainer.strategy.checkpoint_io
    while plugin is not None and not isinstance(plugin, DataStatesCheckpointIO):
        plugin = getattr(plugin, "checkpoint_io", None)
    if plugin is not None and any(kind.__name__ == "AsyncCheckpointIO" for kind in type(outer).__mro__):
        raise ConfigError(
            f"{type(plugin).__name__} is asynchronous by itself: give it to the Trainer without the other"
        )
    return plugin


def _repair(callback: Any) -> None:
    """Let ``ModelCheckpoint`` know of files in flight; idempotent, and without effect on other plugins."""
    wraps: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "file_exists": _file_exists,
        "_link_checkpoint": _link_checkpoint,
        "on_train_batch_end": _on_train_batch_end,
    }
    for name, wrap in wraps.items():
        original = getattr(callback, name, None)
        if original is None:
            logger.warning(
                "this release of Lightning has no ModelCheckpoint.%s: what it does to files in flight is not known,"
                " make the plugin with wait_on_save=True",
                name,
            )
        elif not hasattr(original, _MARK):
            replacement = wrap(original)
            setattr(replacement, _MARK, True)
            is_static = isinstance(callback.__dict__.get(name), staticmethod)
            setattr(callback, name, staticmethod(replacement) if is_static else replacement)


def _file_exists(original: Callable[..., bool]) -> Callable[..., bool]:
    """The names are those that would be there if all that was called for had been done at once."""

    @functools.wraps(original)
    def wrapper(self: Any, filepath: Any, trainer: Any) -> bool:
        plugin, target = _plugin_of(trainer), _local(filepath)
        if plugin is None or target is None:
            return original(self, filepath, trainer)
        is_taken = trainer.is_global_zero and plugin.is_taken(resolved(target))
        return bool(trainer.strategy.reduce_boolean_decision(is_taken, all=False))

    return wrapper


def _link_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """The link moves when its file is there: until then it points to the one before."""

    @functools.wraps(original)
    def wrapper(trainer: Any, filepath: str, linkpath: str) -> None:
        plugin = _plugin_of(trainer)
        if plugin is None:
            original(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero:
            plugin.link_checkpoint(filepath, linkpath)
        trainer.strategy.barrier()

    return wrapper


def _on_train_batch_end(original: Callable[..., None]) -> Callable[..., None]:
    """With manual optimization it puts weights of before the step into the model, saves, and puts the others back."""

    @functools.wraps(original)
    def wrapper(self: Any, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        plugin = _plugin_of(trainer)
        is_restless = not pl_module.automatic_optimization and hasattr(pl_module, "saved_models")
        with contextlib.ExitStack() as stack:
            if plugin is not None and is_restless:
                stack.enter_context(plugin.copying_at_once())
            original(self, trainer, pl_module, *args, **kwargs)

    return wrapper
