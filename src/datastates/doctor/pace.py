"""How often a job can save, and how large a host cache hides a save.

A save is sustainable when it is durable before the next one begins. It is hidden when training does not wait for it:
what does not fit the host cache must have been written before the next optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datastates.advice import HEADROOM
from datastates.config import GIB
from datastates.doctor.findings import Finding, good, warning, wrong
from datastates.figures import figure

_FULL, _HALF = 4, 2  # bytes of a float32, and of a float16 or bfloat16


@dataclass(frozen=True, slots=True)
class Load:
    """What one machine saves.

    Attributes:
        state_nbytes: one checkpoint of the whole job.
        num_ranks: processes of this machine.
        num_nodes: machines of the job, all alike.
    """

    state_nbytes: int
    num_ranks: int
    num_nodes: int = 1

    @property
    def node_nbytes(self) -> int:
        return -(-self.state_nbytes // self.num_nodes)

    @property
    def rank_nbytes(self) -> int:
        return -(-self.node_nbytes // self.num_ranks)


def state_nbytes(num_params: int, config: Mapping[str, Any]) -> int:
    """The size of a checkpoint of a model that is trained with Adam or AdamW under this DeepSpeed config.

    float32 weights and both moments are 12 bytes per parameter. With bf16 or fp16 the 16-bit weights come to that,
    except under ZeRO-3, whose model files hold no weights.

    Source: deepspeed 0.19.8, runtime/zero/stage3.py and stage_1_and_2.py, ``state_dict``.
    """
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    is_mixed = any(isinstance(config.get(name), Mapping) and config[name].get("enabled") for name in ("bf16", "fp16"))
    return num_params * (3 * _FULL + (_HALF if is_mixed and stage != 3 else 0))


def pace_findings(
    load: Load, nbytes_per_second: float, host_cache_bytes: int | None, step_seconds: float | None
) -> Iterator[Finding]:
    """What interval is sustainable at this rate, and whether the cache hides a save.

    Args:
        load: what is saved.
        nbytes_per_second: of durable writes, for all ranks of this machine together.
        host_cache_bytes: of one rank, None where it is not known.
        step_seconds: how long a training step takes, None where it is not known.
    """
    durable = load.node_nbytes / nbytes_per_second
    seconds = durable * HEADROOM
    message = f"a checkpoint of {figure(load.state_nbytes / GIB)} GiB is durable {figure(durable)} s after it is begun"
    if step_seconds is None:
        yield good("interval", f"{message}: save every {figure(seconds)} s or less often")
    else:
        steps = max(math.ceil(seconds / step_seconds), 1)
        every = "saving at every step is" if steps == 1 else f"a save-interval of {steps} steps or more is"
        yield good("interval", f"{message}: {every} sustainable")
    if host_cache_bytes is not None:
        yield _cache_finding(load, nbytes_per_second, host_cache_bytes, step_seconds)


def _cache_finding(load: Load, nbytes_per_second: float, host_cache_bytes: int, step_seconds: float | None) -> Finding:
    rest = max(load.rank_nbytes - host_cache_bytes, 0)
    cache = f"{figure(host_cache_bytes / GIB)} GiB of host cache"
    size = f"{figure(load.rank_nbytes / GIB)} GiB per rank and checkpoint, {cache}"
    if not rest:
        return good("cache", f"{size}: a save never waits for the disk")
    staged = rest * load.num_ranks / nbytes_per_second
    held = max(staged - (step_seconds or 0.0), 0.0)
    if step_seconds is not None and not held:
        return good("cache", f"{size}: the rest is written in {figure(staged)} s, while the step goes on")
    wanted = math.ceil(load.rank_nbytes / GIB * 10) / 10
    if step_seconds is not None:
        smaller = load.rank_nbytes - int(step_seconds * nbytes_per_second / load.num_ranks)
        wanted = min(wanted, max(math.ceil(smaller / GIB * 10) / 10, 0.1))
    until = "" if step_seconds is not None else ", less the time from the save to the next optimizer step"
    message = f"{size}: each save holds training back for {figure(held)} s{until}"
    return warning("cache", message, f"raise host_cache_size to {wanted:g}")


def interval_finding(load: Load, nbytes_per_second: float, step_seconds: float, save_interval: int) -> Finding:
    """Whether a planned interval, in steps, is sustainable."""
    durable = load.node_nbytes / nbytes_per_second
    between = save_interval * step_seconds
    what = f"save-interval {save_interval}: {figure(between)} s between saves, {figure(durable)} s until one is durable"
    if durable > between:
        steps = math.ceil(durable * HEADROOM / step_seconds)
        return wrong("interval", f"{what}: saves pile up, and training waits", f"save every {steps} steps")
    return good("interval", what)
