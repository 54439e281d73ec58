"""Hugging Face's Trainer without DeepSpeed: whole checkpoints or none, as the Trainer itself would save them."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from datastates import integrity
from datastates.errors import CheckpointNotFoundError, ConfigError, DataStatesError
from datastates.integrations import saving_folders
from datastates.integrations.saving_folders import SavingFolder
from datastates.integrations.transformers import last_checkpoint, use_datastates
from datastates.saver import open_savers
from integrations.jobs import ForkServer
from integrations.trainer_runs import MOMENTS, SETTINGS, Scored, make_model, make_trainer

RUNS = "integrations.trainer_runs"

# PEFT asks transformers under an old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in found.items())


def flusher(signal_number: int) -> None:
    for saver in open_savers():
        os.kill(saver.flusher_pid, signal_number)


def test_training_goes_on_and_the_folder_appears_whole(tmp_path):
    """The flusher stands still from the save to the step after the next: nothing is visible until it is all there."""
    out, seen = tmp_path / "out", {}
    trainer, script = make_trainer(out, 6, save_total_limit=1)

    def begin(step: int) -> None:
        if step == 3:
            trainer._datastates.settle()
            flusher(signal.SIGSTOP)

    def end(step: int) -> None:
        if step == 5:
            seen[step] = names(out), get_last_checkpoint(str(out))
            flusher(signal.SIGCONT)

    script.begin, script.end = begin, end
    trainer.train()
    hidden, visible = seen[5][0]
    assert (hidden, visible) == (".checkpoint-4.datastates.saving", "checkpoint-2")  # though one is to be kept
    assert seen[5][1] == str(out / "checkpoint-2")
    assert names(out) == ["checkpoint-6"]
    assert same(load_file(out / "checkpoint-6" / "model.safetensors"), script.weights[6])
    assert integrity.verify(str(out / "checkpoint-6")) == []
    assert open_savers() == []


def test_the_files_are_those_of_the_trainer(tmp_path, assert_same_state):
    kept = {}
    for kind in ("ours", "theirs"):
        trainer, script = make_trainer(tmp_path / kind, 4, is_lazy=kind == "ours")
        trainer.train()
        folder = tmp_path / kind / "checkpoint-4"
        optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
        assert_same_state(optimizer, script.optimizers[4])
        kept[kind] = (
            {name for name in names(folder) if name != ".datastates"},
            dict(sorted(load_file(folder / "model.safetensors").items())),
            optimizer,
            torch.load(folder / "rng_state.pth", weights_only=False)["cpu"],
            script.losses,
        )
    assert_same_state(kept["ours"], kept["theirs"])
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert same(kept["theirs"][1], loaded.state_dict())


def test_best_and_limit(tmp_path):
    out = tmp_path / "out"
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer, script = make_trainer(
        out, 8, kind=Scored, save_total_limit=1, metric_for_best_model="score", save_only_model=True, **options
    )
    trainer.train()
    assert names(out) == ["checkpoint-4"]
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-4")
    assert json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["best_model_checkpoint"] == str(
        out / "checkpoint-4"
    )
    assert same(trainer.model.state_dict(), script.weights[4])
    assert "optimizer.pt" not in names(out / "checkpoint-4")


@pytest.mark.parametrize("best_at", [2, 4, 6])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_survivors_are_the_newest_and_the_best(tmp_path, limit, best_at, monkeypatch):
    """With times of folders that mean nothing."""
    monkeypatch.setattr(Scored, "scores", {step: 0.9 if step == best_at else 0.1 for step in (2, 4, 6)})
    out = tmp_path / "out"
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "save_only_model": True}
    trainer, script = make_trainer(out, 6, kind=Scored, save_total_limit=limit, **options)

    def end(step: int) -> None:
        for path in out.glob("checkpoint-*"):
            os.utime(path, (1e9 - step, 1e9 - step))

    script.end = end
    trainer.train()
    steps = [2, 4, 6]
    kept = {best_at} if limit == 1 else {6, best_at}
    for step in reversed(steps):
        if len(kept) < limit:
            kept.add(step)
    assert names(out) == [f"checkpoint-{step}" for step in sorted(kept)]


def test_the_best_one_stays_in_a_run_that_was_moved(tmp_path, monkeypatch):
    """The state that is resumed names it by its old path; the Trainer looks for it beside the others."""
    monkeypatch.setattr(Scored, "scores", {step: 0.9 if step == 2 else 0.1 for step in range(9)})
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "save_only_model": False}
    make_trainer(tmp_path / "here", 4, kind=Scored, save_total_limit=2, **options)[0].train()
    out = (tmp_path / "here").rename(tmp_path / "there")
    trainer, _ = make_trainer(out, 8, kind=Scored, save_total_limit=2, **options)
    trainer.train(resume_from_checkpoint=True)
    assert names(out) == ["checkpoint-2", "checkpoint-8"]
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-2")


class Tied(torch.nn.Module):
    """One weight under two names, in a model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_weights_that_the_format_refuses_are_refused(tmp_path):
    """As the Trainer's own save does; a file with one name of two would give half a model."""
    trainer, _ = make_trainer(tmp_path, 2, model=Tied())
    with pytest.raises(RuntimeError, match="share memory"):
        trainer.train()
    assert names(tmp_path) == []


def test_the_file_has_the_names_of_the_weights_and_no_other(tmp_path):
    """Where sizes are odd, and the room for copies is used up; whoever loads strictly would stumble over more."""

    class Odd(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(32, 64)
            self.odd = torch.nn.Parameter(torch.ones(2111, dtype=torch.bfloat16), requires_grad=False)
            self.large = torch.nn.Parameter(torch.randn(700), requires_grad=False)

    model = Odd()
    trainer, script = make_trainer(tmp_path, 2, model=model, is_lazy=False)
    use_datastates(trainer, **SETTINGS, eager_budget_bytes=1 << 10)
    trainer.train()
    found = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert set(found) == set(model.state_dict())
    assert same(found, script.weights[2])


def test_what_somebody_has_given_to_the_trainer_stays(tmp_path):
    trainer, _ = make_trainer(tmp_path, 4)
    trainer._get_output_dir = lambda trial=None: str(tmp_path / "mine")
    trainer.train()
    assert names(tmp_path / "mine") == ["checkpoint-2", "checkpoint-4"]


def test_a_save_because_of_sigterm_is_there_when_the_training_stops(tmp_path):
    pytest.importorskip("transformers.trainer_jit_checkpoint", reason="transformers 4 does not know it")
    trainer, script = make_trainer(tmp_path, 6, save_strategy="no", enable_jit_checkpoint=True)
    (manager,) = [c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")]

    def begin(step: int) -> None:
        manager.is_checkpoint_requested = step == 3

    script.begin = begin
    trainer.train()
    assert names(tmp_path) == ["checkpoint-3"]
    assert "checkpoint-is-incomplete.txt" not in names(tmp_path / "checkpoint-3")
    assert integrity.verify(str(tmp_path / "checkpoint-3")) == []


def test_a_folder_with_nothing_but_the_word_of_sigterm_is_no_checkpoint(tmp_path):
    """The Trainer makes it before it calls for the save, and was killed then."""
    make_trainer(tmp_path, 2)[0].train()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "checkpoint-is-incomplete.txt").write_text("")
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_new_folder_is_empty(tmp_path):
    """Whatever a job that died has left of the same step, where nobody has cleaned up."""
    folder = SavingFolder(str(tmp_path), "checkpoint-4")
    Path(folder.path, ".datastates").mkdir(parents=True)
    Path(folder.path, "optimizer.pt").write_text("of another run")
    folder.make()
    assert names(Path(folder.path)) == []
    folder.discard()


def test_a_folder_is_given_up_while_files_are_still_made_in_it(tmp_path, monkeypatch):
    folder = SavingFolder(str(tmp_path), "checkpoint-4")
    folder.make()
    remove, calls = saving_folders.shutil.rmtree, []

    def remove_or_refuse(path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path)

    monkeypatch.setattr(saving_folders.shutil, "rmtree", remove_or_refuse)
    folder.discard()
    assert names(tmp_path) == []


def test_an_adapter_is_saved_alone_and_resumes(tmp_path):
    """The frozen weights of the base are in no file, and what the adapter's file has is what PEFT loads."""

    def adapted() -> PeftModel:
        config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return get_peft_model(make_model(), config)

    whole, expected = make_trainer(tmp_path / "whole", 6, model=adapted(), is_lazy=False)
    whole.train()
    out = tmp_path / "out"
    trainer, script = make_trainer(out, 4, model=adapted())
    trainer.train()
    folder = out / "checkpoint-4"
    assert not (folder / "model.safetensors").exists()
    stored = load_file(folder / "adapter_model.safetensors")
    assert all("lora_" in name for name in stored)
    loaded = PeftModel.from_pretrained(make_model(), folder).state_dict()
    assert same({name: value for name, value in loaded.items() if "lora_" in name}, script.weights[4])
    again, resumed = make_trainer(out, 6, model=adapted())
    again.train(resume_from_checkpoint=True)
    assert script.losses | resumed.losses == expected.losses


def test_a_save_that_fails_leaves_the_older_one(tmp_path, small_disk):
    """The disk is full from step 3 on: training goes on, the end says so, and what is there can be resumed from."""
    disk = small_disk(4 << 20)
    trainer, script = make_trainer(disk / "out", 6, save_total_limit=1)

    def begin(step: int) -> None:
        if step == 2:
            trainer._datastates.settle()
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            (disk / "ballast").write_bytes(bytes(free - (100 << 10)))  # the small files do fit

    script.begin = begin
    with pytest.raises(DataStatesError, match="no space"):
        trainer.train()
    assert sorted(script.losses) == [1, 2, 3, 4, 5, 6]
    assert names(disk / "out") == ["checkpoint-2"]
    assert integrity.verify(str(disk / "out" / "checkpoint-2")) == []


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_best_one_is_lost(tmp_path, is_loaded):
    """Trainer would go on with the last weights, and say so in its log only; or compare with a folder that is not."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": is_loaded, "save_total_limit": 1}
    trainer, script = make_trainer(tmp_path, 4, kind=Scored, metric_for_best_model="score", **options)

    def end(step: int) -> None:
        if step == 4:
            saver = open_savers()[0]
            begin = saver.begin

            def begin_and_fail(*args, **kwargs):
                attempt = begin(*args, **kwargs)
                attempt.error = DataStatesError("a fault of the test")
                saver._requests.give_up(attempt)
                return attempt

            saver.begin = begin_and_fail

    script.end = end
    kind, text = (CheckpointNotFoundError, "the best checkpoint is lost") if is_loaded else (DataStatesError, "a fault")
    with pytest.raises(kind, match=text):
        trainer.train()
    assert sorted(script.losses) == [1, 2, 3, 4]
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_failure_of_the_trainer_itself_is_raised_and_leaves_nothing(tmp_path, monkeypatch):
    trainer, _ = make_trainer(tmp_path, 4)

    def fail(folder: str) -> None:
        raise ArithmeticError("mine")

    monkeypatch.setattr(trainer, "_save_rng_state", fail)
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.train()
    assert names(tmp_path) == []
    assert open_savers() == []


def test_what_a_living_job_saves_is_left_alone_and_what_a_dead_one_left_is_removed(tmp_path):
    alive, dead = (SavingFolder(str(tmp_path), name) for name in ("checkpoint-4", "checkpoint-6"))
    alive.make()
    Path(dead.path).mkdir(parents=True)
    (tmp_path / "checkpoint-2").mkdir()
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert names(tmp_path) == [".checkpoint-4.datastates.saving", "checkpoint-2"]
    alive.discard()
    assert last_checkpoint(str(tmp_path / "absent")) is None


def test_what_it_refuses(tmp_path):
    def plain() -> Trainer:
        return Trainer(make_model(), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))

    with pytest.raises(ConfigError, match="format"):
        use_datastates(plain(), format="torch")
    with pytest.raises(ConfigError, match="host_cache_size"):
        use_datastates(plain(), host_cache_gb=0)
    with pytest.raises(ConfigError, match=r"this Trainer saves .* files of others beside its own"):
        use_datastates(plain(), tiers=[tmp_path, tmp_path.parent / "far"])
    trainer = use_datastates(plain())
    with pytest.raises(ValueError, match="before"):
        use_datastates(trainer)
    for name, other in (("is_deepspeed_enabled", "datastates_ckpt"), ("is_fsdp_enabled", "FSDP")):
        refused = plain()
        setattr(refused, name, True)
        with pytest.raises(ValueError, match=other):
            use_datastates(refused)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Has imported transformers once."""
    server = ForkServer(RUNS)
    yield server
    server.close()


def losses(folder: Path, name: str, rank: int) -> dict[int, str]:
    text = (folder / f"losses-{name}-{rank}.json").read_text()
    return {int(step): loss for step, loss in json.loads(text).items()}


@pytest.mark.leaves_partial_files
@pytest.mark.parametrize(("num_ranks", "resume"), [(1, "true"), (2, "last")])
def test_a_killed_job_resumes_to_the_same_losses(server, tmp_path, num_ranks, resume):
    def start(folder: Path, resume: str, wait_after: int):
        arguments = (folder, resume, wait_after, 8, num_ranks)
        return server.start(f"{RUNS}:train", *arguments, folder=folder, num_ranks=num_ranks)

    try:
        whole = start(tmp_path / "whole", "", 0)
        job = start(tmp_path, "", 5)
        job.wait_announced(60)
        job.kill()
        whole.wait(60)
        start(tmp_path, resume, 0).wait(60)
    finally:
        server.kill_all()
    for rank in range(num_ranks):
        expected, resumed = losses(tmp_path / "whole", "whole", rank), losses(tmp_path, "resumed", rank)
        assert list(resumed) == [5, 6, 7, 8]  # what was in the host cache has outlived the trainer
        assert resumed == {step: expected[step] for step in resumed}
    assert names(tmp_path / "out") == ["checkpoint-6", "checkpoint-8"]
    weights = [
        load_file(place / "out" / "checkpoint-8" / "model.safetensors") for place in (tmp_path, tmp_path / "whole")
    ]
    assert same(*weights)
    states = {f"rng_state_{rank}.pth" for rank in range(2)} if num_ranks == 2 else {"rng_state.pth"}
    assert states <= set(names(tmp_path / "out" / "checkpoint-8"))


@pytest.mark.leaves_partial_files
def test_whenever_a_job_is_killed_there_is_a_whole_checkpoint_and_nothing_else(server, tmp_path):
    """One job per moment of its third save, all at once."""
    folders = {moment: tmp_path / str(number) for number, moment in enumerate(MOMENTS)}
    try:
        jobs = [server.start(f"{RUNS}:die", folders[m], m, folder=folders[m], num_ranks=1) for m in MOMENTS]
        for job in jobs:
            job.wait(90, expect=-signal.SIGKILL)
    finally:
        server.kill_all()
    for moment, folder in folders.items():
        out = folder / "out"
        found = last_checkpoint(str(out))
        assert found is not None, moment
        assert integrity.verify(found) == [], moment
        assert LlamaForCausalLM.from_pretrained(found) is not None, moment
        kept = names(out)
        assert os.path.basename(found) in kept, moment
        assert set(kept) <= {"checkpoint-4", "checkpoint-6"}, moment
        has_newest = moment in list(MOMENTS)[list(MOMENTS).index("when all is durable") :]
        assert not has_newest or found.endswith("checkpoint-6"), moment


def test_every_node_that_saves_waits_for_its_own_and_all_hear_of_a_loss(server, tmp_path):
    job = server.start(f"{RUNS}:train_on_two_nodes", tmp_path, folder=tmp_path, num_ranks=2)
    try:
        job.wait(60)
    finally:
        server.kill_all()
    assert names(tmp_path / "node0") == ["checkpoint-2", "checkpoint-4"]
    assert names(tmp_path / "node1") == ["checkpoint-2"]
    assert ["a fault of the test" in (tmp_path / f"error-{rank}").read_text() for rank in range(2)] == [True, True]
