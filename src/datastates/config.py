"""The settings of a checkpoint engine, and the section of a DeepSpeed config that they are read from.

::

    "datastates_ckpt": {"host_cache_size": 4, "events_dir": "runs/7/events"}

`CheckpointConfig.from_section` is the one place where a gigabyte of that section (2**30 bytes) becomes bytes.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from datastates.errors import ConfigError
from datastates.tier_settings import TierLike, TierSettings, read_tiers

_log = logging.getLogger(__name__)

KIB, MIB, GIB = 2**10, 2**20, 2**30

SECTION = "datastates_ckpt"
EXAMPLE = f'"{SECTION}": {{"host_cache_size": 4}}'
FORMATS = ("torch", "safetensors")
WHEN_BUSY = ("queue", "skip", "replace")

DIRECT_IO_BYTES = 4096
"""Offsets and lengths of direct I/O are multiples of this: no logical block in use is larger. Source: open(2)."""

MIN_SLABS = 4
"""One slab being filled, one being hashed, two being written: with fewer, staging and flushing take turns."""

MIN_SLAB_BYTES = 1 * MIB
MAX_SLAB_BYTES = 16 * MIB  # the disk's own limit is reached from here on; larger ones only delay the first write
_SLABS_WANTED = 8
_MAX_GIGABYTES = 2**20  # one PiB: beyond it stands a number of bytes, not of gigabytes


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How one rank saves its checkpoints. Immutable, and checked when it is made.

    Raises:
        ConfigError: a value is of the wrong type or out of range. Names the field, what was found and what was
            expected, with units.
    """

    host_cache_bytes: int
    """Bytes of shared host memory between training and storage, per rank: the bound on what a save may hold there.
    A state may be larger. As large as a rank's part of a checkpoint, a save never waits for storage."""

    pin_host_cache: bool = True
    """Register the host cache with the device's driver, so that copies from the device land in it directly.
    Without effect on a machine whose devices know no pinned memory."""

    fast_cache_init: bool = True
    """True: the pages of the host cache are reserved in the background. False: before the engine's constructor
    returns, so that the first save is as fast as the later ones and a lack of memory shows at once."""

    parser_threads: int | None = None
    """Accepted for configurations of DataStates-LLM, and without effect: nothing is parsed in threads here."""

    format: str | None = None
    """``"safetensors"``: for all files. ``"torch"`` or None: for all but ``*.safetensors``."""

    slab_bytes: int | None = None
    """Bytes of the file that are staged and written as one. None: chosen by the size of the host cache. The value
    that applies is `slab_nbytes`."""

    eager_bytes: int = 64 * KIB
    """Tensors of at most this many bytes are copied inside ``save()``. They are many and together small, and among
    them are those that change before the next optimizer step."""

    eager_budget_bytes: int = 16 * MIB
    """Host memory beside the host cache for such copies, over all saves in flight. Beyond it ``save()`` waits until
    they are in the host cache."""

    num_writers: int = 3
    """Writes in flight per rank. Two keep a disk busy, a third covers for one that is slow."""

    commit_timeout_seconds: float = 600.0
    """How long a rank whose files are durable waits for the other ranks' before the checkpoint counts as failed."""

    close_timeout_seconds: float = 600.0
    """How long ``close()`` waits for the saves in flight. The flusher process goes on when it ends."""

    grace_seconds: float = 30.0
    """How long the flusher process works on after SIGTERM. Schedulers commonly kill 30 s after it."""

    events_dir: str | None = None
    """Directory for event records, one file of JSON lines per rank; None: none are written."""

    metrics_dir: str | None = None
    """Directory for metrics as OpenMetrics text, one file per rank that is rewritten; None: none are written."""

    when_busy: str = "queue"
    """What a save does while an earlier checkpoint (or lone file) is not committed yet. ``"queue"``: it follows.
    ``"skip"``: it is not made. ``"replace"``: it follows, and those are dropped that wait behind the oldest. With the
    latter two, ranks agree at each checkpoint by a small collective on the calling thread."""

    tiers: Sequence[TierLike] | None = None
    """Where checkpoints are carried to, in the background: paths, URLs, or mappings of the fields of
    `tier_settings.TierSettings`. The first is the directory that they are saved below. See docs/tiers.md."""

    carry_timeout_seconds: float = 600.0
    """How long the flusher process goes on carrying after ``close()`` or the trainer's end. The next start goes on."""

    verify_staging: bool = False
    """A debugging aid: every lazily copied tensor is read inside ``save()`` and again when the fence closes, and both
    are compared with what was copied; a checkpoint is asked to commit only then. Finds every write that an open fence
    did not see, by the tensor's name, at the price of reading the state twice more while the training waits."""

    shared_directory: bool = True
    """Whether all nodes see the directory that is saved to. False: each node commits the part of its own ranks in a
    directory of its own, and learns through the job's store that all have. See docs/nodes.md."""

    wait_on_save: bool = False
    """True: DeepSpeed's ``save_checkpoint`` returns only when the checkpoint is committed."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            _require(rule, name, getattr(self, name))
        if self.tiers is not None:
            object.__setattr__(self, "tiers", read_tiers(self.tiers))
        if self.tiers and not self.shared_directory:
            message = "shared_directory is false, and there are tiers: a node's part alone is not carried on"
            raise ConfigError(message)
        if self.slab_bytes is not None and self.slab_bytes * MIN_SLABS > self.host_cache_bytes:
            raise ConfigError(
                f"slab_bytes is {self.slab_bytes}, expected at most a quarter of the host cache, which is"
                f" {self.host_cache_bytes // MIN_SLABS} of {self.host_cache_bytes} bytes"
            )

    def require_shared_directory(self, who: str) -> None:
        """Raise ConfigError where nodes share no directory, and whoever saves cannot do with that."""
        if not self.shared_directory:
            message = f"shared_directory is false, and {who} needs one: only Checkpointer and DeepSpeed do without"
            raise ConfigError(message)

    def refuse_tiers(self, who: str) -> None:
        """Raise ConfigError where checkpoints shall be carried to tiers, and what is saved is more than is carried."""
        if self.tiers:
            message = (
                f"tiers are given, and {who} saves lone files, or files of others beside its own, which are not"
                " carried: leave tiers out, and copy the finished checkpoints yourself"
            )
            raise ConfigError(message)

    @property
    def slab_nbytes(self) -> int:
        """Size of a slab: `slab_bytes`, or an eighth of the host cache within 1 to 16 MiB. A multiple of 4096."""
        if self.slab_bytes is not None:
            return self.slab_bytes
        share = self.host_cache_bytes // _SLABS_WANTED // DIRECT_IO_BYTES * DIRECT_IO_BYTES
        return max(MIN_SLAB_BYTES, min(MAX_SLAB_BYTES, share))

    @property
    def all_tiers(self) -> tuple[TierSettings, ...]:
        """`tiers`, as they were read."""
        return read_tiers(self.tiers or ())

    @classmethod
    def from_section(cls, section: Mapping[str, Any] | None) -> CheckpointConfig:
        """Read the section as users write it into a DeepSpeed config.

        ``host_cache_size`` is in gigabytes of 2**30 bytes and required; the other keys are the names of the
        fields. ``enabled`` is tolerated, but DeepSpeed chooses the engine by the presence of the section.

        Source: ``host_cache_size``, ``parser_threads``, ``pin_host_cache`` and ``fast_cache_init`` are the keys of
        DataStates-LLM; DeepSpeed 0.19.8, deepspeed/datastates/config.py, for ``enabled``.

        Raises:
            ConfigError: a key is unknown (names the nearest known one) or missing, or its value is wrong.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(f"{SECTION} is {section!r}, expected a section with host_cache_size: {EXAMPLE}")
        known = {entry.name for entry in fields(cls)} - {"host_cache_bytes"} | {"host_cache_size", "enabled"}
        for key in section:
            if key not in known:
                raise ConfigError(_unknown_key(SECTION, key, known))
        settings = dict(section)
        _read_enabled(settings.pop("enabled", True))
        host_cache_bytes = _gigabytes_to_bytes(
            f"{SECTION}.host_cache_size", settings.pop("host_cache_size", None), f": {EXAMPLE}"
        )
        try:
            config = cls(host_cache_bytes=host_cache_bytes, **settings)
        except ConfigError as error:
            raise ConfigError(f"{SECTION}: {error}") from error
        if config.parser_threads is not None:
            _log.info("%s.parser_threads is accepted and has no effect: remove it", SECTION)
        return config

    @classmethod
    def of_gigabytes(cls, host_cache_gb: float, settings: Mapping[str, Any]) -> CheckpointConfig:
        """A config with a host cache in gigabytes of 2**30 bytes, and other fields by name.

        Raises:
            ConfigError: a field is unknown (names the nearest known one), or a value is wrong.
        """
        known = {entry.name for entry in fields(cls)} - {"host_cache_bytes"} | {"host_cache_gb"}
        for key in settings:
            if key not in known:
                raise ConfigError(_unknown_key("the config", key, known))
        return cls(host_cache_bytes=_gigabytes_to_bytes("host_cache_gb", host_cache_gb, ""), **settings)


def _is_int(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)


def _is_number(found: Any) -> bool:
    return _is_int(found) or (isinstance(found, float) and math.isfinite(found))


_Rule = tuple[Callable[[Any], bool], str]  # whether a value is right; what is expected where it is not

_SMALLEST_CACHE = MIN_SLABS * MIN_SLAB_BYTES
_BOOL: _Rule = (lambda found: isinstance(found, bool), "true or false")
_NBYTES: _Rule = (lambda found: _is_int(found) and found >= 0, "an integer >= 0 bytes")
_SECONDS: _Rule = (lambda found: _is_number(found) and found > 0, "a number of seconds > 0")
_GIGABYTES: _Rule = (
    lambda found: _is_number(found) and 0 < found <= _MAX_GIGABYTES,
    f"a number of gigabytes (2**30 bytes), > 0 and <= {_MAX_GIGABYTES}",
)

_RULES: dict[str, _Rule] = {
    "host_cache_bytes": (
        lambda found: _is_int(found) and found >= _SMALLEST_CACHE,
        f"an integer >= {_SMALLEST_CACHE} bytes ({MIN_SLABS} slabs of 1 MiB)",
    ),
    "pin_host_cache": _BOOL,
    "fast_cache_init": _BOOL,
    "parser_threads": (lambda found: found is None or (_is_int(found) and found >= 1), "an integer >= 1, or nothing"),
    "format": (lambda found: found is None or found in FORMATS, '"torch", "safetensors", or nothing'),
    "slab_bytes": (
        lambda found: found is None or (_is_int(found) and found > 0 and found % DIRECT_IO_BYTES == 0),
        f"a multiple of {DIRECT_IO_BYTES} bytes, or nothing",
    ),
    "eager_bytes": _NBYTES,
    "eager_budget_bytes": _NBYTES,
    "num_writers": (lambda found: _is_int(found) and 1 <= found <= 64, "an integer from 1 to 64"),
    "commit_timeout_seconds": _SECONDS,
    "close_timeout_seconds": _SECONDS,
    "grace_seconds": (lambda found: _is_number(found) and found >= 0, "a number of seconds >= 0"),
    "events_dir": (lambda found: found is None or (isinstance(found, str) and found != ""), "a path, or nothing"),
    "metrics_dir": (lambda found: found is None or (isinstance(found, str) and found != ""), "a path, or nothing"),
    "when_busy": (lambda found: found in WHEN_BUSY, '"queue", "skip" or "replace"'),
    "tiers": (lambda found: found is None or isinstance(found, (list, tuple)), "a list of tiers, or nothing"),
    "carry_timeout_seconds": (lambda found: _is_number(found) and found >= 0, "a number of seconds >= 0"),
    "verify_staging": _BOOL,
    "shared_directory": _BOOL,
    "wait_on_save": _BOOL,
}


def _require(rule: _Rule, name: str, found: object) -> None:
    is_right, expected = rule
    if not is_right(found):
        raise ConfigError(f"{name} is {found!r} ({type(found).__name__}), expected {expected}")


def _gigabytes_to_bytes(name: str, found: Any, example: str) -> int:
    """Bytes of a number of gigabytes, rounded down to whole pages."""
    if found is None:
        raise ConfigError(f"{name} is missing, expected a number of gigabytes (2**30 bytes){example}")
    is_right, expected = _GIGABYTES
    _require((is_right, expected + example), name, found)
    nbytes = int(found * GIB) // DIRECT_IO_BYTES * DIRECT_IO_BYTES
    if nbytes < _SMALLEST_CACHE:
        raise ConfigError(
            f"{name} is {found!r} gigabytes, which is {nbytes} bytes, expected at least"
            f" {_SMALLEST_CACHE / GIB} gigabytes, which is {MIN_SLABS} slabs of 1 MiB"
        )
    return nbytes


def _read_enabled(found: Any) -> None:
    _require(_BOOL, f"{SECTION}.enabled", found)
    if not found:
        _log.warning(
            "%s.enabled is false, but DeepSpeed chooses the engine by the presence of the section: remove %s from"
            " the config to save with DeepSpeed's own engine",
            SECTION,
            SECTION,
        )


def _unknown_key(where: str, key: object, known: set[str]) -> str:
    nearest = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.0)
    return f"{where} has the unknown key {key!r}; did you mean {nearest[0]!r}? Known: {', '.join(sorted(known))}"
