"""The frame of the command line: what it loads, how it ends, what its document says."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from rich.progress import Progress
from rich.text import Text

from datastates import __version__, errors, load
from datastates.cli import console, exit_codes, main
from datastates.cli import main as group
from datastates.cli.main import COMMANDS, CommandGroup

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def failing(error):
    """A group with one command that raises this."""

    @click.group(cls=CommandGroup)
    @click.option("--debug", is_flag=True)
    def program(debug):
        pass

    @program.command("fail")
    def fail():
        raise error

    program.get_command = lambda ctx, name: program.commands.get(name)
    return program


# ---------------------------------------------------------------------------------------------- what it loads


def test_help_and_version_load_no_command_and_nothing_heavy(run_script):
    done = run_script(
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from datastates.cli import main\n"
        "for arguments in (['--help'], ['--version'], []):\n"
        "    CliRunner().invoke(main, arguments)\n"
        "print(sorted({'torch', 'numpy', 'deepspeed', 'datastates.cli.doctor'} & set(sys.modules)))\n"
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["doctor", "ls", "show", "stats", "verify"])
def test_commands_that_read_no_tensor_load_no_torch(run_script, name):
    done = run_script(
        "import sys\n"
        "from datastates.cli.main import main\n"
        "main.get_command(None, sys.argv[1])\n"
        "print(sorted({'torch', 'numpy', 'deepspeed'} & set(sys.modules)))\n",
        name,
    )
    assert done.stdout == "[]\n"


def test_every_module_of_a_command_is_listed_and_has_one():
    helpers = {"__init__", "checkpoints", "console", "exit_codes", "main"}
    found = {path.stem for path in Path(console.__file__).parent.glob("*.py")} - helpers
    assert found == set(COMMANDS)
    for name in COMMANDS:
        command = main.get_command(None, name)
        assert isinstance(command, click.Command)
        assert command.help
    assert main.get_command(None, "lss") is None


def test_an_unknown_command_is_wrong_usage():
    done = CliRunner().invoke(main, ["lss"])
    assert done.exit_code == exit_codes.USAGE
    assert "lss" in done.stderr


def test_the_installed_program_and_the_module_are_the_same():
    program = Path(sys.executable).parent / "datastates"
    for command in ([str(program)], [sys.executable, "-m", "datastates"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"datastates {__version__}\n"


# ------------------------------------------------------------------------------------------------ how it ends


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 3),
        (errors.CheckpointNotFoundError("x"), 4),
        (errors.CorruptCheckpointError("x"), 5),
        (errors.ForeignObjectError("x"), 6),
        (pickle.UnpicklingError("x"), 6),
        (errors.StateError("x"), 7),
        (errors.WaitTimeoutError("x"), 8),
        (errors.StorageError("x"), 9),
        (PermissionError(errno.EACCES, "denied", "/x"), 9),
        (errors.CommitError("x"), 10),
        (ZeroDivisionError("x"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error, code):
    done = CliRunner().invoke(failing(error), ["fail"])
    assert done.exit_code == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_every_error_of_the_package_has_a_code_that_is_no_defect():
    leaves = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(leaves) > 10
    for kind in leaves:
        assert exit_codes.exit_code_of(kind("x")) not in (exit_codes.DEFECT, exit_codes.SUCCESS)


def test_a_subclass_comes_before_its_base_in_the_table():
    kinds = [kind for kind, _, _ in exit_codes.BY_ERROR]
    for position, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:position]), kind


def test_an_error_is_one_line():
    done = CliRunner().invoke(failing(errors.ConfigError("first\n  second")), ["fail"])
    assert done.stderr == "datastates: first second\n"


def test_a_defect_says_that_it_is_one_and_where_to_look():
    done = CliRunner().invoke(failing(KeyError("x")), ["fail"])
    assert done.stderr == "datastates: KeyError: 'x' (exit code 70: a defect of datastates; --debug shows where)\n"


def test_debug_shows_where_it_happened():
    error = ZeroDivisionError("x")
    done = CliRunner().invoke(failing(error), ["--debug", "fail"])
    assert done.exception is error


def test_a_reader_that_has_gone_is_no_error(tmp_path):
    command = f"{sys.executable} -m datastates doctor --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


# ------------------------------------------------------------------------------------------------- what it prints


def test_columns_are_aligned_and_lines_stand_below_each_other(capsys):
    console.print_rows([["a", "long", "first\nsecond"], ["wide", "b", "third"]])
    assert capsys.readouterr().out == "a     long  first\n            second\nwide  b     third\n"


def test_long_lines_are_not_cut_and_have_no_colours_where_there_is_no_terminal(capsys):
    console.print_rows([[Text("x", style="bold red"), "y" * 500]])
    assert capsys.readouterr().out == "x  " + "y" * 500 + "\n"


def test_progress_is_silent_without_a_terminal(capsys):
    with console.byte_progress("reading", 100) as advance:
        advance(50)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (1 << 60, "1024 PiB")],
)
def test_sizes(nbytes, text):
    assert console.size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.00054, "0.54 ms"),
        (0.0000076, "0.01 ms"),
        (0.9999, "1 s"),
        (59, "59 s"),
        (90, "1.5 min"),
        (7200, "2 h"),
        (86400, "1 d"),
    ],
)
def test_durations(seconds, text):
    assert console.duration_text(seconds) == text


def test_a_path_is_told_from_the_current_folder_where_it_lies_in_it(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    here = os.getcwd()
    assert console.path_text(os.path.join(here, "a", "b.pt")) == os.path.join("a", "b.pt")
    assert console.path_text(os.path.join(here, "..gone")) == "..gone"
    assert console.path_text(os.path.dirname(here)) == os.path.dirname(here)
    assert console.path_text(f"{here}s/b.pt") == f"{here}s/b.pt"


def test_progress_tells_its_rate_in_the_units_of_its_size():
    progress = Progress()
    progress.add_task("", total=3 << 20)
    (task,) = progress.tasks
    column = console._RateColumn()
    assert column.render(task).plain == ""
    task.finished_speed = 3 * 2**20
    assert column.render(task).plain == "3 MiB/s"


def test_json_is_json(capsys):
    console.print_json({"a": [1, "ü"]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, "ü"]}


# ------------------------------------------------------------------------------------------------ what is said


@pytest.fixture
def write_cli_docs(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("write_cli_docs")


def test_the_document_says_what_help_says(write_cli_docs):
    text = write_cli_docs.DOCUMENT.read_text("utf-8")
    assert write_cli_docs.updated(text) == text, "run python scripts/write_cli_docs.py"
    for name in COMMANDS:
        assert f"### {name}\n" in text


def test_a_document_that_is_out_of_date_is_found_and_mended(write_cli_docs, tmp_path, monkeypatch, capsys):
    text = write_cli_docs.DOCUMENT.read_text("utf-8")
    stale = tmp_path / "cli.md"
    stale.write_text(text.replace("--directory", "--folder").replace("| 5 |", "| 55 |"))
    monkeypatch.setattr(write_cli_docs, "DOCUMENT", stale)
    assert write_cli_docs.run(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert write_cli_docs.run([]) == 0
    assert write_cli_docs.updated(stale.read_text()) == stale.read_text()
    assert "| 5 |" in stale.read_text()
    assert write_cli_docs.run(["--check"]) == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_as_the_document_says(write_cli_docs, shell):
    program = Path(sys.executable).parent / "datastates"
    env = {**os.environ, "_DATASTATES_COMPLETE": f"{shell}_source"}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=env, timeout=60)
    assert "_DATASTATES_COMPLETE" in done.stdout
    assert f"_DATASTATES_COMPLETE={shell}_source datastates" in write_cli_docs.DOCUMENT.read_text("utf-8")


def test_commands_are_completed():
    program = Path(sys.executable).parent / "datastates"
    env = {**os.environ, "_DATASTATES_COMPLETE": "bash_complete", "COMP_WORDS": "datastates do", "COMP_CWORD": "1"}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout == "plain,doctor\n"


def test_the_group_is_what_the_entry_point_names():
    assert isinstance(group, CommandGroup)


def output_on_a_terminal(*arguments, **environment):
    """What the program writes when its standard output is a terminal."""
    controller, terminal = os.openpty()
    try:
        command = [sys.executable, "-m", "datastates", *arguments]
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        process = subprocess.Popen(command, stdout=terminal, env={**env, "TERM": "xterm", **environment})
        os.close(terminal)
        found = b""
        while True:
            try:
                data = os.read(controller, 4096)
            except OSError:  # EIO: the last writer has gone
                break
            found += data
        process.wait(60)
        return found.decode()
    finally:
        os.close(controller)


def test_colours_appear_on_a_terminal_only_and_can_be_turned_off(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text('{"datastates_ckpt": {"host_cache_size": 0.01}}')
    assert "\x1b[32mgood" in output_on_a_terminal("doctor", str(config))
    assert "\x1b[32m" not in output_on_a_terminal("doctor", str(config), NO_COLOR="1")
    piped = subprocess.run([sys.executable, "-m", "datastates", "doctor", str(config)], capture_output=True, timeout=60)
    assert b"\x1b" not in piped.stdout
    assert piped.stdout.startswith(b"good")


# ---------------------------------------------------------------------------------------------- what others have named


def test_control_characters_never_reach_the_terminal(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"a\x1b[31m\nb\xff.pt")
    torch.save({"we\x1b[2Jird\nna\udcffme": torch.ones(3), "v": "\x1b]0;own\x07"}, tmp_path / "plain.pt")
    os.rename(tmp_path / "plain.pt", path)
    for arguments in (["show"], ["verify"], ["ls"], ["show", "--match", "no\x1bsuch"], ["diff", os.fsdecode(path)]):
        done = CliRunner().invoke(main, [*arguments, os.fsdecode(path)])
        assert done.exit_code in (0, 4, 9), done.output
        assert done.output.isascii() and done.output.replace("\n", "").isprintable()
    (shown,) = json.loads(CliRunner().invoke(main, ["show", os.fsdecode(path), "--json"]).stdout)
    assert shown["path"] == os.fsdecode(path)


def test_a_file_with_a_name_that_is_no_utf8_is_converted(tmp_path):
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xff.pt"))
    torch.save({"w": torch.arange(3.0)}, tmp_path / "plain.pt")
    os.rename(tmp_path / "plain.pt", path)
    done = CliRunner().invoke(main, ["convert", path, str(tmp_path / "out"), "--to", "safetensors"])
    assert done.exit_code == 0, done.output
    assert torch.equal(load(tmp_path / "out")["w"], torch.arange(3.0))


def test_what_is_no_ascii_is_shown_where_only_ascii_is_known(tmp_path):
    for number in (1, 2):
        torch.save({"lr": number}, tmp_path / f"{number}.pt")
    done = subprocess.run(
        [sys.executable, "-m", "datastates", "diff", tmp_path / "1.pt", tmp_path / "2.pt"],
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "changed  lr  int 1 \\u2192 int 2\n1 changed\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "0"])
@pytest.mark.parametrize("command", [["bench", "--state-gb"], ["bench", "--host-cache-gb"], ["doctor", "--params"]])
def test_an_amount_is_a_number_that_there_is(tmp_path, command, value):
    done = CliRunner().invoke(main, [*command, value, *([str(tmp_path)] if command[0] == "bench" else [])])
    assert done.exit_code == exit_codes.USAGE
    assert command[1] in done.stderr
