"""``Trainer.save_model`` where it makes a checkpoint of DeepSpeed: there when it returns, or raised."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from datastates import CheckpointEngine, integrity
from datastates.errors import CommitError
from datastates.integrations import trainer


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_it_returns_when_the_checkpoint_is_there_or_says_why_it_is_lost(tmp_path, is_lost, is_named):
    out = tmp_path / "out"
    with CheckpointEngine({"host_cache_size": 0.00390625, "pin_host_cache": False}) as engine:

        def save(_trainer: object, _out: str | None, _internal: bool) -> None:
            """As DeepSpeed does it; one of the ranks gives it up a moment later."""
            with engine.checkpoint(str(out / "global_step2"), "global_step2") as attempt:
                engine.save({"w": torch.ones(1000)}, str(out / "global_step2" / "mp_rank_00_model_states.pt"))
                if is_lost:
                    attempt.error = CommitError("a fault of the test")
                    engine.saver._requests.give_up(attempt)

        wrapped = trainer.save_model(save)
        caller = SimpleNamespace(args=SimpleNamespace(output_dir=str(out)))
        arguments = (caller, str(out)) if is_named else (caller,)
        if is_lost:
            with pytest.raises(CommitError, match="a fault of the test"):
                wrapped(*arguments)
            with pytest.raises(CommitError):
                engine.wait(persist=True)  # the engine's own word stays
        else:
            wrapped(*arguments)
            assert integrity.verify(str(out / "global_step2")) == []
