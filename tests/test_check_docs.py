"""The check of the documents finds what is dead in them, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_docs.py"
spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
check_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_docs)

GOOD = """# A title: with, marks
[there](docs/other.md) [anchor](docs/other.md#two-words) [here](#a-title-with-marks) [web](https://example.org/x)
`src/package/` and `scripts/run` and `src/package/a.py::test_it`, but not `src` or `nothing/at/all`

```sh
make test ARGS="-k x y"
PYTHON=python3.12 make -j2 lint  # words after it
scripts/run --now
python examples/train.py --save out
```

```python
print("[dead](docs/dead.md)")
```

```json
{"a": [1]}
```

```json
"datastates_ckpt": {"host_cache_size": 4}
```
"""


@pytest.fixture
def repository(tmp_path):
    for name, text in {
        "Makefile": "VENV ?= .venv\nX := 1\ntest: x\n\ttrue\nlint:\n\ttrue\n",
        "README.md": GOOD,
        "docs/other.md": "# One\n\n## Two words\n",
        "src/package/a.py": "class A:\n    def test_it(self):\n        pass\n",
        "scripts/run": "",
        "examples/train.py": "",
        ".venv/lib/README.md": "[dead](x.md)",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_living_document_passes(repository, capsys):
    assert check_docs.main(repository) == 0
    assert capsys.readouterr().out == "2 documents: links, paths, commands and examples are alive\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\n[x](gone.md)", "2: the link gone.md leads to nothing"),
        ("![x](gone.png)", "1: the link gone.png leads to nothing"),
        ("[x](other.md#three)", "1: the link other.md#three leads to no heading"),
        ("[x](#nowhere)", "1: the link #nowhere leads to no heading"),
        ("see\n\n`src/package/gone.py`", "3: `src/package/gone.py` does not exist"),
        ("`src/package/a.py::test_gone`", "1: `src/package/a.py` has no function test_gone"),
        ("```sh\nmake everything\n```", "1: make has no target everything"),
        ("```console\n$ make test gone\n```", "1: make has no target gone"),
        ("```bash\nscripts/gone --x\n```", "1: the command uses scripts/gone, which does not exist"),
        ("```sh\npython examples/gone.py\n```", "1: the command uses examples/gone.py, which does not exist"),
        ("a\n```python\nx = (\n```", "2: the Python example does not compile: '(' was never closed"),
        ("```json\n{1: 2}\n```", "1: the JSON example does not parse: Expecting property name"),
    ],
)
def test_what_is_dead_is_named_with_its_line(repository, capsys, text, problem):
    (repository / "docs" / "more.md").write_text(text)
    assert check_docs.main(repository) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"docs/more.md:{problem}")
