"""What every test may use, and what no test may leave behind.

After each test nothing of ours may be left: no thread named ``datastates-*``, no process that it started (nor one
that such a process left behind), no memfd, Unix socket or pidfd, no mapping of a host cache, no ``.partial`` file.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SETTLE_SECONDS = 5.0  # what is closed may take a moment to vanish: a reaped child, a thread past its last statement

# Every process that a test starts inherits this, also when it outlives the one that started it.
RUN_MARK = f"DATASTATES_TEST_RUN={uuid.uuid4().hex}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compile-operators",
        action="store_true",
        help="compile what tests of DeepSpeed's offloading need and is not compiled yet: a quarter of an hour",
    )


def pytest_configure(config: pytest.Config) -> None:
    name, _, value = RUN_MARK.partition("=")
    os.environ[name] = value
    for variable in (
        "CI",
        "BUILD_NUMBER",
    ):  # with them pytest shows differences whole: minutes for two long byte strings
        os.environ.pop(variable, None)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # DeepSpeed compiles extensions on first use; a folder of this checkout alone, so that no two checkouts share a lock
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch-extensions"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
        pytest.skip("torch finds no accelerator")


# --- nothing is left behind


@dataclass(frozen=True)
class Belongings:
    """What this process holds at one moment, as far as a test may not leave it behind. Each entry can be printed."""

    threads: Counter[str]
    processes: Counter[str]
    descriptors: Counter[str]
    mappings: Counter[str]

    @classmethod
    def now(cls) -> Belongings:
        return cls(Counter(_threads()), Counter(_processes()), Counter(_descriptors()), Counter(_mappings()))

    def beyond(self, before: Belongings) -> dict[str, list[str]]:
        """What is here and was not in `before`, by kind; empty when nothing is."""
        extra = {kind.name: getattr(self, kind.name) - getattr(before, kind.name) for kind in fields(self)}
        return {kind: sorted(names.elements()) for kind, names in extra.items() if names}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.name.startswith("datastates"):
            yield f"{thread.name} (ident {thread.ident})"


def _processes() -> Iterator[str]:
    """Children, also those that ended and were not waited for, and all processes that carry the mark of this run."""
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        with contextlib.suppress(OSError):  # it ended between the listing and the look
            stat = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
            is_child = int(stat[1]) == own
            if is_child or RUN_MARK.encode() in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                command = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "multiprocessing.resource_tracker" not in command:  # Python's own, one per process, ends with it
                    yield f"{name}: {command.strip() or '(zombie)'}"


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            is_ours = re.match(r"/memfd:|anon_inode:\[pidfd\]|pidfd:", target) or ".partial" in target
            if is_ours or (target.startswith("socket:") and _is_unix_socket(int(name))):
                yield f"{name} -> {target}"


def _is_unix_socket(descriptor: int) -> bool:
    """Ours are; those of torch.distributed are not, and live as long as the process when DeepSpeed holds the group."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family == socket.AF_UNIX


def _mappings() -> Iterator[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if "/memfd:datastates" in line or ".partial" in line:
                yield line.strip()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind; see the head of this file."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    before = Belongings.now()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := Belongings.now().beyond(before):
        if time.monotonic() > deadline:
            pytest.fail(f"the test left behind: {left}")
        gc.collect()  # a mapping lives as long as a tensor over it, and a traceback may hold that one in a circle
        time.sleep(0.01)
    if folder is not None and not request.node.get_closest_marker("leaves_partial_files"):
        partial = partial_files(folder)
        assert partial == [], f"the test left partial files behind: {partial}"


@pytest.fixture
def belongings() -> Callable[[], Belongings]:
    """``belongings()``: what this process holds now; ``belongings().beyond(before)``: what it has got since."""
    return Belongings.now


def partial_files(directory: Path) -> list[str]:
    """Temporary files of saves below ``directory``."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.partial"))


# --- states to save


@pytest.fixture
def make_state() -> Callable[..., dict[str, Any]]:
    """``make_state(nbytes, num_tensors, seed, dtype, device)``: a state as training has it, the same for the same seed.

    ``nbytes`` is the size of the large tensors together, rounded down to whole elements. Beside them stand values
    that are no tensors, a 0-dim and an empty tensor, a tied pair and a view.
    """

    def make(
        nbytes: int = 1 << 20,
        num_tensors: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        count = nbytes // num_tensors // dtype.itemsize
        weights = {
            f"layers.{index}.weight": torch.randn(count, generator=generator).to(dtype).to(device)
            for index in range(num_tensors)
        }
        first = weights["layers.0.weight"]
        return {
            "module": {
                **weights,
                "tied": first,
                "view": first[: count // 2],
                "empty": torch.empty(0, 3, device=device),
            },
            "optimizer": {
                "state": {0: {"step": torch.tensor(7.0), "exp_avg": first + 1}},
                "param_groups": [{"lr": 0.1}],
            },
            "step": 7,
            "betas": (0.9, 0.95),
            "rng": torch.get_rng_state(),
            "none": None,
        }

    return make


@pytest.fixture
def assert_same_state() -> Callable[[object, object], None]:
    """``assert_same_state(found, expected)``: same nesting, types, keys in order, and tensors equal to the last bit."""
    return _assert_same


def _assert_same(found: Any, expected: Any, where: str = "state") -> None:
    assert type(found) is type(expected), f"{where}: found a {type(found)}, expected a {type(expected)}"
    if isinstance(expected, torch.Tensor):
        shape = (found.dtype, found.shape, found.requires_grad)
        assert shape == (expected.dtype, expected.shape, expected.requires_grad), where
        is_same = _raw(found) == _raw(expected)
        assert is_same, f"{where}: bytes differ"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{where}: keys differ"
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: lengths differ"
        for index, value in enumerate(expected):
            _assert_same(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, f"{where}: found {found!r}, expected {expected!r}"


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


# --- other processes


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_script(code, *arguments, timeout, expect, env)``: run Python code in a process of its own.

    Warnings are errors there. Gives its output, and fails the test with it when the exit status is not ``expect``
    (-9: SIGKILL) or the time is up; then the whole process group is killed. The current folder is ``tmp_path``.
    """
    count = 0

    def run(
        code: str, *arguments: object, timeout: float = 60.0, expect: int = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        nonlocal count
        count += 1
        script = tmp_path / f"script-{count}.py"
        script.write_text(code, encoding="utf-8")
        command = [sys.executable, "-W", "error", str(script), *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            pytest.fail(f"script did not end within {timeout} s; stdout:\n{stdout}\nstderr:\n{stderr}")
        if process.returncode != expect:
            pytest.fail(f"exit status {process.returncode}, expected {expect}; stdout:\n{stdout}\nstderr:\n{stderr}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run


# --- order of threads, without sleeping


class Gate:
    """Holds threads at a point of the test's choice: they call `hold`, the test `wait_held`, looks, and `open`s."""

    def __init__(self) -> None:
        self._held = threading.Event()
        self._opened = threading.Event()

    def hold(self, timeout: float = 30.0) -> None:
        """Stop here until the gate is opened. At once when it is open already."""
        self._held.set()
        if not self._opened.wait(timeout):
            raise TimeoutError(f"nobody opened the gate within {timeout} s")

    def wait_held(self, timeout: float = 10.0) -> None:
        """Wait until a thread has come to the gate."""
        if not self._held.wait(timeout):
            raise TimeoutError(f"no thread came to the gate within {timeout} s")

    @property
    def is_held(self) -> bool:
        """A thread has come to the gate, whether or not it has been opened since."""
        return self._held.is_set()

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def make_gate() -> Iterator[Callable[[], Gate]]:
    """``make_gate()``: a closed `Gate`. Opened when the test ends, whatever its end, so that no thread stays behind."""
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate())
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


@pytest.fixture
def gate(make_gate: Callable[[], Gate]) -> Gate:
    """One closed `Gate`."""
    return make_gate()


# --- a disk that gets full


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[int], Path]]:
    """``small_disk(nbytes)``: the folder of a file system of that size. Skips where mount is refused."""
    mounted: list[Path] = []

    def make(nbytes: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0755", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("a small file system is needed, and there is no mount command")
        if done.returncode != 0:
            pytest.skip(f"a small file system is needed, and mount refused: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    partial = [file for folder in mounted for file in partial_files(folder)]
    for folder in reversed(mounted):
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)
    if not request.node.get_closest_marker("leaves_partial_files"):
        assert partial == [], f"the test left partial files behind: {partial}"
