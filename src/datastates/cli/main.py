"""The group of commands: loads them when they are called, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import sys

import click

from datastates import __version__
from datastates.cli.console import printable
from datastates.cli.exit_codes import DEFECT, INTERRUPTED, exit_code_of, is_expected

COMMANDS = {
    "bench": "Save a state of a given size, and say which interval is sustainable.",
    "convert": "Rewrite a checkpoint in another layout.",
    "diff": "Show what differs between two checkpoints or two files.",
    "doctor": "Say which checkpoint engine will be active, and whether this machine suits the settings.",
    "fetch": "Bring a checkpoint from an object store or another tier to a folder.",
    "ls": "List the checkpoints in a folder.",
    "prune": "Show which older checkpoints are not needed, and remove them.",
    "show": "Show what a checkpoint or a file of one holds, without loading it.",
    "stats": "Show what the records of a run say about its saves.",
    "trace": "Write what each rank did when as a trace for Perfetto.",
    "verify": "Compare a checkpoint with its checksums.",
    "watch": "Show what a running job is doing, live.",
}
"""Name and one-line help of each command, so that ``--help`` need not import them."""


class CommandGroup(click.Group):
    """Imports ``datastates.cli.<name>`` when a command is called, and ends with the exit code of what went wrong."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"datastates.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"datastates.cli.{cmd_name}.command is no click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run a command.

        Exit codes are those of `datastates.cli.exit_codes`. What click itself knows how to end (wrong usage, a closed
        pipe) is left to it.
        """
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("datastates: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:  # the top of the program: whatever it is, it ends with a code
            if ctx.params.get("debug") or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            tell(error)
            ctx.exit(exit_code_of(error))


def tell(error: Exception) -> None:
    """Print an error on stderr as one line that says what to do."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    if not is_expected(error):
        text = f"{type(error).__name__}: {text} (exit code {DEFECT}: a defect of datastates; --debug shows where)"
    click.echo(f"datastates: {text}", err=True)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="datastates", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="On an error, show where it happened instead of one line.")
def main(debug: bool) -> None:  # noqa: ARG001 - read by CommandGroup.invoke
    """Lazy checkpoints for PyTorch and DeepSpeed: look at them, check them, convert them.

    Results go to standard output, progress and errors to standard error. Exit codes are listed in docs/cli.md.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an arrow must not end a command where only ASCII is known
