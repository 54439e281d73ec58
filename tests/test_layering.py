"""The arrows between the modules point down only, and what the flusher process imports is light.

Read from the source, so that a module need not be importable here to be judged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "datastates"

LEVELS = {
    # 0: vocabulary
    "errors": 0,
    "fqns": 0,
    "life_cycle": 0,
    "recent_names": 0,
    "events": 0,
    "figures": 0,
    "config": 0,
    "tier_settings": 0,
    "node_parts": 0,
    "checksum": 0,
    # 1: the byte image; states apart and together again
    "deadline": 1,
    "attempt_names": 1,
    "entrance": 1,
    "closing": 1,
    "ranks": 1,
    "retention": 1,
    "advice": 1,
    "save_records": 1,
    "record_files": 1,
    "run_meter": 1,
    "run_view": 1,
    "loggers": 1,
    "openmetrics": 1,
    "trace": 1,
    "paths": 1,
    "plan": 1,
    "state": 1,
    "copying": 1,
    "gathering": 2,
    "segment_table": 2,
    # 2: what fills and keeps the image
    "formats": 2,
    "state_planner": 2,
    "host_cache": 2,
    "captures": 2,
    "cache_copies": 2,
    "copier": 2,
    "uploads": 2,
    "cuda_runtime": 2,
    "bundles": 2,
    "system_calls": 2,
    "directories": 2,
    "partial_names": 2,
    "locks": 2,
    "leftovers": 2,
    "spares": 2,
    "storage": 2,
    "side_files": 2,
    "verification": 2,
    "page_cache": 2,
    "reading": 2,
    "fellow_readers": 2,
    "direct_memory": 2,
    "contents": 2,
    # 3: the moving parts
    "attempt": 3,
    "commit_log": 3,
    "reporting": 3,
    "outcomes": 3,
    "pinner": 3,
    "staging_job": 3,
    "promised_job": 3,
    "stager": 3,
    "fence": 3,
    "flusher": 3,
    "tiers": 3,
    "manifest": 3,
    "attempt_folder": 3,
    "integrity": 3,
    "same_save": 3,
    "commit": 3,
    "commit_times": 3,
    "pins": 3,
    "removal": 3,
    "recovery": 3,
    "whole_records": 3,
    # 4: whole saves and loads
    "catalog": 4,
    "loading": 4,
    "latest": 4,
    "reader": 4,
    "machinery": 4,
    "commit_requests": 4,
    "staging": 4,
    "in_flight": 4,
    "saver": 4,
    "when_busy": 4,
    "deletions": 4,
    "nodes": 4,
    "checkpoints": 5,
    "checkpointer": 5,
    # 5: other people's contracts
    "checkpoint_engine": 5,
    "differences": 5,
    "universal": 5,
    "conversion": 5,
    "integrations": 5,
    # 6: for people
    "bench": 6,
    "doctor": 4,
    "cli": 6,
    "__main__": 6,
}
"""Level of each module and package below ``datastates``; a package's holds for all of its modules. An import may
point to the same level, but never in a circle. ``datastates`` itself is above all: its names resolve on first use."""

LIGHT = (
    "datastates",
    "errors",
    "fqns",
    "catalog",
    "page_cache",
    "reading",
    "fellow_readers",
    "direct_memory",
    "contents",
    "life_cycle",
    "recent_names",
    "events",
    "figures",
    "advice",
    "save_records",
    "record_files",
    "run_meter",
    "run_view",
    "loggers",
    "openmetrics",
    "trace",
    "retention",
    "config",
    "checksum",
    "system_calls",
    "directories",
    "partial_names",
    "locks",
    "leftovers",
    "storage",
    "manifest",
    "attempt_folder",
    "integrity",
    "same_save",
    "commit",
    "commit_times",
    "recovery",
    "flusher",
    "tier_settings",
    "node_parts",
    "whole_records",
    "pins",
    "tiers",
    "doctor",
)
"""What the flusher process may import, and what a command of the command line that reads no tensor needs. It must
start in tens of milliseconds and weigh a few MiB."""

HEAVY = {"torch", "numpy"}
FRAMEWORKS = {"deepspeed", "lightning", "pytorch_lightning", "transformers", "accelerate", "megatron"}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, where it stands, and whether it is imported when the program runs."""

    name: str
    line: int
    is_at_top: bool
    is_at_run_time: bool


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """File of each module by its dotted name; a package by its own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """All imports of a module, wherever they stand in it. ``from package import name`` counts for the module meant."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    yield from _imports_in(ast.parse(path.read_bytes()), package, known, is_at_top=True, is_at_run_time=True)


def _imports_in(
    tree: ast.AST, package: str, known: dict[str, Path], *, is_at_top: bool, is_at_run_time: bool
) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for target in _targets(node, package, known):
                yield Import(target, node.lineno, is_at_top, is_at_run_time)
        inner_top = is_at_top and not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        )
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        inner_run = is_at_run_time and not for_types
        yield from _imports_in(node, package, known, is_at_top=inner_top, is_at_run_time=inner_run)


def _targets(node: ast.Import | ast.ImportFrom, package: str, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, node.module] if node.module else parents)
    for alias in node.names:
        if base == "datastates" and alias.name == "__version__":
            continue  # a plain string of the package, and no arrow to what the package resolves
        yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def level(name: str) -> int:
    """Level of a module of the package by its dotted name."""
    if name == "datastates":
        return 1 + max(LEVELS.values())
    return LEVELS[name.split(".")[1]]


def upward(known: dict[str, Path]) -> list[str]:
    """Imports of the package's own modules that point to a higher level."""
    return [
        f"{name}:{found.line} (level {level(name)}) imports {found.name} (level {level(found.name)})"
        for name, path in known.items()
        if name != "datastates"
        for found in imports(name, path, known)
        if found.name in known and level(found.name) > level(name)
    ]


def circle(known: dict[str, Path]) -> list[str]:
    """A circle of imports, as the names along it; empty when there is none."""
    edges = {
        name: {found.name for found in imports(name, path, known) if found.name in known and found.name != name}
        for name, path in known.items()
        if name != "datastates"
    }
    done: set[str] = set()

    def search(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges.get(name, ())):
            if found := search(target, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in edges if (found := search(name, []))), [])


def closure(name: str, known: dict[str, Path]) -> set[str]:
    """Everything that is imported when the module is, as far as the package's own source tells."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in known:
            parts = current.split(".")
            todo += [".".join(parts[:count]) for count in range(1, len(parts))]
            todo += [found.name for found in imports(current, known[current], known) if found.is_at_run_time]
    return seen


def is_light(name: str) -> bool:
    return name == "datastates" or name.split(".")[1] in LIGHT


def test_every_module_has_a_level():
    missing = [name for name in MODULES if name != "datastates" and name.split(".")[1] not in LEVELS]
    assert missing == [], "give them a level in LEVELS"
    assert {"datastates.errors", "datastates.plan", "datastates.flusher"} <= set(MODULES)


def test_arrows_point_down():
    assert upward(MODULES) == []


def test_no_circles():
    assert circle(MODULES) == []


def test_imports_stand_at_the_top():
    inside = [
        f"{name}:{found.line} imports {found.name}"
        for name, path in MODULES.items()
        for found in imports(name, path, MODULES)
        if not found.is_at_top
    ]
    assert inside == []


def test_only_integrations_import_frameworks():
    strangers = [
        f"{name}:{found.line} imports {found.name}"
        for name, path in MODULES.items()
        if not name.startswith("datastates.integrations.")
        for found in imports(name, path, MODULES)
        if found.name.split(".")[0] in FRAMEWORKS and found.is_at_run_time
    ]
    assert strangers == []


@pytest.mark.parametrize("name", [name for name in MODULES if is_light(name)])
def test_light_modules_reach_neither_torch_nor_numpy(name):
    heavy = {found for found in closure(name, MODULES) if found.split(".")[0] in HEAVY}
    assert heavy == set()


def test_light_modules_load_neither_torch_nor_numpy(run_script):
    names = [name for name in MODULES if is_light(name) and not name.endswith(".__main__")]
    loaded = run_script(
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])\n",
        *names,
    )
    assert loaded.stdout == "[]\n"


# --- the rules themselves can fail


@pytest.fixture
def package(tmp_path):
    """``package({"name.py": source})``: the modules of a package ``datastates`` with these files."""

    def make(files):
        root = tmp_path / "datastates"
        for name, source in {"__init__.py": "", **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return modules(root)

    return make


@pytest.mark.parametrize(
    "source",
    [
        "import datastates.stager",
        "from datastates.stager import Stager",
        "from datastates import stager",
        "from . import stager",
        "from .stager import Stager",
        "from datastates import CheckpointEngine",
        "def later():\n    from datastates.stager import Stager",
        "if TYPE_CHECKING:\n    from datastates.stager import Stager",
    ],
)
def test_an_arrow_up_is_found_however_it_is_written(package, source):
    known = package({"plan.py": source, "stager.py": "from datastates.plan import x"})
    assert len(upward(known)) == 1 and upward(known)[0].startswith("datastates.plan:")


def test_an_arrow_down_and_a_version_are_none(package):
    known = package({"plan.py": "from datastates.errors import E", "errors.py": "from datastates import __version__"})
    assert upward(known) == []


def test_a_circle_is_found_on_one_level(package):
    files = {
        "stager.py": "from datastates.fence import x",
        "fence.py": "from datastates.flusher.client import y",
        "flusher/__init__.py": "",
        "flusher/client.py": "from ..stager import z",
    }
    found = circle(package(files))
    assert found[0] == found[-1] and set(found) == {
        "datastates.stager",
        "datastates.fence",
        "datastates.flusher.client",
    }
    assert upward(package(files)) == []
    assert circle(package({**files, "fence.py": ""})) == []


@pytest.mark.parametrize(
    ("source", "is_at_top"),
    [
        ("import os", True),
        ("try:\n    import os\nexcept ImportError:\n    os = None", True),
        ("if x:\n    import os", True),
        ("def f():\n    import os", False),
        ("class A:\n    async def f(self):\n        if x:\n            import os", False),
        ("class A:\n    import os", False),
    ],
)
def test_an_import_inside_is_told_from_one_at_the_top(package, source, is_at_top):
    known = package({"plan.py": source})
    assert [found.is_at_top for found in imports("datastates.plan", known["datastates.plan"], known)] == [is_at_top]


def test_torch_is_found_behind_other_modules_and_packages(package):
    files = {
        "manifest.py": "from datastates.formats.names import x",
        "formats/__init__.py": "import torch.nn",
        "formats/names.py": "",
    }
    assert "torch.nn" in closure("datastates.manifest", package(files))
    files["formats/__init__.py"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.nn"
    assert "torch.nn" not in closure("datastates.manifest", package(files))
