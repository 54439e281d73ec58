"""The measurements of the GPU check. Each takes `Settings`, runs in a process of its own, and gives plain values."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]

Found = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How large the measurements are.

    Attributes:
        is_simulated: tiny, on the CPU: shows that the script runs, and nothing else.
        folder: scratch for checkpoints, on the disk to be measured.
        seconds: how long a step may take; it leaves out rounds rather than be cut off.
    """

    is_simulated: bool
    folder: Path
    seconds: float

    @property
    def device(self) -> torch.device:
        kind = None if self.is_simulated else torch.accelerator.current_accelerator()
        return torch.device("cpu") if kind is None else torch.device(kind.type, 0)

    @property
    def nbytes(self) -> int:
        """Size of the states of the bandwidth measurements."""
        return 4 << 20 if self.is_simulated else 4 * GIB

    def rounds(self, count: int) -> int:
        return 1 if self.is_simulated else count

    @property
    def host_cache_gb(self) -> float:
        """Large enough for the training's whole state, as far as the machine's memory allows."""
        if self.is_simulated:
            return 2**-5
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / GIB
        return max(min(8.0, memory_gb / 4), 0.25)


def synchronize(settings: Settings) -> None:
    if settings.device.type != "cpu":
        torch.accelerator.synchronize()


def seconds_of(settings: Settings, work: Callable[[], object]) -> float:
    """Wall-clock time of some work, the device's part included."""
    synchronize(settings)
    begin = time.perf_counter()
    work()
    synchronize(settings)
    return time.perf_counter() - begin


def make_state(settings: Settings, num_tensors: int = 32) -> dict[str, torch.Tensor]:
    """Tensors of random bytes on the device."""
    count = settings.nbytes // num_tensors
    return {
        f"layers.{number}.weight": torch.randint(0, 256, (count,), dtype=torch.uint8, device=settings.device)
        for number in range(num_tensors)
    }


def tests(settings: Settings) -> Found:
    """The tests marked ``gpu``, and the same code against the model of a device."""
    report = settings.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", "--tb=short"]
    command += [
        "-W",
        "ignore::pytest.PytestConfigWarning",
        f"--junitxml={report}",
        f"--basetemp={settings.folder}/tests",
    ]
    command += ["tests/test_gpu.py"] if settings.is_simulated else ["tests/test_gpu.py", "tests/test_device_path.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=settings.seconds, check=False)
    if not report.exists():
        raise RuntimeError(
            f"the tests did not run, exit status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
        )
    cases = xml.etree.ElementTree.parse(report).getroot().iter("testcase")
    outcomes = {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}
    counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    failures = [name for name, outcome in outcomes.items() if outcome == "failed"]
    found: Found = {**counts, "failures": failures, "output_tail": done.stdout[-3000:] if failures else ""}
    if failures or done.returncode not in (0, 5):
        found["error"] = f"{len(failures)} tests failed, exit status {done.returncode}: {', '.join(failures)}"
    return found


def _outcome(case: xml.etree.ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def link(settings: Settings) -> Found:
    """Bytes per second from the device to host memory of three kinds, and of a whole save until it is staged."""
    from datastates.host_cache import HostCache
    from datastates.pinner import Pinner

    source = torch.empty(settings.nbytes // 4, dtype=torch.uint8, device=settings.device)
    is_cuda = settings.device.type == "cuda"
    pinned = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=is_cuda)
    found: Found = {"pinned_gib_s": _rate(settings, source, [pinned])}
    del pinned
    slab_bytes = min(16 << 20, source.numel() // 4)
    cache = HostCache(source.numel(), slab_bytes)
    cache.memory.fill_(0)
    slabs = list(cache.memory.split(slab_bytes))
    found["unregistered_slabs_gib_s"] = _rate(settings, source, slabs)
    if is_cuda:
        reserved: Future[None] = Future()
        reserved.set_result(None)
        pinner = Pinner(cache.memory, slab_bytes, reserved)
        begin = time.perf_counter()
        pinner.start(0)
        pinner.wait(None)
        found["pinning_gib_s"] = cache.nbytes / GIB / (time.perf_counter() - begin)
        found["pinned_bytes"] = pinner.num_pinned_bytes
        found["slabs_gib_s"] = _rate(settings, source, slabs)
        found["slabs_of_pinned"] = found["slabs_gib_s"] / found["pinned_gib_s"]
        pinner.close(None)
    del slabs
    cache.close()
    return {**found, **_staging(settings)}


def _rate(settings: Settings, source: torch.Tensor, targets: list[torch.Tensor]) -> float:
    """GiB per second of copies issued together, the median of five rounds."""

    def copy() -> None:
        begin = 0
        for target in targets:
            target.copy_(source[begin : begin + target.numel()], non_blocking=True)
            begin += target.numel()

    copy()
    return source.numel() / GIB / statistics.median(seconds_of(settings, copy) for _ in range(5))


def _staging(settings: Settings) -> Found:
    """A state of large tensors and one of many small ones: the call, until staged, until durable."""
    import datastates

    found: Found = {}
    options = {"host_cache_size": settings.host_cache_gb, "fast_cache_init": False}
    engine = datastates.CheckpointEngine(options, rank=0)
    try:
        small = {
            f"{n}": torch.full((256,), float(n), device=settings.device)
            for n in range(20 if settings.is_simulated else 5000)
        }
        for name, state in (("large", make_state(settings)), ("small", small)):
            nbytes = sum(tensor.nbytes for tensor in state.values())
            path = str(settings.folder / f"{name}.pt")
            engine.save(state, path)
            engine.wait(persist=True)
            synchronize(settings)
            begin = time.perf_counter()
            engine.save(state, path)
            called = time.perf_counter()
            engine.fence.close()
            fenced = time.perf_counter()
            engine.wait()
            staged = time.perf_counter()
            engine.wait(persist=True)
            found[name] = {
                "num_tensors": len(state),
                "nbytes": nbytes,
                "call_seconds": called - begin,
                "fence_seconds": fenced - called,
                "staged_seconds": staged - begin,
                "staged_gib_s": nbytes / GIB / (staged - begin),
                "durable_gib_s": nbytes / GIB / (time.perf_counter() - begin),
            }
    finally:
        engine.close()
    return found


def matmul(settings: Settings) -> Found:
    """How much longer matrix products take while a save leaves the device."""
    import datastates

    size = 64 if settings.is_simulated else 8192
    left, right = (torch.randn(size, size, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    state = make_state(settings)
    options = {"host_cache_size": settings.host_cache_gb, "fast_cache_init": False}
    engine = datastates.CheckpointEngine(options, rank=0)
    begin = time.perf_counter()
    try:
        path = str(settings.folder / "matmul.pt")
        engine.save(state, path)
        engine.wait()
        count = 4

        def products() -> None:
            for _ in range(count):
                torch.mm(left, right)

        products()
        while not settings.is_simulated and seconds_of(settings, products) < 0.1:  # about as long as the copies take
            count *= 2
        idle, busy = [], []
        while len(busy) < settings.rounds(7) and time.perf_counter() - begin < settings.seconds * 0.7:
            engine.wait(persist=True)
            idle.append(seconds_of(settings, products))
            engine.save(state, path)
            busy.append(seconds_of(settings, products))
        engine.wait(persist=True)
    finally:
        engine.close()
    ratio = statistics.median(busy) / statistics.median(idle)
    tflops = 2 * size**3 * count / statistics.median(idle) / 1e12
    return {
        "num_products": count,
        "idle_seconds": idle,
        "saving_seconds": busy,
        "slowdown": ratio,
        "idle_tflop_s": tflops,
    }


def training(settings: Settings) -> Found:
    """A GPT of about a billion parameters, saved in each way: time blocked, and time of a step with and without."""
    import model
    import ways

    job = model.Training(model.TINY if settings.is_simulated else model.BILLION, settings.device)
    job.warm_up()
    plain = [seconds_of(settings, lambda: (job.backward(), job.step())) for _ in range(8)]
    found: Found = {
        "num_parameters": job.num_parameters(),
        "nbytes": model.nbytes_of(job.state()),
        "sequences": job.sequences,
        "host_cache_gb": settings.host_cache_gb,
        "plain_step_seconds": plain,
        "ways": {},
    }
    share = (settings.seconds * 0.9) / len(ways.ALL)
    for make in ways.ALL:
        folder = settings.folder / "training"
        folder.mkdir(exist_ok=True)
        way = make(folder, settings.host_cache_gb)
        try:
            found["ways"][way.name] = _train_with(settings, job, way, share)
        except Exception as error:  # noqa: BLE001 - the other ways are measured nevertheless, and the error is shown
            found["ways"][way.name] = {"error": f"{type(error).__name__}: {error}"}
            found["error"] = f"{way.name}: {type(error).__name__}: {error}"
        finally:
            way.close()
    return found


def _train_with(settings: Settings, job: Any, way: Any, seconds: float) -> Found:
    """First saves apart from each other, then one at every step."""
    begin = time.perf_counter()
    rows: list[dict[str, float]] = []
    _step(settings, job, way, 0)
    way.finish()
    number = 1
    while number <= settings.rounds(5) and (number == 1 or time.perf_counter() - begin < seconds / 2):
        rows.append(_step(settings, job, way, number))
        first_durable = time.perf_counter()
        way.finish()
        rows[-1]["rest_seconds"] = time.perf_counter() - first_durable
        number += 1
    every: list[float] = []
    while len(every) < settings.rounds(5) and (not every or time.perf_counter() - begin < seconds * 0.8):
        every.append(_step(settings, job, way, number + len(every))["step_seconds"])
    finish_begin = time.perf_counter()
    way.finish()
    return {"lone": rows, "every_step_seconds": every, "last_finish_seconds": time.perf_counter() - finish_begin}


def _step(settings: Settings, job: Any, way: Any, number: int) -> dict[str, float]:
    synchronize(settings)
    begin = time.perf_counter()
    way.save(job.state(), number)
    called = time.perf_counter()
    job.backward()
    launched = time.perf_counter()
    way.hold()
    held = time.perf_counter()
    job.step()
    synchronize(settings)
    end = time.perf_counter()
    return {"call_seconds": called - begin, "hold_seconds": held - launched, "step_seconds": end - begin}


def loads(settings: Settings) -> Found:
    """Loads of one file to the device, its pages dropped from the page cache before each."""
    import ways

    import datastates

    state = make_state(settings)
    path = settings.folder / "loads.pt"
    torch.save(state, path)
    ways.sync(path)
    where = str(settings.device)
    methods: dict[str, Callable[[], Any]] = {
        "torch.load": lambda: torch.load(path, map_location=where, weights_only=True),
        "torch.load, mmap": lambda: torch.load(path, map_location=where, weights_only=True, mmap=True),
        "datastates.load": lambda: datastates.load(str(path), map_location=where),
    }
    found: Found = {"nbytes": settings.nbytes, "seconds": {name: [] for name in methods}}
    begin = time.perf_counter()
    while (
        len(found["seconds"]["datastates.load"]) < settings.rounds(4)
        and time.perf_counter() - begin < settings.seconds * 0.6
    ):
        for name, load in methods.items():
            _drop_pages(path)
            loaded: list[Any] = []
            found["seconds"][name].append(seconds_of(settings, lambda load=load, loaded=loaded: loaded.append(load())))
            if not all(torch.equal(loaded[0][key], tensor) for key, tensor in state.items()):
                raise RuntimeError(f"{name}: what was loaded is not what was saved")
    path.unlink()
    return found


def _drop_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


ALL: dict[str, tuple[Callable[[Settings], Found], float]] = {
    "tests": (tests, 130.0),
    "link": (link, 60.0),
    "matmul": (matmul, 50.0),
    "training": (training, 170.0),
    "loads": (loads, 50.0),
}
"""Steps in order, each with the seconds that it may take: together less than eight minutes."""
