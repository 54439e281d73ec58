"""Lightning's Trainer with the plugin: what is saved, what ModelCheckpoint makes of it, what a crash leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from datastates.errors import CheckpointNotFoundError, ConfigError, DataStatesError
from datastates.integrations.lightning import DataStatesCheckpointIO
from datastates.saver import open_savers
from integrations.jobs import ForkServer
from integrations.lightning_runs import WIDTH, Model, batches, make_trainer

RUNS = "integrations.lightning_runs"
CACHE = 2**-8  # gigabytes: 4 MiB, a third of what one checkpoint has

pytestmark = [
    # its advice on numbers of workers, on empty folders and the like
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*:FutureWarning"),
]


@pytest.fixture
def plugin() -> Iterator[DataStatesCheckpointIO]:
    made = DataStatesCheckpointIO(host_cache_gb=CACHE)
    yield made
    made.teardown()


def flusher_pid() -> int:
    (saver,) = open_savers()
    return saver.flusher_pid


class Flusher(pl.Callback):
    """Stops the flusher when a step begins after which a save is begun, and lets it go on in a later step."""

    def __init__(self, stop_at: int, go_on_at: int) -> None:
        self._stop_at, self._go_on_at = stop_at, go_on_at
        self.seen: dict[int, list[str]] = {}  # by step: files that are there when it ends

    def on_train_batch_start(self, trainer: pl.Trainer, module: Model, *_: object) -> None:
        if trainer.global_step == self._stop_at:
            trainer.strategy.checkpoint_io.wait()
            os.kill(flusher_pid(), signal.SIGSTOP)
        if trainer.global_step == self._go_on_at:
            self.seen[trainer.global_step] = names(Path(trainer.checkpoint_callback.dirpath))
            os.kill(flusher_pid(), signal.SIGCONT)

    def on_exception(self, *_: object) -> None:
        os.kill(flusher_pid(), signal.SIGCONT)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_training_goes_on_and_the_file_has_the_state_of_the_save(tmp_path, plugin, assert_same_state):
    """The state is three times the host cache, and nothing leaves it until the next step has begun."""
    was_open: list[bool] = []

    def watch(model: Model) -> None:
        step = model.trainer.global_step
        if step in (4, 6):
            was_open.append(open_savers()[0].fence.is_open)
            os.kill(flusher_pid(), signal.SIGCONT)

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step in (3, 5):
                plugin.wait()
                os.kill(flusher_pid(), signal.SIGSTOP)

    model = Model()
    model.watch = watch
    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=-1)
    make_trainer(tmp_path, 8, plugin, [keep, Stop()]).fit(model, batches())
    assert was_open == [True, True]
    assert names(tmp_path / "out") == [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6, 8)]
    for step in (2, 4, 6, 8):
        path = tmp_path / "out" / f"epoch=0-step={step}.ckpt"
        assert_same_state(torch.load(path, weights_only=True), model.references[str(step)])


def test_the_file_needs_neither_this_package_nor_its_trainer(tmp_path, plugin):
    model = Model(learning_rate=0.01)
    trainer = make_trainer(tmp_path, 2, plugin, [ModelCheckpoint(tmp_path / "out", every_n_train_steps=2)])
    trainer.fit(model, batches())
    path = trainer.checkpoint_callback.best_model_path
    loaded = Model.load_from_checkpoint(path)
    assert loaded.hparams.learning_rate == 0.01
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    code = (
        "import sys, torch\n"
        "found = torch.load(sys.argv[1], weights_only=True)\n"
        "assert found['global_step'] == 2 and len(found['optimizer_states'][0]['state']) == 8\n"
        "assert not any(name.startswith(('datastates', 'lightning')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, path], check=True, timeout=60)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_older_files_go_and_the_link_moves_when_the_younger_one_is_there(tmp_path, plugin, save_last):
    flusher = Flusher(stop_at=3, go_on_at=5)
    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=1, save_last=save_last)
    make_trainer(tmp_path, 6, DataStatesCheckpointIO(host_cache_gb=2**-5), [keep, flusher]).fit(Model(), batches())
    assert flusher.seen == {5: ["epoch=0-step=2.ckpt", "last.ckpt"]}  # 4 is in flight; Lightning wanted 2 deleted
    assert names(tmp_path / "out") == ["epoch=0-step=6.ckpt", "last.ckpt"]
    assert os.path.islink(tmp_path / "out" / "last.ckpt") == (save_last == "link")
    assert torch.load(tmp_path / "out" / "last.ckpt")["global_step"] == 6


def test_a_link_never_dangles(tmp_path, plugin):
    """While the younger file is in flight the link points to the older one, which therefore stays."""
    seen = []

    class Look(Flusher):
        def on_train_batch_start(self, trainer, module, *args):
            if trainer.global_step == 5:
                seen.append(torch.load(tmp_path / "out" / "last.ckpt")["global_step"])
            super().on_train_batch_start(trainer, module, *args)

    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=1, save_last="link")
    callbacks = [keep, Look(stop_at=3, go_on_at=5)]
    make_trainer(tmp_path, 6, DataStatesCheckpointIO(host_cache_gb=2**-5), callbacks).fit(Model(), batches())
    assert seen == [2]
    assert torch.load(tmp_path / "out" / "last.ckpt")["global_step"] == 6


def test_the_best_files_stay(tmp_path, plugin):
    """As Lightning decides it, by the same names as with its own plugin: the table of the survivors is the same."""

    class Scored(Model):
        scores = (5.0, 1.0, 3.0, 2.0, 4.0, 1.0)

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("metric", self.scores[self.trainer.global_step])
            return loss

    kept = {}
    for name, io in (("ours", plugin), ("theirs", None)):
        options = {"filename": "model", "monitor": "metric", "save_top_k": 2, "save_last": True}  # one name for all
        keep = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, **options)
        io = io or pl.plugins.io.TorchCheckpointIO()
        make_trainer(tmp_path, 6, io, [keep]).fit(Scored(), batches())
        steps = {file: torch.load(tmp_path / name / file)["global_step"] for file in names(tmp_path / name)}
        kept[name] = steps, os.path.basename(keep.best_model_path), keep.best_model_score.item()
    assert kept["ours"] == kept["theirs"]
    assert len(kept["ours"][0]) == 3


@pytest.mark.parametrize("save_last", ["link", True])
def test_two_callbacks_in_one_folder_use_the_names_that_they_would_use(tmp_path, save_last):
    """Also that of a link whose file is in flight is taken, and that of a file that is to go is free."""
    found = {}
    for name, io in (
        ("ours", DataStatesCheckpointIO(host_cache_gb=CACHE)),
        ("theirs", pl.plugins.io.TorchCheckpointIO()),
    ):
        out = tmp_path / name
        options = {"monitor": "score", "save_last": save_last}
        callbacks = [
            ModelCheckpoint(out, filename=f"by-{step}-{{step}}", every_n_train_steps=step, **options) for step in (2, 3)
        ]
        torch.manual_seed(3)  # the score is that of the training
        make_trainer(tmp_path, 6, io, callbacks).fit(Model(), batches())
        steps = {file: torch.load(out / file)["global_step"] for file in names(out)}
        links = {file: os.readlink(out / file) for file in names(out) if os.path.islink(out / file)}
        found[name] = steps, links, [os.path.basename(callback.last_model_path) for callback in callbacks]
    assert found["ours"] == found["theirs"]


def test_weights_of_before_the_step_are_saved_with_manual_optimization(tmp_path, plugin):
    """Lightning puts them into the model for the save, and the others back right after it."""

    class Manual(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, WIDTH)
            self.automatic_optimization = False
            self.saved_models: dict[int, dict[str, torch.Tensor]] = {}

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            self.saved_models[index] = {name: value.clone() for name, value in self.layer.state_dict().items()}
            loss = self.layer(batch).square().mean()
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model = Manual()
    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=-1)
    make_trainer(tmp_path, 6, plugin, [keep]).fit(model, batches())
    for step in (2, 4, 6):
        found = torch.load(tmp_path / "out" / f"epoch=0-step={step}.ckpt")["state_dict"]
        assert torch.equal(found["layer.weight"], model.saved_models[step - 1]["weight"])


def test_last_and_best_are_found_at_once(tmp_path, plugin):
    model = Model()
    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=1, monitor="score", save_last=True)
    trainer = make_trainer(tmp_path, 4, plugin, [keep])
    trainer.fit(model, batches())
    assert open_savers() == []
    (result,) = trainer.test(model, batches(count=1), ckpt_path="best", verbose=False)
    expected = torch.load(keep.best_model_path)["state_dict"]["layers.0.weight"].sum().item()
    assert result["weight"] == pytest.approx(expected)
    again = make_trainer(tmp_path, 6, plugin, [ModelCheckpoint(tmp_path / "out", save_last=True)])
    again.fit(Model(), batches(), ckpt_path="last")
    assert again.ckpt_path == str(tmp_path / "out" / "last.ckpt")
    trainer.save_checkpoint(tmp_path / "final.ckpt")  # outside of training: there when the call returns
    assert torch.load(tmp_path / "final.ckpt")["global_step"] == 4
    plugin.teardown()


def test_callbacks_that_write_to_the_weights(tmp_path, plugin, assert_same_state):
    """Averaged weights take the place of the others during validation, before the optimizer steps again."""

    class Validated(Model):
        def validation_step(self, batch, index):
            self.log("unused", batch.sum())

    model = Validated()
    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=-1)
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer = make_trainer(tmp_path, 4, plugin, [EMAWeightAveraging(decay=0.5), keep], **options)
    trainer.fit(model, batches(), batches(count=1))
    for step in (2, 4):
        found = torch.load(tmp_path / "out" / f"epoch=0-step={step}.ckpt", weights_only=True)
        reference = model.references[str(step)]
        assert "current_model_state" in found
        assert_same_state(found["state_dict"], reference["state_dict"])
        assert_same_state(found["current_model_state"], reference["current_model_state"])


def test_what_is_lost_is_raised_at_the_end_and_what_was_there_stays(tmp_path, small_disk):
    """The disk is full when the second one is saved."""
    disk = small_disk(20 << 20)  # one checkpoint has 9.8 MiB
    keep = ModelCheckpoint(disk / "out", every_n_train_steps=2, save_top_k=1)

    class Fill(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 3:
                open_savers()[0].settle()
                (disk / "ballast").write_bytes(bytes(8 << 20))

    model = Model()
    trainer = make_trainer(tmp_path, 6, DataStatesCheckpointIO(host_cache_gb=CACHE), [keep, Fill()])
    with pytest.raises(DataStatesError, match="step=6"):
        trainer.fit(model, batches())
    assert list(model.losses) == [1, 2, 3, 4, 5, 6]  # the training went on
    assert names(disk / "out") == ["epoch=0-step=2.ckpt"]
    assert torch.load(disk / "out" / "epoch=0-step=2.ckpt")["global_step"] == 2
    assert open_savers() == []


def test_what_is_lost_is_raised_also_where_the_training_is_a_second_try(tmp_path, small_disk):
    """An exception is being handled all the time, and has nothing to do with this run."""
    disk = small_disk(5 << 20)  # one checkpoint has 9.8 MiB
    keep = ModelCheckpoint(disk / "out", every_n_train_steps=2)
    trainer = make_trainer(tmp_path, 2, DataStatesCheckpointIO(host_cache_gb=CACHE), [keep])
    try:
        raise MemoryError("too large a batch")
    except MemoryError:
        with pytest.raises(DataStatesError, match="step=2"):
            trainer.fit(Model(), batches())
    assert open_savers() == []


def test_an_exception_of_the_training_is_the_one_that_is_raised(tmp_path):
    class Failing(Model):
        def on_train_batch_start(self, batch, index):
            if self.trainer.global_step == 3:
                raise ArithmeticError("mine")

    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=2)
    callbacks = [keep, OnExceptionCheckpoint(tmp_path / "emergency")]
    trainer = make_trainer(tmp_path, 6, DataStatesCheckpointIO(host_cache_gb=CACHE), callbacks)
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.fit(Failing(), batches())
    assert torch.load(tmp_path / "emergency" / "on_exception.ckpt")["global_step"] == 3
    assert torch.load(tmp_path / "out" / "epoch=0-step=2.ckpt")["global_step"] == 2


def test_a_job_that_is_requeued_finds_its_file(tmp_path, plugin):
    """Lightning takes whatever has this in its name for such a file, and the digits in it for its number."""
    plugin.save_checkpoint({"state_dict": {"weight": torch.ones(100_000)}}, tmp_path / "hpc_ckpt_3.ckpt")
    assert os.listdir(tmp_path) == ["hpc_ckpt_3.ckpt"]
    assert torch.load(tmp_path / "hpc_ckpt_3.ckpt")["state_dict"]["weight"].sum() == 100_000


def test_leftovers_of_a_run_that_died_are_removed(tmp_path, plugin):
    leftover = tmp_path / ".epoch=0-step=1.ckpt.0123456789ab-1.datastates.partial"
    leftover.write_bytes(b"half")
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "model.ckpt")
    assert os.listdir(tmp_path) == ["model.ckpt"]


def test_what_it_refuses(tmp_path, plugin):
    with pytest.raises(ConfigError, match="safetensors"):
        DataStatesCheckpointIO(format="safetensors")
    with pytest.raises(ConfigError, match="when_busy"):
        DataStatesCheckpointIO(when_busy="skip")
    with pytest.raises(ConfigError, match="this plugin saves lone files"):
        DataStatesCheckpointIO(tiers=[tmp_path, tmp_path.parent / "far"])
    with pytest.raises(ConfigError, match="did you mean 'num_writers'"):
        DataStatesCheckpointIO(num_writer=3)
    with pytest.raises(ValueError, match=r"memory://.* is not in a local file system"):
        plugin.save_checkpoint({}, "memory://bucket/model.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "model.ckpt", {"key": 1})
    with pytest.raises(CheckpointNotFoundError, match="absent"):
        plugin.load_checkpoint(tmp_path / "absent.ckpt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="asynchronous by itself"):
        make_trainer(tmp_path, 2, AsyncCheckpointIO(plugin), [ModelCheckpoint(every_n_train_steps=1)]).fit(
            Model(), batches()
        )


def test_the_other_package_knows_it_too(tmp_path):
    """``pytorch_lightning`` has classes of its own."""
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "import pytorch_lightning as pl, torch\n"
        "from datastates.integrations.lightning import DataStatesCheckpointIO\n"
        "assert 'lightning' not in sys.modules\n"
        "class Model(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(300, 300)\n"
        "    def training_step(self, batch, index): return self.layer(batch).square().mean()\n"
        "    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())\n"
        "keep = pl.callbacks.ModelCheckpoint('out', every_n_train_steps=2, save_last='link')\n"
        "trainer = pl.Trainer(max_steps=4, plugins=[DataStatesCheckpointIO(host_cache_gb=2**-8)], callbacks=[keep],\n"
        "    logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator='cpu')\n"
        "trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 300), batch_size=2))\n"
        "assert torch.load('out/last.ckpt')['global_step'] == 4\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)
    assert names(tmp_path / "out") == ["epoch=0-step=4.ckpt", "last.ckpt"]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Has imported Lightning once."""
    server = ForkServer(RUNS)
    yield server
    server.close()


def losses(folder: Path, name: str, rank: int = 0) -> dict[int, str]:
    text = (folder / f"losses-{name}-{rank}.json").read_text()
    return {int(step): loss for step, loss in json.loads(text).items()}


@pytest.mark.leaves_partial_files
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_job_resumes_to_the_same_losses(server, tmp_path, num_ranks):
    def start(folder: Path, resume: str, wait_after: int):
        return server.start(
            f"{RUNS}:train", folder, resume, wait_after, 8, num_ranks, folder=folder, num_ranks=num_ranks
        )

    try:
        whole = start(tmp_path / "whole", "", 0)
        job = start(tmp_path, "", 5)
        job.wait_announced(60)
        job.kill()
        whole.wait(60)
        start(tmp_path, "last", 0).wait(60)
    finally:
        server.kill_all()
    for rank in range(num_ranks):
        expected, resumed = losses(tmp_path / "whole", "whole", rank), losses(tmp_path, "resumed", rank)
        first = min(resumed)
        assert first in (3, 5)  # 4 was durable in time, or not
        assert {step: expected[step] for step in resumed} == resumed
        assert max(resumed) == 8
        killed = losses(tmp_path, "killed", rank)
        assert killed == {step: expected[step] for step in range(1, 6)}
    state = torch.load(tmp_path / "out" / "last.ckpt")  # a link to the best one: no other was saved since
    assert state["callbacks"][next(iter(state["callbacks"]))]["best_model_path"] == os.path.realpath(
        tmp_path / "out" / "last.ckpt"
    )
