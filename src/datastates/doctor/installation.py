"""What is installed beside this package: read from the files of the installation, nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datastates.doctor.findings import Finding, good, warning, wrong

OLDEST_DEEPSPEED = (0, 19, 8)
"""The oldest release that the tests of this package run with."""

OLDEST_TORCH = (2, 13)

_ADAPTER = "runtime/checkpoint_engine/datastates_checkpoint_engine.py"
_CHOICE = "runtime/checkpoint_engine/utils.py"
_CONFIG = "runtime/config.py"


@dataclass(frozen=True, slots=True)
class DeepSpeedInstallation:
    """A DeepSpeed, as far as it decides about checkpoint engines.

    Attributes:
        version: of the distribution; empty where it has none.
        has_adapter: it can use this package at all.
        is_repaired: its adapter commits by itself, and this package leaves it alone.
        nebula: ``"wins"``: a ``nebula`` section is preferred to ``datastates_ckpt``; ``"refused"``: such a section is
            an error; ``""``: it is not known.
    """

    version: str
    has_adapter: bool
    is_repaired: bool
    nebula: str


def find_deepspeed() -> DeepSpeedInstallation | None:
    """The DeepSpeed that this Python would import, None where there is none."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    return read_deepspeed(Path(next(iter(spec.submodule_search_locations))), version_of("deepspeed"))


def read_deepspeed(package: Path, version: str) -> DeepSpeedInstallation:
    """What the source of a DeepSpeed says.

    Source: deepspeed 0.19.8 and 0.19.6, the files named by ``_ADAPTER``, ``_CHOICE`` and ``_CONFIG``.

    Args:
        package: its folder ``deepspeed``.
        version: what its distribution says.
    """
    adapter, choice, config = (_text_of(package / name) for name in (_ADAPTER, _CHOICE, _CONFIG))
    nebula = "wins" if "nebula" in choice.lower() else "refused" if re.search(r"^\s+\"nebula\":", config, re.M) else ""
    return DeepSpeedInstallation(version, bool(adapter), "get_commit_info" in _methods(adapter), nebula)


def installation_findings(deepspeed: DeepSpeedInstallation | None, torch: str, isal: str) -> Iterator[Finding]:
    """Whether what this package builds on is there and new enough.

    Args:
        deepspeed: None where there is none.
        torch: its version, empty where there is none.
        isal: as well.
    """
    if not torch:
        yield wrong("torch", "PyTorch is not installed", "install torch >= 2.13")
    elif release(torch) < OLDEST_TORCH:
        yield wrong("torch", f"PyTorch {torch} is too old", "install torch >= 2.13")
    if not isal:
        yield warning("isal", "isal is not installed: checksums are computed by zlib, which is slower", "install isal")
    if deepspeed is None:
        yield warning("deepspeed", "DeepSpeed is not installed", "install deepspeed >= 0.19.8, if you train with it")
    elif not deepspeed.has_adapter:
        message = f"DeepSpeed {deepspeed.version} has no adapter for datastates: it ignores the section datastates_ckpt"
        yield wrong("deepspeed", message, "install deepspeed >= 0.19.8")
    elif release(deepspeed.version) < OLDEST_DEEPSPEED:
        message = f"DeepSpeed {deepspeed.version} is older than what datastates is tested with"
        yield warning("deepspeed", message, "install deepspeed >= 0.19.8")
    elif deepspeed.is_repaired:
        yield good("deepspeed", f"DeepSpeed {deepspeed.version} commits checkpoints itself; its adapter is left alone")
    else:
        message = f"the adapter of DeepSpeed {deepspeed.version} neither commits nor waits before the optimizer step"
        yield good("deepspeed", f"{message}: datastates repairs that at run time")


def version_of(distribution: str) -> str:
    """The version of an installed distribution, empty where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, to be compared: ``"2.13.0+cpu"`` is ``(2, 13, 0)``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _text_of(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _methods(source: str) -> set[str]:
    """Names of the methods of the adapter's class, those it inherits left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "DataStatesCheckpointEngine":
            return {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return set()
