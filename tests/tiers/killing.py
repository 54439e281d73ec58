"""SIGKILL of a flusher in the middle of an upload: what is left, and what the next start makes of it."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from datastates.manifest import COMMIT_NAME, METADATA_NAME, CommitRecord
from datastates.tier_settings import read_tiers
from flusher.rig import TIMEOUT, Rig, eventually
from tiers.checkpoints import make_checkpoint
from tiers.object_server import BUCKET, Request, Server, running_server

URL = f"s3://{BUCKET}/run"
SIZES = (17 << 20, 1000, 0)
"""Of the files of a checkpoint: two parts, the first one of 16 MiB, and two single requests."""

_COMMIT = f"/{METADATA_NAME}/{COMMIT_NAME}"

STAGES: dict[str, Callable[[Request], bool]] = {
    "before the upload": lambda request: request.method == "POST" and "uploads" in request.query,
    "at a part": lambda request: request.is_part,
    "before completion": lambda request: request.method == "POST" and "uploadId" in request.query,
    "before the manifest": lambda request: request.method == "PUT" and "/rank-" in request.path,
    "before the commit": lambda request: request.method == "PUT" and request.path.endswith(_COMMIT),
    "before latest": lambda request: request.method == "PUT" and request.path.endswith("/latest"),
}
"""What a request looks like that is never answered, because who sent it gets SIGKILL then."""


@dataclass
class Snapshot:
    """What is in the bucket at the moment of the kill."""

    objects: dict[str, bytes] = field(default_factory=dict)

    def take(self, server: Server) -> None:
        self.objects = {key: server.get(key) for key in server.names("run/")}

    def problems(self) -> list[str]:
        """What a reader of the bucket could fall over: a record without its files, a ``latest`` without a record."""
        found = []
        complete = set()
        for key, data in self.objects.items():
            if not key.endswith(_COMMIT):
                continue
            name = key[: -len(_COMMIT)]
            record = CommitRecord.from_bytes(data, key)
            sizes = {file: len(self.objects.get(f"{name}/{file}", b"")) for file in record.file_nbytes}
            found += [] if sizes == dict(record.file_nbytes) else [f"{name} is committed, and has {sizes}"]
            complete.add(name.rpartition("/")[2])
        latest = self.objects.get("run/latest")
        if latest is not None and latest.decode() not in complete:
            found.append(f"latest names {latest!r}, complete are {complete}")
        return found


def kill_round(server: Server, root: Path, stage: str, number: int, *, whole_job: bool) -> list[str]:
    """Carry step 1, kill while step 2 is carried, go on. Returns what is wrong: nothing, as a rule.

    Args:
        server: with an empty bucket; its environment is this process's.
        root: the first tier, empty.
        stage: of `STAGES`.
        number: the how-manieth of such requests is the one.
        whole_job: the trainer is gone by then, and another one goes on; otherwise it starts another flusher by itself.
    """
    tiers = read_tiers([root, URL])
    make_checkpoint(root, "step1", (1000,))
    with Rig(tiers=tiers):
        wait_carried(root, "step1")
    make_checkpoint(root, "step2", SIZES)
    snapshot = Snapshot()
    with Rig(tiers=tiers) as rig:
        pid = rig.client.pid
        arm(server, stage, number, lambda: _strike(server, pid, snapshot))
        if whole_job:
            rig.client.close(TIMEOUT)
        else:
            wait_carried(root, "step2")
    wait_ended(pid)
    if whole_job:
        with Rig(tiers=tiers):
            wait_carried(root, "step2")
    never = [] if snapshot.objects else [f"{stage}, {number}: such a request never came"]
    return never + snapshot.problems() + _end_problems(server, root)


def run_tier_kills(folder: Path, count: int, seed: int) -> dict[str, list[str]]:
    """So many rounds at stages by chance, on a server of its own. Returns what is wrong, by the round."""
    chance = random.Random(seed)
    found: dict[str, list[str]] = {}
    with running_server() as server:
        os.environ.update(server.environment)
        for index in range(count):
            server.reset()
            stage = chance.choice(list(STAGES))
            number = chance.choice((1, 2)) if stage == "at a part" else 1
            whole_job = chance.random() < 0.5
            problems = kill_round(server, folder / f"{index}", stage, number, whole_job=whole_job)
            if problems:
                found[f"round {index}, {stage} {number}, whole job {whole_job}"] = problems
            else:
                shutil.rmtree(folder / f"{index}")
    return found


def wait_carried(root: Path, name: str) -> None:
    """Wait until the first tier knows that a checkpoint is carried."""
    eventually(lambda: list((root / name / METADATA_NAME).glob("*/outcome-*.json")), f"{name} is carried")


def wait_ended(pid: int) -> None:
    """Wait for the end of a process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([descriptor], [], [], TIMEOUT)[0]:
            raise TimeoutError(f"process {pid} did not end")
    finally:
        os.close(descriptor)


def arm(server: Server, stage: str, number: int, strike: Callable[[], None]) -> None:
    """Let the server strike at a request, once, and lose it."""
    count = 0

    def trouble(request: Request) -> str | None:
        nonlocal count
        if "step2" not in request.path and stage != "before latest":
            return None
        count += STAGES[stage](request)
        if count != number or not STAGES[stage](request):
            return None
        strike()
        return "reset"

    server.trouble = trouble


def _strike(server: Server, pid: int, snapshot: Snapshot) -> None:
    os.kill(pid, signal.SIGKILL)
    snapshot.take(server)


def _end_problems(server: Server, root: Path) -> list[str]:
    """What is wrong when all should be carried."""
    end = Snapshot()
    end.take(server)
    problems = end.problems()
    for step in (1, 2):
        for path in (root / f"step{step}").glob("*.pt"):
            if end.objects.get(f"run/step{step}/{path.name}") != path.read_bytes():
                problems.append(f"{path.name} of step{step} is not what was saved")
    if end.objects.get("run/latest") != b"step2":
        problems.append(f"latest is {end.objects.get('run/latest')!r}")
    if server.uploads():
        problems.append(f"{server.uploads()} unfinished uploads stay")
    return problems
