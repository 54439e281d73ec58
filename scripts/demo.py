"""Train, kill, resume, compare: what datastates does, shown on this machine's CPUs in a few minutes.

Writes a table (``table.md``), a picture (``timeline.png``), the logs and the checkpoints to the folder
``demo-output``. Exit status 1 when the resumed run differs from the uninterrupted one in a single bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from demo_figure import draw
from demo_job import Job, JobFailed, wait_for_end
from demo_report import Run, committed_at, compare_curves, format_table, is_of_step, read_jsonl
from demo_tensors import compare_checkpoints

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "examples", "pretrain_gpt.py")
CONFIG = os.path.join(ROOT, "examples", "ds_config.json")
JOB_TIMEOUT_SECONDS = 1200.0  # a start is expected to take one or two minutes
FLUSHER_TIMEOUT_SECONDS = 60.0  # to finish or give up a save of some 100 MiB after its trainer is gone
NEEDED_FREE_BYTES = 4 * 2**30  # three runs of four checkpoints of 200 MiB, and room for another


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folder of one run, and the files in it."""

    folder: str

    def file(self, name: str) -> str:
        return os.path.join(self.folder, name)

    @property
    def checkpoints(self) -> str:
        return self.file("checkpoints")

    def checkpoint(self, step: int) -> str:
        return os.path.join(self.checkpoints, f"global_step{step}")

    def latest(self) -> str | None:
        """What the file ``latest`` says now; None where there is none."""
        try:
            with open(os.path.join(self.checkpoints, "latest"), encoding="utf-8") as file:
                return file.read().strip()
        except FileNotFoundError:
            return None

    def events(self) -> list[dict[str, object]]:
        folder = self.file("events")
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return [event for name in names for event in read_jsonl(os.path.join(folder, name))]


def main() -> int:
    arguments = parse_arguments()
    os.environ["DS_ACCELERATOR"] = "cpu"  # for the jobs, and for this process when it unpickles DeepSpeed's files
    output = os.path.abspath(arguments.output)
    os.makedirs(output, exist_ok=True)
    free = shutil.disk_usage(output).free
    if free < NEEDED_FREE_BYTES:
        print(f"demo: {output} has {free / 2**30:.1f} GiB free, {NEEDED_FREE_BYTES / 2**30:.0f} GiB are needed")
        return 1
    print(f"{arguments.processes} processes train a small GPT on this machine's CPUs, four times: some minutes in all.")
    uninterrupted = prepare(output, "uninterrupted", datastates=True)
    killed = prepare(output, "killed", datastates=True)
    plain = prepare(output, "torch-engine", datastates=False)
    try:
        say("1/4  Train without an interruption; datastates saves lazily.")
        run_to_end(uninterrupted, arguments)
        say("2/4  The same again, but the whole job gets SIGKILL in the middle of a save.")
        kill_in_a_save(killed, arguments)
        say("     Start it again, with the same command.")
        resume(killed, arguments)
        say("3/4  The same training with DeepSpeed's own checkpoint engine (torch.save), to compare.")
        durable_plain = run_with_torch_engine(plain, arguments)
        say("4/4  Compare.")
        report(output, load_run("datastates", uninterrupted), load_run("torch.save", plain, durable_plain))
        is_equal = compare(uninterrupted, killed, plain, arguments.steps)
    except JobFailed as failure:
        print(f"demo: FAILED: {failure}", file=sys.stderr)
        return 1
    say(f"Checkpoints, logs and records: {output}/{{uninterrupted,killed,torch-engine}}")
    return 0 if is_equal else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(ROOT, "demo-output"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model-size", default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.steps < 3 * arguments.save_interval:
        parser.error(
            "--steps must be at least three times --save-interval: one save to resume from, two to be killed in"
        )
    return arguments


def prepare(output: str, name: str, datastates: bool) -> Place:
    """An empty folder for a run, with its DeepSpeed config: the example's, with or without our section."""
    place = Place(folder=os.path.join(output, name))
    if os.path.isdir(place.folder):
        shutil.rmtree(place.folder)
    os.makedirs(place.folder)
    with open(CONFIG, encoding="utf-8") as file:
        config = json.load(file)
    if datastates:
        config["datastates_ckpt"]["events_dir"] = place.file("events")
    else:
        del config["datastates_ckpt"]
    with open(place.file("ds_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    return place


def start(place: Place, arguments: argparse.Namespace) -> Job:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(arguments.processes), SCRIPT),
        *("--deepspeed_config", place.file("ds_config.json")),
        *("--save", place.checkpoints, "--load", place.checkpoints),
        *("--save-interval", str(arguments.save_interval), "--steps", str(arguments.steps)),
        *("--model-size", arguments.model_size, "--batch", str(arguments.batch), "--seq", str(arguments.seq)),
        *("--loss-file", place.file("loss.jsonl"), "--metrics-file", place.file("metrics.jsonl")),
    ]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.processes)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_EXTENSIONS_DIR": os.path.join(os.path.dirname(place.folder), "torch-extensions"),
    }
    return Job(command, environment, place.file("log.txt"))


def run_to_end(place: Place, arguments: argparse.Namespace, on_poll: Callable[[], None] = lambda: None) -> None:
    def until() -> bool:
        on_poll()
        return False

    with start(place, arguments) as job:
        job.watch(until, JOB_TIMEOUT_SECONDS)
        job.check_success()
    on_poll()
    engines = {(record["checkpoint_engine"], record["datastates"]) for record in metrics(place, "start")}
    with open(place.file("ds_config.json"), encoding="utf-8") as file:
        wanted = "datastates_ckpt" in json.load(file)
    if {is_ours for _, is_ours in engines} != {wanted}:
        raise JobFailed(f"the checkpoint engine was to be {'datastates' if wanted else 'torch'}, it was {engines}")


def kill_in_a_save(place: Place, arguments: argparse.Namespace) -> None:
    """Start a run and kill it once a save was begun and not yet committed; not in the first save."""
    interval = arguments.save_interval
    candidates = list(range(2 * interval, arguments.steps + 1, interval))

    def is_in_a_save() -> bool:
        events = place.events() if candidates and os.path.isdir(place.checkpoint(candidates[0])) else []
        if not any(is_of_step(event, candidates[0]) for event in events):
            return False
        if place.latest() != f"global_step{candidates[0]}":
            return True
        print(f"    the save at step {candidates[0]} was committed before it could be interrupted: trying the next one")
        del candidates[0]
        return False

    with start(place, arguments) as job:
        if not job.watch(is_in_a_save, JOB_TIMEOUT_SECONDS):
            raise JobFailed(f"the job ended before it could be killed in a save\n{job.log_tail()}")
        latest, killed_at = place.latest(), time.monotonic()
        flushers = job.kill()
    wait_for_end(flushers, FLUSHER_TIMEOUT_SECONDS)
    step = candidates[0]
    committed = committed_at(place.events(), step)
    if committed is not None and committed < killed_at:
        raise JobFailed(f"the save at step {step} was committed before the kill: nothing was interrupted; run again")
    print(f"    SIGKILL to the launcher and every trainer, in the save at step {step}; `latest` said {latest}")
    after = place.latest()
    print(f"    {len(flushers)} flusher processes have ended by themselves since; `latest` says {after}")
    if after == latest:
        print("    the state had not been copied whole: that save was dropped, nothing half-written is left")
    else:
        print("    the state had been copied whole: the flushers committed it without the trainers")


def resume(place: Place, arguments: argparse.Namespace) -> None:
    latest = place.latest()
    run_to_end(place, arguments)
    steps = [record["step"] for record in metrics(place, "start")][-arguments.processes :]
    if latest is None or {f"global_step{step}" for step in steps} != {latest}:
        raise JobFailed(f"`latest` said {latest}, but the ranks resumed after the steps {steps}")


def run_with_torch_engine(place: Place, arguments: argparse.Namespace) -> dict[int, float]:
    """Train; make each checkpoint durable from outside, once all ranks have saved it. Returns when each was.

    That DeepSpeed has written `latest` is no sign: rank 0 does so while other ranks may still write their files.
    """
    durable: dict[int, float] = {}

    def make_durable() -> None:
        saved = [int(str(record["step"])) for record in metrics(place, "save_checkpoint")]
        for step in set(saved) - set(durable):
            if saved.count(step) == arguments.processes:
                fsync_checkpoint(place, step)
                durable[step] = time.monotonic()

    run_to_end(place, arguments, make_durable)
    return durable


def fsync_checkpoint(place: Place, step: int) -> None:
    folder = place.checkpoint(step)
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    for path in [*paths, folder, os.path.join(place.checkpoints, "latest"), place.checkpoints]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def metrics(place: Place, event: str) -> list[dict[str, object]]:
    return [record for record in read_jsonl(place.file("metrics.jsonl")) if record["event"] == event]


def load_run(engine: str, place: Place, durable: dict[int, float] | None = None) -> Run:
    events = place.events()
    saved = sorted({int(str(record["step"])) for record in metrics(place, "save_checkpoint")})
    if durable is None:
        durable = {step: end for step in saved if (end := committed_at(events, step)) is not None}
    if missing := set(saved) - set(durable):
        raise JobFailed(f"{engine}: the checkpoints of steps {sorted(missing)} were never durable, see {place.folder}")
    nbytes = {
        step: sum(entry.stat().st_size for entry in os.scandir(place.checkpoint(step)) if entry.is_file())
        for step in saved
    }
    return Run(
        engine=engine,
        metrics=read_jsonl(place.file("metrics.jsonl")),
        events=events,
        durable=durable,
        nbytes=nbytes,
    )


def report(output: str, *runs: Run) -> None:
    table = format_table(runs)
    notes = (
        "Durable: for datastates when the checkpoint was committed (written, fsynced and published, by all ranks); "
        "DeepSpeed's engine with torch.save makes nothing durable, so the demo fsynced its files from another process "
        "as soon as `save_checkpoint` had returned on all ranks.\n"
    )
    with open(os.path.join(output, "table.md"), "w", encoding="utf-8") as file:
        file.write(f"{table}\n{notes}")
    draw(runs, os.path.join(output, "timeline.png"))
    print(f"\n{table}\n{notes}")
    print(f"    table:   {os.path.join(output, 'table.md')}")
    print(f"    picture: {os.path.join(output, 'timeline.png')}")


def compare(uninterrupted: Place, killed: Place, plain: Place, last_step: int) -> bool:
    """Say whether the three runs are equal to the last bit: their loss curves, and the tensors they saved last."""
    is_equal = True
    reference = read_jsonl(uninterrupted.file("loss.jsonl"))
    for name, place in (("killed and resumed", killed), ("with torch.save", plain)):
        curve = read_jsonl(place.file("loss.jsonl"))
        differences = compare_curves(reference, curve)
        num_tensors, different = compare_checkpoints(uninterrupted.checkpoint(last_step), place.checkpoint(last_step))
        differences += [f"step {last_step}: {text}" for text in different]
        for difference in differences[:20]:
            print(f"    {difference}")
        verdict = "EQUAL to the last bit" if not differences else f"{len(differences)} DIFFERENCES"
        print(
            f"    the run {name} against the uninterrupted one: {verdict} "
            f"({len(curve)} losses, {num_tensors} tensors of the checkpoint at step {last_step})"
        )
        is_equal &= not differences
    return is_equal


def say(message: str) -> None:
    print(f"\n{message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
