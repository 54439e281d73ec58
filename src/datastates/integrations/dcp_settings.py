"""What a writer of distributed checkpoints is made with."""

from __future__ import annotations

from datastates.config import CheckpointConfig
from datastates.errors import ConfigError
from datastates.ranks import Ranks

DEFAULT_HOST_CACHE_GB = 4.0


class Alone(Ranks):
    """No other ranks, although there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 0, 1


def config_of(host_cache_gb: float | None, config: CheckpointConfig | None) -> CheckpointConfig:
    """The settings of a writer.

    Raises:
        ConfigError: both are given, the size is wrong, or a setting has no meaning for DCP.
    """
    if config is None:
        return CheckpointConfig.of_gigabytes(DEFAULT_HOST_CACHE_GB if host_cache_gb is None else host_cache_gb, {})
    if host_cache_gb is not None:
        raise ConfigError("host_cache_gb and config are both given: the size is config.host_cache_bytes")
    if config.when_busy != "queue":
        raise ConfigError(f"when_busy is {config.when_busy!r}: DCP's saves follow each other, it must be 'queue'")
    if config.format not in (None, "torch"):
        raise ConfigError(f"format is {config.format!r}: DCP's files are of torch's format")
    return config
