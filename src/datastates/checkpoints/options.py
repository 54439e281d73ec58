"""What people give to `datastates.Checkpointer`, checked."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping, Sequence
from typing import SupportsFloat, SupportsIndex

from datastates.config import CheckpointConfig
from datastates.errors import ConfigError, StateError
from datastates.retention import RetentionPolicy
from datastates.tier_settings import TierSettings

DEFAULT_GIGABYTES = 4.0
_MAX_STEP = 2**63

Metric = SupportsFloat
"""A number, also one of numpy's or a tensor of one element."""


def config_of(
    config: CheckpointConfig | None, host_cache_gb: float, settings: Mapping[str, object]
) -> CheckpointConfig:
    """The settings of saving. Raises ConfigError: one is unknown or wrong, or they are given in two ways."""
    if config is None:
        return CheckpointConfig.of_gigabytes(host_cache_gb, settings)
    if settings or host_cache_gb != DEFAULT_GIGABYTES:
        both = ", ".join(settings) or "host_cache_gb"
        raise ConfigError(f"both config and {both} are given: put all settings into config")
    return config


def policy_of(
    keep_last: int | None, keep_every: int | None, keep_best: int, metric: str | None, is_larger_better: bool
) -> RetentionPolicy | None:
    """What stays, None where everything does. Raises ConfigError."""
    if metric is not None and (not isinstance(metric, str) or not metric):
        raise ConfigError(f"metric is {metric!r}, expected the name of a metric given to save()")
    if keep_best and metric is None:
        raise ConfigError(f"keep_best is {keep_best!r} and no metric is named: Checkpointer(..., metric='loss')")
    if keep_last is None:
        if keep_every is not None or keep_best:
            raise ConfigError("keep_last is None, so nothing is deleted: leave out keep_every and keep_best")
        return None
    return RetentionPolicy(
        keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, is_larger_better=is_larger_better
    )


def check_tiers(tiers: Sequence[TierSettings], directory: str) -> None:
    """Raise ConfigError unless the folder of the checkpoints lies in the first tier, or is it."""
    root = os.path.realpath(tiers[0].path) if tiers else directory
    if os.path.commonpath([root, directory]) != root:
        message = f"the checkpoints are saved to {directory}, and the first tier is {root}: expected a folder in it"
        raise ConfigError(message)


def replicated_of(found: bool | Collection[str]) -> bool | frozenset[str]:
    """The names of the replicated entries, True for all. Raises ConfigError."""
    if isinstance(found, bool):
        return found
    if isinstance(found, str) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"replicated is {found!r}, expected names of entries, such as {{'model'}}, or True for all")
    return frozenset(found)


def checked_step(step: SupportsIndex) -> int:
    """The step as Python's own number, if it can be one: also of an integer of numpy or torch. Raises StateError."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < _MAX_STEP:
        raise StateError(f"step is {step!r}, expected a number from 0 to 2**63 - 1")
    return number


def checked_metrics(metrics: Mapping[str, Metric] | None, needed: str | None) -> dict[str, float]:
    """Metrics as plain numbers.

    Args:
        metrics: as they were given.
        needed: a name that must be among them, if there are any.

    Raises:
        StateError: one is no number, or missing.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise StateError(f"metrics is {metrics!r}, expected names and numbers: {{'loss': 0.5}}")
    values: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"the metric {name!r} is {value!r}, expected one number: {error}", str(name)) from error
    if metrics is not None and needed is not None and needed not in values:
        raise StateError(f"the metrics have no {needed!r}, which the best checkpoints are chosen by", needed)
    return values
