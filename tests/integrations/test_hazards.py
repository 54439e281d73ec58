"""Which states of DeepSpeed are copied inside ``save()``, by what the engine and its optimizer are."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from datastates.checkpoint_engine import CheckpointEngine
from datastates.integrations.deepspeed import _take_model_step
from datastates.integrations.hazards import eager_rule, hazards_of

LARGE = torch.zeros(100)


def engine(optimizer: object = None, **attributes: object) -> SimpleNamespace:
    return SimpleNamespace(module=torch.nn.Linear(2, 2), optimizer=optimizer, **attributes)


class DeepSpeedZeroOptimizer:
    partition_count = 2

    def __init__(self, use_muon: bool = False) -> None:
        self.param_groups = [{"use_muon": use_muon}]


class StagedZeroOptimizer(DeepSpeedZeroOptimizer):
    def _commit_muon_momentum(self) -> None: ...


class ZenFlowZeroOptimizerSequential(DeepSpeedZeroOptimizer): ...


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer): ...  # noqa: N801 - DeepSpeed's name


@pytest.mark.parametrize(
    ("made", "is_eager"),
    [
        (engine(DeepSpeedZeroOptimizer()), False),
        (engine(ZenFlowZeroOptimizerSequential()), True),
        (engine(SuperOffloadOptimizer_Stage3()), True),
        (engine(DeepSpeedZeroOptimizer(), zenflow=True), True),
        (engine(DeepSpeedZeroOptimizer(), zenflow=False), False),
        (engine(None), False),
    ],
)
def test_all_of_a_restless_optimizer_is_eager_and_nothing_of_another(made, is_eager):
    rule = eager_rule({"optimizer_state_dict": {}}, hazards_of(made))
    assert rule("optimizer_state_dict.single_partition_of_fp32_groups.0", LARGE) is is_eager
    assert not rule("module.weight", LARGE)


@pytest.mark.parametrize(
    ("optimizer", "is_eager"),
    [
        (DeepSpeedZeroOptimizer(use_muon=True), True),
        (StagedZeroOptimizer(use_muon=True), False),
        (DeepSpeedZeroOptimizer(use_muon=False), False),
    ],
)
def test_muons_momentum_is_eager_where_it_changes_in_backward(optimizer, is_eager):
    rule = eager_rule({}, hazards_of(engine(optimizer)))
    assert rule("optimizer_state_dict.base_optimizer_state.state.0.momentum_buffer", LARGE) is is_eager
    assert not rule("optimizer_state_dict.base_optimizer_state.state.0.exp_avg", LARGE)


def test_what_is_no_part_of_model_and_optimizer_is_eager_in_files_of_deepspeed_only():
    rule = eager_rule({"ds_version": "0.19.8", "buffer_names": ["norm.mean"]}, hazards_of(engine()))
    assert rule("user.tensor", LARGE)
    assert rule("module.norm.mean", LARGE)
    assert not rule("module.norm.weight", LARGE)
    assert not eager_rule({"weight": LARGE}, hazards_of(engine()))("weight", LARGE)
    assert not eager_rule([LARGE], hazards_of(engine()))("0", LARGE)


def test_a_buffer_is_eager_under_any_name():
    made = engine()
    made.module.register_buffer("mean", torch.zeros(100))
    rule = eager_rule({}, hazards_of(made))
    assert rule("layers.3.mean", made.module.mean[10:])
    assert not rule("layers.3.weight", LARGE)


def test_an_overlapped_step_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        hazards_of(engine(ZenFlowZeroOptimizerSequential(), overlap_step=False))
        assert caplog.messages == []
        hazards_of(engine(ZenFlowZeroOptimizerSequential(), overlap_step=True))
    assert "overlap_step to false" in caplog.messages[0]


def test_each_model_step_is_recorded_once():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    records = []

    def step_of_each_group(engine):
        for _ in range(3):  # as ZeRO does
            optimizer.step()

    with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as inner:
        inner.saver.events.add(records.append)
        engine = SimpleNamespace(checkpoint_engine=SimpleNamespace(ckpt_engine=inner))
        for _ in range(2):
            _take_model_step(step_of_each_group)(engine)
    assert [record["number"] for record in records if record["event"] == "step"] == [1, 2]
