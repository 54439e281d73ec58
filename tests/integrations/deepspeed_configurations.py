"""Everything that DeepSpeed can save, one `Configuration` for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from integrations import deepspeed_models as models

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 4}}
OVERFLOWING: dict[str, Any] = {
    "fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1000}
}
CPU_OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ZENFLOW: dict[str, Any] = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 2,
    "update_interval": 2,
    "full_warm_up_rounds": 1,
    "pt_reserved_cores_perc": 0.5,
}
SMALL_GROUPS: dict[str, Any] = {"sub_group_size": 9000, "stage3_param_persistence_threshold": 100}
"""ZeRO-3 with several sub-groups, and with parameters that stay whole (the small ones) beside those that do not."""


NVME_GROUPS: dict[str, Any] = {"sub_group_size": 300_000, "stage3_param_persistence_threshold": 100}
NVME: dict[str, Any] = {
    "make_model": functools.partial(models.Net, 512, 2048),
    "optimizer": ("AdamW", {"lr": 1e-2}),
    "needs": ("CPUAdamBuilder", "AsyncIOBuilder"),
    "width": 512,
}
"""Large enough that the weights are swapped: a sub-group of at least 1 MiB is, a smaller one stays in memory."""


@dataclass(frozen=True)
class Configuration:
    """One way to train.

    Attributes:
        section: of the DeepSpeed config, beside what all have in common.
        make_model: called after the seed is set.
        optimizer: its type and parameters.
        needs: builders of DeepSpeed's compiled operators without which it does not run.
        save: further arguments of ``save_checkpoint``.
        load: further arguments of ``load_checkpoint``.
        width: of the model's input.
        num_ranks: processes.
        is_pipeline: trained by ``train_batch``.
        is_data_parallel: whether every rank has its own batches.
        num_micro_steps: of gradient accumulation.
        save_after_micro_steps: so many after a step is saved.
        are_losses_resumed: whether a run resumed from the checkpoint goes on bit for bit as the first one did.
    """

    section: Mapping[str, Any]
    make_model: Callable[[], torch.nn.Module] = models.Net
    optimizer: tuple[str, Mapping[str, Any]] = ("AdamW", {"lr": 1e-2, "torch_adam": True})
    needs: tuple[str, ...] = ()
    save: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    width: int = models.WIDTH
    num_ranks: int = 2
    is_pipeline: bool = False
    is_data_parallel: bool = True
    num_micro_steps: int = 1
    save_after_micro_steps: int = 0
    are_losses_resumed: bool = True

    @property
    def is_overflowing(self) -> bool:
        """Whether the first three steps overflow: those before the save, and the one after it."""
        return self.section.get("fp16") == OVERFLOWING["fp16"]

    def as_dict(self, folder: Path, **datastates: Any) -> dict[str, Any]:
        """The whole DeepSpeed config; swap files lie in the folder."""
        name, parameters = self.optimizer
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.num_micro_steps,
            "optimizer": {"type": name, "params": dict(parameters)},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "steps_per_print": 1000,
            "datastates_ckpt": {"host_cache_size": 0.00390625, "eager_bytes": 1024, **datastates},
            **self.section,
        }
        return {key: _with_folder(value, folder) for key, value in config.items()}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


def _with_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _with_folder(entry, folder) for key, entry in value.items()}
    return str(folder / "swap") if value == "SWAP" else value


CONFIGURATIONS: dict[str, Configuration] = {
    "zero0-fp32": Configuration({}),
    "zero0-bf16": Configuration(BF16),
    "zero0-fp16": Configuration(FP16),
    "zero1-fp32": Configuration(zero(1)),
    "zero1-bf16": Configuration(BF16 | zero(1)),
    "zero2-bf16": Configuration(BF16 | zero(2)),
    "zero3-fp32": Configuration(zero(3, **SMALL_GROUPS)),
    "zero3-bf16": Configuration(BF16 | zero(3, **SMALL_GROUPS)),
    "zero1-fp16-overflow": Configuration(OVERFLOWING | zero(1)),
    "zero3-fp16-overflow": Configuration(OVERFLOWING | zero(3)),
    "bf16-optimizer": Configuration(BF16 | zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "bf16-optimizer-immediate": Configuration(
        {"bf16": {"enabled": True, "immediate_grad_update": True}}
        | zero(1)
        | {"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "zero2-cpu-adam": Configuration(
        BF16 | zero(2, **CPU_OFFLOAD), optimizer=("AdamW", {"lr": 1e-2}), needs=("CPUAdamBuilder",)
    ),
    "zero3-cpu-adam-ratio": Configuration(
        BF16 | zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}, **SMALL_GROUPS),
        optimizer=("AdamW", {"lr": 1e-2}),
        needs=("CPUAdamBuilder",),
    ),
    "zero2-cpu-torch-adam": Configuration(BF16 | zero(2, **CPU_OFFLOAD) | {"zero_force_ds_cpu_optimizer": False}),
    "zero3-cpu-adam-params": Configuration(
        BF16 | zero(3, **CPU_OFFLOAD, offload_param={"device": "cpu"}, **SMALL_GROUPS),
        optimizer=("AdamW", {"lr": 1e-2}),
        needs=("CPUAdamBuilder",),
    ),
    "zero2-cpu-lion": Configuration(
        BF16 | zero(2, **CPU_OFFLOAD), optimizer=("Lion", {"lr": 1e-3}), needs=("CPULionBuilder",)
    ),
    "zero2-cpu-adagrad": Configuration(
        BF16 | zero(2, **CPU_OFFLOAD), optimizer=("Adagrad", {"lr": 1e-2}), needs=("CPUAdagradBuilder",)
    ),
    "zero1-muon": Configuration(BF16 | zero(1), optimizer=("Muon", {"lr": 1e-2, "torch_adam": True})),
    "zero2-muon": Configuration(BF16 | zero(2), optimizer=("Muon", {"lr": 1e-2, "torch_adam": True})),
    "zero3-muon": Configuration(
        BF16 | zero(3, reduce_scatter=False), optimizer=("Muon", {"lr": 1e-2, "torch_adam": True})
    ),
    "zenflow": Configuration(
        BF16 | zero(2, **CPU_OFFLOAD, zenflow={**ZENFLOW, "overlap_step": False}),
        optimizer=("AdamW", {"lr": 1e-2}),
        needs=("CPUAdamBuilder",),
        are_losses_resumed=False,  # DeepSpeed saves neither the selected columns nor their moments
    ),
    "zero3-nvme": Configuration(
        BF16 | zero(3, **NVME_GROUPS, offload_optimizer={"device": "nvme", "nvme_path": "SWAP"}), **NVME
    ),
    "zero3-nvme-pipelined-params": Configuration(
        BF16
        | zero(
            3,
            **NVME_GROUPS,
            offload_optimizer={
                "device": "nvme",
                "nvme_path": "SWAP",
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 20,
            },
            offload_param={"device": "nvme", "nvme_path": "SWAP", "buffer_size": 2_000_000},
        ),
        **NVME,
    ),
    "pipeline-zero0": Configuration({}, make_model=models.pipeline, is_pipeline=True, is_data_parallel=False),
    "pipeline-zero1-bf16": Configuration(
        BF16 | zero(1), make_model=models.pipeline, is_pipeline=True, is_data_parallel=False
    ),
    "pipeline-data-parallel": Configuration(
        BF16 | zero(1), make_model=models.pipeline, is_pipeline=True, is_data_parallel=False, num_ranks=4
    ),
    "pipeline-tied": Configuration(
        BF16 | zero(1), make_model=models.tied_pipeline, is_pipeline=True, is_data_parallel=False
    ),
    "moe-zero0": Configuration({}, make_model=functools.partial(models.ExpertNet, 2)),
    "moe-zero2-bf16": Configuration(BF16 | zero(2), make_model=functools.partial(models.ExpertNet, 2)),
    "tensor-parallel-zero1": Configuration(
        BF16
        | zero(1)
        | {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {
                    "use_default_specs": False,
                    "layer_specs": [
                        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
                        {"patterns": [r".*\.q_proj\.weight$"], "partition_type": "column"},
                    ],
                },
            }
        },
        make_model=models.ParallelNet,
        is_data_parallel=False,
    ),
    "tied-zero1": Configuration(BF16 | zero(1), make_model=models.TiedNet),
    "tied-zero3": Configuration(BF16 | zero(3), make_model=models.TiedNet),
    "frozen-zero2": Configuration(BF16 | zero(2), make_model=models.FrozenNet),
    "frozen-zero3": Configuration(BF16 | zero(3), make_model=models.FrozenNet),
    "frozen-excluded-zero1": Configuration(
        BF16 | zero(1),
        make_model=models.FrozenNet,
        save={"exclude_frozen_parameters": True},
        load={"load_module_strict": False},
    ),
    "frozen-excluded-zero3": Configuration(
        BF16 | zero(3),
        make_model=models.FrozenNet,
        save={"exclude_frozen_parameters": True},
        load={"load_module_strict": False},
    ),
    "adapter-zero2": Configuration(
        BF16 | zero(2),
        make_model=models.AdapterNet,
        save={"exclude_frozen_parameters": True},
        load={"load_module_strict": False},
    ),
    "accumulation-zero1": Configuration(BF16 | zero(1), num_micro_steps=3),
    "accumulation-zero2-middle": Configuration(
        BF16 | zero(2), num_micro_steps=3, save_after_micro_steps=2, are_losses_resumed=False
    ),
    "torch-autocast-zero1": Configuration(zero(1) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "elastic-zero1": Configuration(
        BF16 | zero(1, elastic_checkpoint=True),
        optimizer=("Adam", {"lr": 1e-2}),
        needs=("FusedAdamBuilder",),
        are_losses_resumed=False,  # nor are they with DeepSpeed's own engine
    ),
}
