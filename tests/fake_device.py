"""A model of an accelerator: queues that run in any order that events allow, and an allocator that reuses memory.

Stands in for a module such as ``torch.cuda``. Its tensors are host tensors over memory of the model. What is done to
them within ``runtime.stream(...)`` is not done at once: it waits in that stream's queue, by address, without keeping
the tensors alive. Memory that nobody holds any more is overwritten by the next work of the stream that it was taken
on, as a caching allocator's next tensor would; whoever still reads it on another stream reads that.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xEE
aten = torch.ops.aten


class Event:
    """As ``torch.cuda.Event``. One that was never recorded is an error here, and passes unseen in torch."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stream: Stream | None = None
        self._position = 0

    def record(self, stream: Stream) -> None:
        with self._runtime.condition:
            self._stream, self._position = stream, len(stream.queue)

    def query(self) -> bool:
        assert self._stream is not None, "an event that was never recorded"
        return self._stream.num_done >= self._position

    def synchronize(self) -> None:
        with self._runtime.condition:
            self._runtime.num_host_waits += 1
            assert self._runtime.condition.wait_for(self.query, 60), "the device never got there"


class Stream:
    """A queue of work in order. An entry is what to do, or an event to wait for."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.name = name
        self.queue: list[Callable[[], None] | Event] = []
        self.num_done = 0
        self._runtime = runtime

    def enqueue(self, entry: Callable[[], None] | Event) -> None:
        with self._runtime.condition:
            self.queue.append(entry)
            self._runtime.condition.notify_all()

    def wait_event(self, event: Event) -> None:
        assert event._stream is not None, "an event that was never recorded"
        self.enqueue(event)

    @property
    def is_runnable(self) -> bool:
        if self.num_done == len(self.queue):
            return False
        entry = self.queue[self.num_done]
        return not isinstance(entry, Event) or entry.query()


class Runtime:
    """What `datastates.cuda_runtime.runtime_of` finds for a device. Its work is done by `run`, on any thread."""

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.RLock())  # protects all queues
        self.streams: list[Stream] = []
        self.main = self.Stream()
        self.num_host_waits = 0
        self.capturing: Stream | None = None
        self.short_of_memory = 0
        self._local = threading.local()
        self._backing: list[Any] = []

    # --- what a module of torch offers

    def Stream(self, device: object = None) -> Stream:
        stream = Stream(self, f"stream {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def Event(self, blocking: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._local, "stream", None) or self.main

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            with _Deferred(self, stream):
                yield
        finally:
            self._local.stream = before

    def current_device(self) -> object:
        return getattr(self._local, "device", None)

    def set_device(self, device: torch.device) -> None:
        self._local.device = device.index

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing is not None and self.current_stream() is self.capturing

    # --- memory

    def empty(self, nbytes: int, stream: Stream | None = None) -> torch.Tensor:
        """Device memory, taken on a stream; what is in it before the first write is no secret of another tensor."""
        if self.short_of_memory > 0:
            self.short_of_memory -= 1
            raise torch.OutOfMemoryError("the model is out of memory")
        kind = ctypes.c_uint8 * max(nbytes, 1)
        backing = kind()
        self._backing.append(backing)
        address = ctypes.addressof(backing)
        ctypes.memset(address, POISON, nbytes)
        lent = kind.from_address(address)
        weakref.finalize(lent, self._freed, address, nbytes, stream or self.current_stream()).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8, count=nbytes)

    def _freed(self, address: int, nbytes: int, stream: Stream) -> None:
        stream.enqueue(lambda: ctypes.memset(address, POISON, nbytes) and None)

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        """Have the current stream fill a flat tensor, later."""
        address = tensor.data_ptr()
        assert tensor.is_contiguous() and tensor.nbytes == len(data)
        self.current_stream().enqueue(lambda: ctypes.memmove(address, data, len(data)) and None)

    # --- the device at work

    def step(self, choose: Callable[[list[Stream]], Stream]) -> bool:
        """Do one entry of a stream that can go on; False where none can."""
        with self.condition:
            runnable = [stream for stream in self.streams if stream.is_runnable]
            if not runnable:
                return False
            stream = choose(runnable)
            entry = stream.queue[stream.num_done]
            if not isinstance(entry, Event):
                entry()
            stream.num_done += 1
            self.condition.notify_all()
            return True

    @property
    def is_idle(self) -> bool:
        return all(stream.num_done == len(stream.queue) for stream in self.streams)


class Engine:
    """A thread that runs the device: of the streams that can go on it takes one by chance, or the favourite."""

    def __init__(self, runtime: Runtime, seed: int, favourite: Stream | None = None) -> None:
        self._runtime = runtime
        self._random = random.Random(seed)
        self._favourite = favourite
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="fake-device")

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._runtime.condition:
            self._is_ending = True
            self._runtime.condition.notify_all()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            if self._runtime.step(self._choose):
                continue
            with self._runtime.condition:
                if self._is_ending:
                    return
                self._runtime.condition.wait(0.05)

    def _choose(self, runnable: list[Stream]) -> Stream:
        return self._favourite if self._favourite in runnable else self._random.choice(runnable)


class _Deferred(TorchDispatchMode):
    """Puts the copies of the calling thread into a stream's queue; views pass, anything else is an error."""

    VIEWS = (aten.view, aten.as_strided, aten.detach, aten.slice, aten.select, aten.t, aten.transpose, aten.alias)

    def __init__(self, runtime: Runtime, stream: Stream) -> None:
        super().__init__()
        self._runtime = runtime
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in self.VIEWS:
            return func(*args, **(kwargs or {}))
        if packet is aten.empty:
            return self._runtime.empty(args[0][0], self._stream)
        if packet is aten.copy_:
            self._defer(args[0], [args[1]])
            return args[0]
        if packet is aten.clone:
            source = args[0]
            result = self._runtime.empty(source.numel() * source.itemsize, self._stream)
            result = result.view(source.dtype).view(source.shape)
            self._defer(result, [source])
            return result
        if packet is aten.cat:
            self._defer(kwargs["out"], args[0])
            return kwargs["out"]
        raise AssertionError(f"{func} on a stream of the model")

    def _defer(self, target: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """Copy the elements of the sources to the target, by address: no tensor is kept alive by a queue."""
        address, end = target.data_ptr(), 0
        assert target.is_contiguous()
        assert target.numel() * target.itemsize == sum(source.numel() * source.itemsize for source in sources)
        for source in sources:
            self._stream.enqueue(_copy_of(_Place(source), address + end))
            end += source.numel() * source.itemsize


class _Place:
    """Where a tensor's elements are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype
        self.shape, self.stride = tuple(tensor.shape), tensor.stride()
        self.nbytes = tensor.numel() * tensor.itemsize

    def read(self) -> bytes:
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        raw = (ctypes.c_uint8 * (span * self.dtype.itemsize)).from_address(self.address)
        whole = torch.frombuffer(raw, dtype=torch.uint8).view(self.dtype)
        flat = whole.as_strided(self.shape, self.stride).contiguous()
        return ctypes.string_at(flat.data_ptr(), self.nbytes)


def _copy_of(place: _Place, address: int) -> Callable[[], None]:
    return lambda: ctypes.memmove(address, place.read(), place.nbytes) and None
