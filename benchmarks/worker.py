"""One measurement in a process of its own: ``python benchmarks/worker.py CASE NAME JSON``; prints one line of JSON.

CASE is one of `CASES`, NAME a way of `checkpointers.ALL`, a limit of `checkpointers.LIMITS` or ``none``, JSON the
case's parameters.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpointers
import torch
from checkpointers import Checkpointer, State, sync_folder

now = time.monotonic
Result = dict[str, Any]


def make_state(nbytes: int, num_tensors: int) -> State:
    """Float32 tensors of random bytes; sizes vary from one to seven where there are many."""
    generator = torch.Generator().manual_seed(0)
    mean = nbytes // num_tensors // 4
    state = {}
    for index in range(num_tensors):
        share = 0.25 + 1.5 * (index * 7919 % num_tensors) / num_tensors if num_tensors >= 1000 else 1.0
        state[f"layers.{index}.weight"] = torch.rand(max(int(mean * share), 1), generator=generator)
    return state


def change(state: State) -> None:
    """What an optimizer's step does: every tensor another value, in place, the last saved first."""
    tensors = list(state.values())[::-1]
    torch._foreach_add_(tensors, 1.0)


def digests(state: State) -> dict[str, str]:
    return {name: hashlib.blake2b(tensor.numpy(), digest_size=8).hexdigest() for name, tensor in state.items()}


def state_case(way: Checkpointer, given: dict[str, Any]) -> Result:
    """Saves of a state: one that does not count, then ``saves`` pairs, then one to look for torn tensors.

    Of each pair the first is followed by ``pass_seconds`` of an idle host, as a forward and backward pass on a device
    leaves it, and the change of the state (call, stall); the second is waited for at once (durable). Neither durable
    saves nor the look for torn tensors where ``only_blocked`` or ``only_durable`` leaves them out.
    """
    state = make_state(given["nbytes"], given["num_tensors"])
    root = Path(given["dir"])
    found: Result = {"call": [], "stall": [], "durable": [], "nbytes": sum(t.nbytes for t in state.values())}
    _save_durably(way, state, root)
    if given.get("only_durable"):
        found["durable"] = [_save_durably(way, state, root) for _ in range(given["saves"])]
        return found
    for _ in range(given["saves"]):
        folder = _settled(root)
        begin = now()
        handle = way.save(state, folder)
        found["call"].append(now() - begin)
        time.sleep(given["pass_seconds"])
        begin = now()
        way.wait_may_change(handle)
        found["stall"].append(now() - begin)
        change(state)
        way.wait_written(handle)
        if not given.get("only_blocked"):
            found["durable"].append(_save_durably(way, state, root))
    if given.get("only_blocked"):
        return found
    found["torn"] = _num_torn(way, state, root)
    return found


def _save_durably(way: Checkpointer, state: State, root: Path) -> float:
    folder = _settled(root)
    begin = now()
    way.wait_written(way.save(state, folder))
    sync_folder(folder)
    return now() - begin


def _num_torn(way: Checkpointer, state: State, root: Path) -> int:
    """How many tensors are not those of the moment of ``save``; the state changes as soon as it is said that it may."""
    expected, folder = digests(state), _empty(root)
    handle = way.save(state, folder)
    way.wait_may_change(handle)
    change(state)
    way.wait_written(handle)
    loaded = digests(way.load(folder, state))
    return sum(loaded.get(name) != digest for name, digest in expected.items())


def training_case(way: Checkpointer | None, given: dict[str, Any]) -> Result:
    """A GPT that trains on the CPU and is saved at every step, beside steps of the same process without saves."""
    step, state = _training(given["layers"], given["width"], given["vocabulary"], *given.get("tokens", (4, 256)))
    return _steps(way, given, lambda wait: step(wait), state)


def idle_case(way: Checkpointer | None, given: dict[str, Any]) -> Result:
    """As `training_case`, with a step that leaves the host idle for ``step_seconds``, as one on a device does."""
    tensors = make_state(given["nbytes"], 20)

    def step(wait: Callable[[], float]) -> float:
        time.sleep(given["step_seconds"])
        stall = wait()
        torch._foreach_add_(list(tensors.values())[:1], 1.0)
        return stall

    return _steps(way, given, step, lambda: tensors)


def _steps(
    way: Checkpointer | None,
    given: dict[str, Any],
    step: Callable[[Callable[[], float]], float],
    state: Callable[[], State],
) -> Result:
    """Steps without saves, then steps with one each, at most one checkpoint in flight, the newest two kept.

    Deleting older checkpoints is in none of a step's parts: who keeps them decides that. The first of the steps has no
    save in flight.
    """
    root = Path(given["dir"])
    step(lambda: 0.0)
    current = state()
    found: Result = {"nbytes": sum(t.nbytes for t in current.values()), "base": [], "steps": []}
    if way is not None:
        for _ in range(2):
            _save_durably(way, current, root)
    for _ in range(given["steps"]):
        begin = now()
        step(lambda: 0.0)
        found["base"].append(now() - begin)
    handle: Any = None
    first = now()
    for index in range(given["steps"]):
        begin = now()
        pending = handle
        stall = step(lambda pending=pending: 0.0 if pending is None or way is None else _wait(way, pending))
        computed = now()
        if way is not None:
            if handle is not None:
                way.wait_written(handle)
            begin_deleting = now()
            folder = _empty(root / str(index % 2))
            written = now()
            handle = way.save(state(), folder)
        else:
            begin_deleting = written = computed
        found["steps"].append(
            {
                "begin": begin - first,
                "compute": computed - begin - stall,
                "stall": stall,
                "behind": begin_deleting - computed,
                "call": now() - written,
            }
        )
    if way is not None:
        way.wait_written(handle)
    return found


def _wait(way: Checkpointer, handle: Any) -> float:
    begin = now()
    way.wait_may_change(handle)
    return now() - begin


def _training(
    layers: int, width: int, vocabulary: int, batch: int, length: int
) -> tuple[Callable[[Callable[[], float]], float], Any]:
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width),
        torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
        torch.nn.Linear(width, vocabulary),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, vocabulary, (batch, length + 1))

    def step(wait: Callable[[], float]) -> float:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        stall = wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return stall

    def state() -> State:
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    return step, state


def memory_case(way: Checkpointer, given: dict[str, Any]) -> Result:
    """Saves of a state far larger than the cache, for whoever samples this process's memory meanwhile.

    The way is made anew behind the begin, so that its cache and its processes count, and what it imports does not.
    """
    state = make_state(given["nbytes"], 40)
    way.close()
    gc.collect()
    print(json.dumps({"ready": now()}), flush=True)
    time.sleep(given["rest_seconds"])
    way = type(way)(given["cache_bytes"])
    windows = []
    for _ in range(given["saves"]):
        begin = now()
        _save_durably(way, state, Path(given["dir"]))
        windows.append([begin, now()])
    time.sleep(given["rest_seconds"])
    way.close()
    return {"nbytes": sum(t.nbytes for t in state.values()), "windows": windows}


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _settled(folder: Path) -> Path:
    """The folder, empty, when the disk has settled what was deleted, so that no save pays for it."""
    _empty(folder)
    os.sync()
    return folder


CASES: dict[str, Callable[[Any, dict[str, Any]], Result]] = {
    "state": state_case,
    "training": training_case,
    "idle": idle_case,
    "memory": memory_case,
}


def main() -> None:
    case, name, text = sys.argv[1:]
    given = json.loads(text)
    try:
        ways = {**checkpointers.ALL, **checkpointers.LIMITS}
        way = ways[name](given["cache_bytes"]) if name != "none" else None
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    result = CASES[case](way, given)
    if way is not None:
        way.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
