"""``datastates verify``: are the bytes of a checkpoint those that were saved?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.text import Text

from datastates.attempt_folder import checkpoint_of
from datastates.checksum import crc32
from datastates.cli.checkpoints import find_checkpoint
from datastates.cli.console import byte_progress, json_option, path_text, print_json, print_rows, size_text
from datastates.cli.exit_codes import NEGATIVE, SUCCESS, Fault
from datastates.contents.parts import parts_of
from datastates.errors import CheckpointNotFoundError
from datastates.integrity import Problem, record_of, verify, verify_file
from datastates.manifest import commit_path
from datastates.paths import resolved
from datastates.reading import FileReader
from datastates.same_save import SameSave
from datastates.storage import read_chunks

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class _Result:
    """What was found in one checkpoint or file.

    Attributes:
        nbytes: that were to be read.
        is_checked: there was something to compare with.
        faults: kind and description of each problem.
        part: which node's part of a checkpoint it is, empty where it is all of it.
    """

    path: str
    nbytes: int
    seconds: float
    faults: list[tuple[Fault, Problem]]
    is_checked: bool = True
    part: str = ""


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(), metavar="CHECKPOINT...")
@json_option
@click.pass_context
def command(ctx: click.Context, /, checkpoints: tuple[str, ...], as_json: bool) -> None:
    """Read all of each CHECKPOINT and compare every byte with its checksum.

    CHECKPOINT is a checkpoint's folder, a folder whose "latest" names one, or a single file: of a checkpoint, or of
    torch, whose archives have checksums of their own. What is damaged is named by file, tensor and offset. The exit
    code tells the worst kind of fault.
    """
    results = [_verify(path, as_json) for path in checkpoints]
    if as_json:
        print_json([_plain(result) for result in results])
    else:
        print_rows([row for result in results for row in _rows(result)])
    faults = [fault for result in results for fault, _ in result.faults]
    if faults:
        ctx.exit(min(faults, key=list(Fault).index).exit_code)
    ctx.exit(SUCCESS if all(result.is_checked for result in results) else NEGATIVE)


def _verify(path: str, quiet: bool) -> _Result:
    begin = time.monotonic()
    if os.path.isdir(path):
        record = find_checkpoint(path)
        path, nbytes, is_checked, part = record.path, record.nbytes, True, str(record.part or "")
        if not record.is_committed:
            problem = Problem(path, record.problem)
            fault = Fault.RECORDS if os.path.exists(commit_path(path)) else Fault.INCOMPLETE
            return _Result(path, nbytes, 0.0, [(fault, problem)])
        with byte_progress(os.path.basename(path), nbytes, quiet=quiet) as advance:
            problems = verify(path, progress=advance)
        sizes = {os.path.join(path, name): size for name, size in record.file_nbytes.items()}
    else:
        if not os.path.exists(path):
            raise CheckpointNotFoundError(f"there is no file or folder {path}")
        path, nbytes = resolved(path), os.path.getsize(path)
        sizes, part = {}, ""
        with byte_progress(os.path.basename(path), nbytes, quiet=quiet) as advance:
            problems, is_checked = _verify_one(path, advance, sizes)
    faults = [(_fault_of(problem, sizes), problem) for problem in problems]
    return _Result(path, nbytes, time.monotonic() - begin, faults, is_checked, part)


def _verify_one(path: str, advance: Callable[[int], None], sizes: dict[str, int]) -> tuple[list[Problem], bool]:
    """The problems of a single file, and whether it has checksums at all; notes the size that it should have."""
    with SameSave([path]) as same:
        file, directory = record_of(path), checkpoint_of(path)
        if file is not None and directory is not None:
            sizes[path], nbytes = file.nbytes, os.path.getsize(path)
            if nbytes != file.nbytes:
                problems = [Problem(path, f"the file has {nbytes} bytes, expected {file.nbytes}")]
            else:
                problems = verify_file(directory, file)
                advance(file.nbytes)
            if problems:
                same.check()
            return problems, True
    with FileReader(path) as reader:
        parts = [part for part in parts_of(reader) if part.crc32 is not None]
    problems = []
    for part in parts:
        found = 0
        for chunk in read_chunks(path, part.begin, part.end, _READ_BYTES):
            found = crc32(chunk, found)
            advance(len(chunk))
        if found != part.crc32:
            message = (
                f"{part.name}: bytes {part.begin} to {part.end} have CRC-32 {found:08x}, expected {part.crc32:08x}"
            )
            name = part.name if part.is_tensor else ""
            problems.append(Problem(path, message, part.begin, name, part.crc32, found))
    return problems, bool(parts)


def _fault_of(problem: Problem, sizes: dict[str, int]) -> Fault:
    """Which kind of fault a problem is, by what stands on the disk."""
    if problem.expected is not None:
        return Fault.DAMAGED
    if problem.path not in sizes:
        return Fault.RECORDS
    if not os.path.exists(problem.path):
        return Fault.MISSING
    return Fault.SIZE if os.path.getsize(problem.path) != sizes[problem.path] else Fault.UNREADABLE


def _rows(result: _Result) -> Iterator[list[str | Text]]:
    if not result.is_checked:
        message = "nothing to compare with: the file has no checksums, and belongs to no checkpoint of datastates"
        yield [Text("unknown", style="yellow"), path_text(result.path), message]
    elif not result.faults:
        rate = size_text(result.nbytes / max(result.seconds, 1e-9))
        part = f"; {result.part}" if result.part else ""
        yield [Text("sound", style="green"), path_text(result.path), f"{size_text(result.nbytes)}, {rate}/s{part}"]
    for fault, problem in result.faults:
        yield [Text(fault.value, style="bold red"), path_text(problem.path), problem.message]


def _plain(result: _Result) -> dict[str, Any]:
    problems = [asdict(problem) | {"fault": fault.value} for fault, problem in result.faults]
    return {
        "path": result.path,
        "nbytes": result.nbytes,
        "seconds": result.seconds,
        "is_sound": result.is_checked and not problems,
        "is_checked": result.is_checked,
        "part": result.part,
        "problems": problems,
    }
