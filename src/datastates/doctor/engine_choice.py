"""Which checkpoint engine DeepSpeed would use with a config, and why.

Source: deepspeed 0.19.8, runtime/checkpoint_engine/utils.py, ``create_checkpoint_engine``, and
datastates/config.py, for when the section counts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from datastates import __version__
from datastates.config import EXAMPLE, SECTION, CheckpointConfig
from datastates.doctor.findings import Finding, good, warning, wrong
from datastates.doctor.installation import DeepSpeedInstallation
from datastates.errors import ConfigError


def read_config(path: str) -> dict[str, Any]:
    """Read the JSON file of a DeepSpeed config, with comments where ``hjson`` is installed, as DeepSpeed does.

    Raises:
        ConfigError: there is no such file, or it is no JSON object, or has a key twice.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from error
    try:
        config = _parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, expected the JSON object of a DeepSpeed config")
    return config


def settings_of(config: Mapping[str, Any]) -> CheckpointConfig | None:
    """The settings in a DeepSpeed config, None where there are none or they are wrong."""
    try:
        return CheckpointConfig.from_section(config.get(SECTION))
    except ConfigError:
        return None


def engine_findings(config: Mapping[str, Any], deepspeed: DeepSpeedInstallation | None) -> Iterator[Finding]:
    """Which engine is active with this config, what keeps it from being this package's, and what is unsupported."""
    if deepspeed is None:
        yield wrong("engine", "DeepSpeed is not installed: nothing reads this config", "install deepspeed >= 0.19.8")
        return
    other = _winner(config, deepspeed)
    section = config.get(SECTION, False)
    if other is not None:
        yield other
    elif section is False:
        message = f"no section {SECTION}: DeepSpeed saves with its own engine, and training waits for it"
        yield wrong("engine", message, f"add {EXAMPLE}")
    elif not deepspeed.has_adapter:
        yield wrong("engine", f"DeepSpeed {deepspeed.version} ignores {SECTION}", "install deepspeed >= 0.19.8")
    else:
        yield from _section_findings(section, deepspeed)
    yield from _combination_findings(config)


def _winner(config: Mapping[str, Any], deepspeed: DeepSpeedInstallation) -> Finding | None:
    """What is preferred to the section, or keeps DeepSpeed from starting."""
    nebula = config.get("nebula")
    if nebula is not None and deepspeed.nebula == "refused":
        return wrong("engine", f"DeepSpeed {deepspeed.version} refuses a config with nebula", "remove nebula")
    if isinstance(nebula, Mapping) and nebula.get("enabled") and deepspeed.nebula == "wins":
        return wrong("engine", f"nebula is enabled and wins over {SECTION}", "remove nebula")
    checkpoint = config.get("checkpoint")
    writer = checkpoint.get("writer") if isinstance(checkpoint, Mapping) else None
    if writer is None:
        return None
    is_decoupled = isinstance(writer, Mapping) and bool(writer.get("decoupled"))
    name = "DecoupledCheckpointEngine" if is_decoupled else "FastCheckpointEngine"
    message = f"checkpoint.writer is set: DeepSpeed uses its {name}, and ignores {SECTION}"
    return wrong("engine", message, "remove checkpoint.writer")


def _section_findings(section: Any, deepspeed: DeepSpeedInstallation) -> Iterator[Finding]:
    if isinstance(section, Mapping) and section.get("enabled") is False:
        message = f"{SECTION}.enabled is false, but the section enables the engine all the same"
        yield warning("engine", message, f"remove {SECTION} to save with DeepSpeed's own engine; remove enabled if not")
    try:
        CheckpointConfig.from_section(section)
    except ConfigError as error:
        if section is None or section == {}:
            yield wrong("engine", f"an empty section enables the engine all the same, and lacks its size: {error}")
        else:
            yield wrong("settings", f"{error}; DeepSpeed would stop at its start", "correct it: docs/settings.md")
            yield from _further_keys(section, str(error))
        return
    yield good("engine", f"DeepSpeed {deepspeed.version} saves with datastates {__version__}")


def _further_keys(section: Any, told: str) -> Iterator[Finding]:
    """The other keys that are wrong by themselves; reading the section stops at the first."""
    if not isinstance(section, Mapping):
        return
    for key, value in section.items():
        try:
            CheckpointConfig.from_section({"host_cache_size": 4, key: value})
        except ConfigError as error:
            if str(error) != told:
                yield wrong("settings", str(error), "correct it: docs/settings.md")


def _combination_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What this package cannot serve, or only at a price."""
    checkpoint, zero = (config.get(name) for name in ("checkpoint", "zero_optimization"))
    if isinstance(checkpoint, Mapping) and checkpoint.get("use_node_local_storage"):
        message = (
            "checkpoint.use_node_local_storage: ranks of several machines have no folder in common, and never commit"
        )
        yield warning("storage", message, "save to a shared file system, unless all ranks run on one machine")
    if not isinstance(zero, Mapping):
        return
    offload = zero.get("offload_optimizer")
    is_super = isinstance(offload, Mapping) and bool(offload.get("super_offload"))
    for name, is_on in (("zenflow", zero.get("zenflow") is not None), ("super_offload", is_super)):
        if is_on:
            message = f"{name} changes the optimizer's state during backward: it is copied inside save_checkpoint"
            yield warning("overlap", message, "expect save_checkpoint to take as long as that copy")


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        # not at the top: it comes with DeepSpeed and need not be there
        if importlib.util.find_spec("hjson") is None:
            raise ValueError(f"not JSON: {error}") from error
        return importlib.import_module("hjson").loads(text, object_pairs_hook=_without_twins)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found
