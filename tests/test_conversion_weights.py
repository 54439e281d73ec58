"""Weights put together from partitions of ZeRO, and models that transformers loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from datastates import CheckpointEngine, load
from datastates.cli import main
from datastates.conversion import convert_to_huggingface, convert_to_weights
from datastates.errors import CorruptCheckpointError, ForeignObjectError, TopologyError
from integrations.zero_files import Model, write_zero2, write_zero3

GROUPS = [{"a.weight": (5, 3), "b": (7,)}, {"one": (1,), "large": (33, 11)}]


def write(stage: int, folder: Path, num_ranks: int = 3) -> Model:
    model = Model(GROUPS)
    if stage == 3:
        write_zero3(folder, model, num_ranks)
    else:
        write_zero2(folder, model, num_ranks, stage=stage)
    return model


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_of_zero_become_weights(tmp_path, stage, suffix):
    model = write(stage, tmp_path / "run" / "step5")
    (tmp_path / "run" / "latest").write_text("step5")
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / f"{dtype}{suffix}"
        convert_to_weights(tmp_path / "run", out, dtype, trust=True)
        found = load(out)
        assert list(found) == [name for group in GROUPS for name in group]
        for name, values in model.values.items():
            assert found[name].dtype is dtype
            assert torch.equal(found[name], values["fp32"].to(dtype)), name


def test_buffers_frozen_and_tied_weights_of_zero(tmp_path):
    model = Model(GROUPS)
    module = {name: values["fp32"].half() for name, values in model.values.items()}
    module |= {"running": torch.rand(4).half(), "count": torch.tensor(3), "frozen": torch.rand(2, 2).half()}
    extra = {
        "module": module,
        "buffer_names": ["running", "count"],
        "frozen_param_shapes": {"frozen": torch.Size((2, 2))},
        "frozen_param_fragments": {"frozen": module["frozen"]},
        "shared_params": {"tied": "b"},
    }
    write_zero2(tmp_path / "ckpt", model, 2, **extra)
    convert_to_weights(tmp_path / "ckpt", tmp_path / "out.pt", torch.float32, trust=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == {*model.values, "running", "count", "frozen", "tied"}
    assert torch.equal(found["running"], module["running"].float())
    assert torch.equal(found["frozen"], module["frozen"].float())
    assert (found["count"].dtype, int(found["count"])) == (torch.int64, 3)
    assert found["tied"].data_ptr() == found["b"].data_ptr()


def test_what_keeps_weights_from_being_put_together_is_said(tmp_path):
    write(2, tmp_path / "ckpt")
    with pytest.raises(ForeignObjectError, match=r"holds .*Address.*--trust"):
        convert_to_weights(tmp_path / "ckpt", tmp_path / "out.pt")
    write_zero2(tmp_path / "ckpt", Model(GROUPS), 3, mp=1)
    with pytest.raises(TopologyError, match="2 model-parallel ranks; convert it --to universal"):
        convert_to_weights(tmp_path / "ckpt", tmp_path / "out.pt", trust=True)
    write(2, tmp_path / "other")
    (tmp_path / "other" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="rank 1"):
        convert_to_weights(tmp_path / "other", tmp_path / "out.pt", trust=True)
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "other"]


# ------------------------------------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def model():
    """A language model of a few thousand weights, whose head is tied to its embedding."""
    torch.manual_seed(7)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def assert_same_model(folder: Path, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    found, report = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert found.lm_head.weight is found.transformer.wte.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.to(dtype)), name


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_model_is_loaded_by_transformers(tmp_path, model, suffix):
    """From a file of ours in either format, which a trainer has made, in one file or several."""
    model.config.save_pretrained(tmp_path)
    with CheckpointEngine({"host_cache_size": 2**-8}) as engine:
        engine.save({"model": model.state_dict(), "epoch": 1}, str(tmp_path / f"a{suffix}"))
    convert_to_huggingface(tmp_path / f"a{suffix}", tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "whole")) == ["config.json", "model.safetensors"]
    assert_same_model(tmp_path / "whole", model)
    arguments = ["convert", "--to", "hf", str(tmp_path / f"a{suffix}"), str(tmp_path / "shards")]
    done = CliRunner().invoke(main, [*arguments, "--max-shard-size", "5KB", "--dtype", "bf16", "--json"])
    assert done.exit_code == 0, done.output
    num_shards = len(list((tmp_path / "shards").glob("model-*.safetensors")))
    assert num_shards > 2
    assert json.loads(done.stdout)["num_items"] == num_shards + 2  # the index, the config
    assert_same_model(tmp_path / "shards", model, torch.bfloat16)


def test_what_transformers_has_saved_is_converted(tmp_path, model):
    """Its shards to one file, and by way of that back."""
    model.save_pretrained(tmp_path / "stock", max_shard_size="10KB")
    convert_to_weights(tmp_path / "stock", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(found[name], weight)
    convert_to_huggingface(tmp_path / "out.pt", tmp_path / "back", config=tmp_path / "stock" / "config.json")
    assert_same_model(tmp_path / "back", model)
