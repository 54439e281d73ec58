"""Loads to a device: slabs are reused when what they held has arrived, and nothing is left after a failure."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from datastates import load, reading, uploads
from datastates.errors import CorruptCheckpointError, GraphCaptureError
from datastates.formats import filling, plan, storages
from datastates.formats.request import Request
from datastates.formats.storages import Storages
from datastates.reading import BUFFER_BYTES, Digests, FileReader
from datastates.state import capture_host, default_is_eager
from datastates.uploads import DeviceLink, Ring, Upload, upload
from formats.images import image_of

TILE = 64 << 10
NBYTES = 40 * TILE + 123


class LazyMark:
    def __init__(self, link: LazyLink, position: int) -> None:
        self._link = link
        self._position = position

    def query(self) -> bool:
        return self._link.done >= self._position

    def synchronize(self) -> None:
        self._link.run(self._position)


class LazyLink:
    """A device that runs nothing of its queue before somebody waits for it: what is overwritten too early is seen."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.sent_nbytes = 0
        self.most_in_flight = 0
        self.locked: list[int] = []

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with self._guard:
            self.queue.append(lambda: destination.copy_(source))
            self.sent_nbytes += source.numel()
            self.most_in_flight = max(self.most_in_flight, len(self.queue) - self.done)

    def mark(self) -> LazyMark:
        return LazyMark(self, len(self.queue))

    def run(self, end: int) -> None:
        with self._guard:
            waiting, self.done = self.queue[self.done : end], max(self.done, end)
            for entry in waiting:
                entry()

    def lock(self, memory: torch.Tensor) -> bool:
        self.locked.append(memory.data_ptr())
        return True

    def unlock(self, memory: torch.Tensor) -> None:
        assert self.done == len(self.queue), "copies are still on their way from this memory"
        self.locked.remove(memory.data_ptr())


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    (tmp_path / "x").write_bytes(os.urandom(NBYTES))
    return str(tmp_path / "x")


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 64 KiB and three slabs, so that small files go around often."""
    monkeypatch.setattr(uploads, "TILE_BYTES", TILE)
    monkeypatch.setattr(reading, "TILE_BYTES", TILE)
    monkeypatch.setattr(uploads, "Ring", functools.partial(Ring, num_slabs=3))


def pieces(*cuts: int) -> list[Upload]:
    return [Upload(begin, end, torch.zeros(end - begin, dtype=torch.uint8)) for begin, end in itertools.pairwise(cuts)]


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("num_threads", [1, 8])
def test_no_slab_is_reused_before_its_copy_has_passed(path: str, num_threads: int) -> None:
    link, wanted = LazyLink(), pieces(100, 5000, 5001, 20 * TILE + 7, NBYTES - 10)
    content = pathlib.Path(path).read_bytes()
    digests, cuts = Digests(), [one.begin for one in wanted]
    with FileReader(path, num_threads=num_threads) as file:
        upload(file, wanted, link, digests, cuts)
    for one in wanted:
        assert one.destination.numpy().tobytes() == content[one.begin : one.end]
    assert digests.of(100, NBYTES - 10) is not None
    assert link.locked == [] and link.done == len(link.queue) > 35
    assert 1 < link.most_in_flight <= 2 + 3, "reads go on while copies are on their way, and no more than slabs"


@pytest.mark.usefixtures("small_slabs")
def test_a_file_that_ends_early_leaves_nothing_in_flight(path: str) -> None:
    link, wanted = LazyLink(), pieces(0, NBYTES)
    with FileReader(path) as file:
        os.truncate(path, 30 * TILE)
        with pytest.raises(CorruptCheckpointError, match=f"the file ends at {30 * TILE}"):
            upload(file, wanted, link)
    assert link.locked == [] and link.done == len(link.queue)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("what", ["send", "mark"])
def test_a_failing_device_leaves_no_locked_memory_and_nobody_waiting(path: str, what: str) -> None:
    class Failing(LazyLink):
        num_calls = 0

        def _fail(self) -> None:
            self.num_calls += 1
            if self.num_calls == 7:
                raise RuntimeError("device lost")

        def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
            if what == "send":
                self._fail()
            super().send(source, destination)

        def mark(self) -> LazyMark:
            if what == "mark":
                self._fail()
            return super().mark()

    link = Failing()
    with FileReader(path) as file, pytest.raises(RuntimeError, match="device lost"):
        upload(file, pieces(0, NBYTES), link)
    assert link.locked == [] and link.done == len(link.queue)


def test_a_copy_that_fails_on_the_device_is_raised_by_the_wait_for_it(path: str) -> None:
    link, wanted = LazyLink(), [Upload(0, NBYTES, torch.zeros(NBYTES - 1, dtype=torch.uint8))]
    with FileReader(path) as file, pytest.raises(RuntimeError, match="size of tensor"):
        upload(file, wanted, link)
    assert link.locked == []


def test_the_ring_takes_less_than_the_promised_memory() -> None:
    assert uploads.NUM_SLABS * BUFFER_BYTES <= 60 << 20


# --- whole loads, with the host in the place of the device


def make_state() -> dict[str, Any]:
    return {
        "w": torch.arange(200_000).float(),
        "tied": torch.arange(3),
        "half": torch.arange(70_001).bfloat16(),
        "empty": torch.empty(0, 3),
        "view": torch.arange(90).view(9, 10)[2:5],
        "n": 3,
    }


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> LazyLink:
    made = LazyLink()
    monkeypatch.setattr(uploads, "TILE_BYTES", TILE)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(storages, "link_to", lambda _device: made)
    monkeypatch.setattr(filling, "link_to", lambda _device: made)
    return made


@pytest.fixture(params=["torch", "safetensors"])
def state_path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "x"
    path.write_bytes(image_of(plan(make_state(), request.param, capture_host, default_is_eager(100))))
    return path


FORMS: dict[str, Any] = {
    "none": None,
    "a-string": "cpu",
    "a-device": torch.device("cpu"),
    "a-dictionary": {"cpu": "cpu"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_every_form_of_map_location_that_names_a_device(
    state_path: pathlib.Path,
    form: str,
    weights_only: bool,
    link: LazyLink,
    monkeypatch: pytest.MonkeyPatch,
    assert_same_state: Any,
) -> None:
    locations = []
    original = Request.device_of

    def device_of(request: Request, location: str) -> torch.device:
        assert original(request, location) is None  # the host is no accelerator
        locations.append(location)
        return torch.device("cpu")

    monkeypatch.setattr(Request, "device_of", device_of)
    found = load(state_path, FORMS[form], weights_only=weights_only)
    assert_same_state(found, make_state())
    assert link.sent_nbytes >= 200_000 * 4 + 70_001 * 2
    assert link.locked == [] and set(locations) == {"cpu"}
    assert_same_state(load(state_path, FORMS[form], keys=["half", "n"]), {"half": make_state()["half"], "n": 3})


def test_a_function_gets_storages_of_the_host(state_path: pathlib.Path, link: LazyLink) -> None:
    seen = []
    load(state_path, lambda storage, location: seen.append((storage.device.type, location)))
    assert set(seen) == {("cpu", "cpu")} and link.queue == []


def test_which_device_a_storage_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = []

    def restore(map_location: Any) -> Callable[[torch.UntypedStorage, str], Any]:
        def place(_storage: torch.UntypedStorage, location: str) -> torch.Tensor:
            target = map_location.get(location, location) if isinstance(map_location, dict) else map_location
            restored.append(target or location)
            return torch.empty(0, device=torch.device("meta") if restored[-1] == "meta" else "cpu")

        return place

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.serialization, "_get_restore_location", restore)
    for map_location in (None, "cuda:1", {"cuda:0": "cuda:3"}, {"cuda:0": "meta"}):
        assert Request(map_location, True).device_of("cuda:0") is None
    assert Request(lambda storage, _location: storage, True).device_of("cuda:0") is None
    assert restored == ["cuda:0", "cuda:1", "cuda:3", "meta"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert Request("cuda:1", True).device_of("cuda:0") is None and len(restored) == 4


def test_damage_is_found_before_the_load_returns(
    tmp_path: pathlib.Path, link: LazyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    data = bytearray(image_of(plan(make_state(), "torch", capture_host, default_is_eager(100))))
    data[data.index(torch.arange(200_000).float().numpy().tobytes()) + 300_000] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(Request, "device_of", lambda *_: torch.device("cpu"))
    with pytest.raises(CorruptCheckpointError, match="w is damaged"):
        load(path)
    assert link.locked == [] and link.sent_nbytes > 0


def test_targets_on_a_device_are_filled_through_the_slabs(
    state_path: pathlib.Path, link: LazyLink, monkeypatch: pytest.MonkeyPatch, assert_same_state: Any
) -> None:
    def is_sendable(source: filling.FileTensor, target: torch.Tensor) -> bool:
        return source.dtype is target.dtype and target.is_contiguous()

    monkeypatch.setattr(filling, "_is_same_memory", lambda *_: False)
    monkeypatch.setattr(filling, "_is_sendable", is_sendable)
    targets = {name: torch.zeros_like(value) for name, value in make_state().items() if name != "n"}
    targets["half"] = targets["half"].float()  # is converted
    versions = {name: target._version for name, target in targets.items()}
    found = load(state_path, into=targets)
    assert found.state["w"] is targets["w"] and link.sent_nbytes >= 200_000 * 4
    assert all(target._version > versions[name] for name, target in targets.items())
    expected = make_state()
    assert_same_state(targets, {**{name: expected[name] for name in targets}, "half": expected["half"].float()})


# --- the link to a real device, on a runtime that writes down what it is told


class Runtime:
    """Stands in for ``torch.cuda``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_recording = False

    def Stream(self, device: torch.device) -> RecordedStream:
        return RecordedStream(self, "ours")

    def Event(self, **_options: bool) -> RecordedEvent:
        return RecordedEvent(self)

    def current_stream(self, _device: torch.device) -> RecordedStream:
        return RecordedStream(self, "current")

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        self.calls.append(f"enter {stream.name}")
        yield
        self.calls.append(f"leave {stream.name}")

    @contextlib.contextmanager
    def device(self, _device: torch.device) -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.is_recording


class RecordedStream:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def wait_event(self, event: RecordedEvent) -> None:
        self._runtime.calls.append(f"{self.name} waits for {event.stream}")


class RecordedEvent:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.stream = ""

    def record(self, stream: RecordedStream) -> None:
        self.stream = stream.name
        self._runtime.calls.append(f"mark {stream.name}")


def test_copies_go_on_a_stream_of_their_own_behind_what_was_there() -> None:
    runtime, destination = Runtime(), torch.zeros(8, dtype=torch.uint8)
    made = DeviceLink(torch.device("xpu:0"), runtime)
    made.send(torch.ones(8, dtype=torch.uint8), destination)
    assert made.mark() is not None
    assert runtime.calls == [
        "mark current",
        "ours waits for current",
        "enter ours",
        "leave ours",
        "mark ours",
    ]
    assert bool((destination == 1).all()) and made.lock(destination) is False


def test_no_load_while_a_graph_is_recorded() -> None:
    runtime = Runtime()
    runtime.is_recording = True
    with pytest.raises(GraphCaptureError):
        DeviceLink(torch.device("xpu:0"), runtime)
    assert runtime.calls == []


def test_inference_tensors_are_filled_as_well() -> None:
    with torch.inference_mode():
        destination = torch.zeros(8, dtype=torch.uint8)
    uploads.BlockingLink().send(torch.ones(8, dtype=torch.uint8), destination)
    assert bool((destination == 1).all())


def test_a_device_without_room_is_not_taken_for_a_damaged_file(
    state_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Storages, "read", lambda *_, **__: full())
    with pytest.raises(torch.OutOfMemoryError):
        load(state_path)
