"""The names of the package are the ones that it says, and importing it costs nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from importlib import metadata
from pathlib import Path

import pytest

import datastates


@pytest.mark.parametrize("name", datastates.__all__)
def test_each_name_resolves(name):
    member = getattr(datastates, name)
    assert member.__name__ == name
    assert member.__module__.startswith("datastates.")
    assert member.__doc__


def test_names_are_sorted_and_listed():
    assert datastates.__all__ == sorted(datastates.__all__)
    assert dir(datastates) == datastates.__all__
    assert set(datastates._HOMES) == set(datastates.__all__)


def test_type_checkers_see_the_same_names_from_the_same_homes():
    tree = ast.parse(Path(datastates.__file__).read_bytes())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.name: statement.module
        for block in blocks
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == datastates._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'datastates' has no attribute 'CheckpointEngines'"):
        _ = datastates.CheckpointEngines


def test_version_is_the_one_of_the_distribution():
    assert datastates.__version__ == metadata.version("datastates")


def test_importing_the_package_loads_no_module_of_it(run_script):
    done = run_script("import sys, datastates; print(sorted(n for n in sys.modules if n.startswith('datastates.')))")
    assert done.stdout == "[]\n"


def test_every_module_is_said_in_a_sentence_and_exports_what_it_lists():
    for module in pkgutil.walk_packages(datastates.__path__, "datastates."):
        if module.name.endswith(".__main__") or module.name.startswith("datastates.integrations."):
            continue
        member = importlib.import_module(module.name)
        listed = getattr(member, "__all__", [])
        assert list(listed) == sorted(listed), f"__all__ of {module.name}"
        assert [name for name in listed if not hasattr(member, name)] == [], module.name
        if not module.ispkg or Path(member.__file__).stat().st_size:
            assert member.__doc__, f"{module.name} has no docstring"
