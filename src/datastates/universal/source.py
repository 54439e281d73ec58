"""A DeepSpeed checkpoint of ZeRO, read file by file without copying a tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, TopologyError
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.names import Names, read_names
from datastates.universal.shards import Group, Shards, groups_of, merged_shapes, stage_of

_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")


class ZeroCheckpoint:
    """The files of a checkpoint folder, in either format, their tensors mapped.

    The pickles in them are executed, as DeepSpeed does: open only checkpoints that you trust. Mappings live as long as
    the states that were read; a file that is cut short meanwhile ends the process with SIGBUS.

    Attributes:
        directory: the folder with the files, absolute.
        names: the files.
        stage: of ZeRO.
        num_data_parallel: ranks among which ZeRO has split the state.
        num_model_parallel: ranks of tensor and pipeline parallelism together.
        num_pipeline: stages of the pipeline.
        universal_info: the rules for tensor parallelism that the model has left; empty where it has none.
    """

    def __init__(self, directory: str, files: MappedFiles) -> None:
        """Read the structure of the first files.

        Args:
            directory: the folder with the files.
            files: loads them, and owns what was loaded.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or none of ZeRO.
            CorruptCheckpointError: a file of a rank is missing.
        """
        self.directory = os.path.abspath(directory)
        self._files = files
        self.names: Names = read_names(self.directory)
        if not self.names.optimizer:
            raise CheckpointNotFoundError(
                f"{self.directory} has no optimizer files of ZeRO (zero_pp_rank_*_optim_states.pt): only ZeRO 1, 2"
                " and 3 split the state over the ranks"
            )
        first = self.optimizer_state(0, 0)
        self.stage = stage_of(first)
        model = self.model_state(0, 0)
        self._model = model
        self.num_data_parallel = int(model.get("dp_world_size") or len(self.names.data_parallel_ranks(0)))
        self.num_model_parallel = len(self.names.model_parallel_ranks)
        self.num_pipeline = _num_pipeline(model, self.num_model_parallel, model.get("module") is None)
        self.universal_info: dict[str, Any] = dict(model.get("universal_checkpoint_info") or {})
        for dp in range(self.num_data_parallel):
            for mp in range(self.num_model_parallel):
                self._path(self.names.optimizer, dp, mp, "optimizer")

    @property
    def num_tensor_parallel(self) -> int:
        """Ranks of tensor parallelism alone."""
        return self.num_model_parallel // self.num_pipeline

    def model_state(self, dp: int, mp: int) -> dict[str, Any]:
        """The state of a model file; with ZeRO 1 and 2 that of data-parallel rank 0 serves all."""
        dp = dp if (dp, mp) in self.names.model else 0
        return self._load(self._path(self.names.model, dp, mp, "model"))

    def optimizer_state(self, dp: int, mp: int) -> dict[str, Any]:
        """What stands under ``optimizer_state_dict`` in an optimizer file."""
        path = self._path(self.names.optimizer, dp, mp, "optimizer")
        found = self._load(path).get("optimizer_state_dict")
        if not isinstance(found, Mapping):
            raise CorruptCheckpointError(f"{path}: no optimizer_state_dict in it: not an optimizer file of ZeRO", path)
        return dict(found)

    def groups(self, dp: int, mp: int) -> list[Group]:
        """The groups of one rank."""
        return groups_of(self.optimizer_state(dp, mp), self._shapes(mp), dp, self.num_data_parallel)

    def shards(self, mp: int) -> Shards:
        """The parameters of one model-parallel rank."""
        ranks = [self.groups(dp, mp) for dp in range(self.num_data_parallel)]
        return Shards(ranks, merged_shapes(self._shapes(mp)), self.directory)

    def check_kind(self) -> None:
        """Raise TopologyError where the state is spread over the ranks in a way that is not taken apart here."""
        if any(self._model.get(key) for key in _AUTOEP_KEYS):
            raise TopologyError(
                f"{self.directory}: the experts of AutoEP are not taken apart here; convert it with DeepSpeed's"
                " ds_to_universal.py"
            )

    def _shapes(self, mp: int) -> list[dict[str, Any]]:
        shapes: list[dict[str, Any]] | None = self.model_state(0, mp).get("param_shapes")
        if not shapes:
            raise CorruptCheckpointError(f"{self.directory}: the model file of rank {mp} has no param_shapes in it")
        return shapes

    def _load(self, path: str) -> dict[str, Any]:
        state = self._files.load(path)
        if not isinstance(state, dict):
            raise CorruptCheckpointError(f"{path}: holds a {type(state).__name__}, expected a dictionary", path)
        return state

    def _path(self, names: Mapping[tuple[int, int], str], dp: int, mp: int, kind: str) -> str:
        name = names.get((dp, mp))
        if name is None:
            raise CorruptCheckpointError(
                f"{self.directory}: the {kind} file of data-parallel rank {dp}, model-parallel rank {mp} is missing;"
                f" found {', '.join(sorted(names.values())) or 'none'}"
            )
        return self.names.path(name)


def _num_pipeline(model: Mapping[str, Any], num_model_parallel: int, is_by_layers: bool) -> int:
    """Stages of the pipeline: as the file says; else one per model-parallel rank where the layers have files."""
    dimensions = model.get("checkpoint_parallel_dimensions")
    if isinstance(dimensions, Mapping) and dimensions.get("pp_degree"):
        return int(dimensions["pp_degree"])
    return num_model_parallel if is_by_layers else 1
