"""`Checkpointer` in real processes: several ranks that act as one, SIGKILL in the middle of a training, signals."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

import datastates
from datastates.checkpointer import Checkpointer
from datastates.errors import ConfigError
from datastates.ranks import Ranks
from integrations.jobs import ForkServer
from integrations.ranks import free_port

OPTIONS = ["--host-cache-gb", 0.01, "--width", 64, "--save-interval", 5]


@pytest.fixture(scope="module")
def running_server():
    server = ForkServer("checkpointer_worker")
    yield server
    server.close()


@pytest.fixture
def server(running_server):
    """Starts jobs; ranks that a test leaves are killed when it ends."""
    yield running_server
    running_server.kill_all()


@pytest.fixture(scope="module")
def job(running_server, tmp_path_factory):
    """The output of a job of three ranks, and the folder that it has left."""
    folder = tmp_path_factory.mktemp("job")
    yield running_server.start("checkpointer_worker:act_as_one", folder, folder=folder, num_ranks=3).wait(120), folder
    running_server.kill_all()


def test_replicated_entries_are_written_once_and_loaded_by_any_number_of_ranks(job):
    _, folder = job
    parts = [torch.load(folder / "shared" / "step4" / f"rank-0000{rank}.pt")["model"] for rank in range(3)]
    names = [{name for name, value in part.items() if value is not None} for part in parts]
    assert len(set.union(*names)) == sum(map(len, names)) == len(parts[0])


@pytest.mark.parametrize(
    "case",
    [
        "all_fall_back_together",
        "what_was_not_the_same_is_not_loaded",
        "what_fails_on_one_rank_is_told_on_all_and_the_next_is_saved",
        "a_late_rank_and_one_that_fails_keep_nobody_from_saving",
        "a_load_that_fails_on_one_rank_fails_on_all",
        "different_steps_and_busy_ranks",
        "one_signal_ends_all_at_the_same_step",
    ],
)
def test_ranks_act_as_one(job, case):
    output, _ = job
    assert output.count(f"ok {case}\n") == 3


def losses(output, rank):
    return dict(re.findall(rf"rank {rank} step (\d+) loss (\S+)", output))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_example_is_killed_and_resumed_to_the_bit(server, tmp_path, num_ranks):
    def start(name, steps):
        arguments = [free_port(), *OPTIONS, "--steps", steps, "--directory", tmp_path / name]
        folder = tmp_path / f"log-{name}-{steps}"
        return server.start("checkpointer_worker:example", *arguments, folder=folder, num_ranks=num_ranks)

    killed = start("killed", 100_000)
    deadline = time.monotonic() + 60
    while "step 13 " not in killed.log():
        assert not killed.statuses, killed.log()
        assert time.monotonic() < deadline, killed.log()
        server.listen(0.01)
    killed.kill()
    last = max(int(number) for number in losses(killed.log(), 0))
    expected = start("whole", last + 20).wait()
    resumed = start("killed", last + 20).wait()
    step = int(re.search(r"resumed from .*/step(\d+)", resumed)[1])
    assert 5 <= step <= last
    for rank in range(num_ranks):
        whole = losses(expected, rank)
        assert len(whole) == last + 20
        assert losses(resumed, rank) == {number: loss for number, loss in whole.items() if int(number) > step}
        assert losses(killed.log(), rank).items() <= whole.items()


# ----------------------------------------------------------------------------------------------- signals


def test_signals_make_it_save_and_end(server, tmp_path):
    """Three of them, as schedulers send them, and to the flusher as well: it is of the same process group."""
    job = server.start("checkpointer_worker:end_at_a_signal", tmp_path / "run", folder=tmp_path, num_ranks=1)
    trainer, flusher = map(int, job.wait_announced()[0].split())
    os.kill(flusher, signal.SIGTERM)
    os.kill(trainer, signal.SIGTERM)
    os.kill(trainer, signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while job.wait_announced() != ["enough"]:  # a pending signal swallows another of its kind
        assert time.monotonic() < deadline, job.log()
        os.kill(trainer, signal.SIGTERM)
        server.listen(0.05)
    (tmp_path / "run-go").touch()
    output = job.wait()
    step = re.search(r"saved (\d+)", output)[1]
    assert (tmp_path / "run" / "latest").read_text() == f"step{step}"
    assert "s are left to save and to end" in output
    assert re.search(r"\d+ signals have come; the grace time runs from the first", output)


def test_a_grace_time_that_is_too_short_is_told_and_the_older_one_stays_the_latest(server, tmp_path):
    run = tmp_path / "run"
    job = server.start("checkpointer_worker:end_too_late", run, folder=tmp_path, num_ranks=1)
    output = job.wait()
    flusher = int(re.search(r"flusher (\d+)", output)[1])
    try:
        assert (run / "latest").read_text() == "step1"
        assert re.search(
            r"the grace time of 0\.5 s is over, and a save is not committed; .*step2: not committed", output
        )
    finally:
        os.kill(flusher, signal.SIGCONT)  # it finishes what was staged, without its trainer
    found = datastates.load_latest(run)
    with Checkpointer(run, host_cache_gb=2**-8, pin_host_cache=False) as checkpointer:
        assert checkpointer.load_latest().step == 2
    assert found.step in (1, 2)


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "run", host_cache_gb=2**-8, pin_host_cache=False) as checkpointer:
        yield checkpointer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grace_seconds": 31}, r"grace_seconds is 31, expected 0 to 30 s: so long the flusher process works on"),
        ({"grace_seconds": "1"}, "grace_seconds is '1'"),
        ({"signals": ()}, "signals is empty"),
        ({"signals": (signal.SIGKILL,)}, "signals has SIGKILL, which no process can handle"),
        ({"signals": (1000,)}, "signals has 1000, which is no signal"),
        ({"check_every": 0}, "check_every is 0"),
    ],
)
def test_a_wrong_argument_is_named(checkpointer, options, message):
    with pytest.raises(ConfigError, match=message), checkpointer.preemption(**options):
        pass


def test_handlers_of_the_user_are_called_and_put_back(checkpointer):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with pytest.raises(KeyError, match="training"), checkpointer.preemption() as preemption:
            assert not preemption.requested
            assert preemption.seconds_left is None
            signal.raise_signal(signal.SIGUSR1)
            assert preemption.requested
            raise KeyError("training")
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_ends_by_the_signal(checkpointer):
    """A worker of a pool, which inherits the handler, is ended by SIGTERM."""
    with checkpointer.preemption() as preemption:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                signal.pause()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not preemption.requested


# --------------------------------------------------------------------------------------------- the ranks


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", "gloo"])
def test_collectives_use_the_group_where_it_serves_the_host(monkeypatch, tmp_path, backend):
    made = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda *arguments, **options: made.append(options))
    torch.distributed.init_process_group(backend, f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks = Ranks.on_host()
    finally:
        torch.distributed.destroy_process_group()
    assert made == []
    assert (ranks.rank, ranks.size) == (0, 1)  # also when the group is gone


def test_a_backend_for_devices_gets_another_group_for_the_host(monkeypatch, tmp_path):
    made = []
    real = torch.distributed.new_group
    monkeypatch.setattr(
        torch.distributed,
        "new_group",
        lambda *arguments, **options: made.append(options) or real(*arguments, **options),
    )
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cuda:nccl")
        assert Ranks.on_host().any(True)
        assert Ranks.on_host(torch.distributed.group.WORLD).gather(3) == [3]
    finally:
        torch.distributed.destroy_process_group()
    assert [options["backend"] for options in made] == ["gloo", "gloo"]
