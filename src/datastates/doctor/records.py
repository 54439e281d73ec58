"""What the records of a run say about its settings: whether saves outrun the disk, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from datastates.advice import Advice, Measured, advise, widest
from datastates.config import GIB
from datastates.doctor.findings import Finding, good, warning
from datastates.figures import figure
from datastates.record_files import read_records
from datastates.run_view import seen_in


def record_findings(path: str) -> Iterator[Finding]:
    """Findings about a folder of records, one file of it, or a folder of checkpoints that has it as ``events``.

    Raises:
        CheckpointNotFoundError: there are none.
        OSError: they cannot be read.
    """
    view, saves = seen_in(read_records(path))
    lost = [save for save in saves if save.failure]
    num_committed = sum(save.committed_at is not None for save in saves)
    message = f"of {len(saves)} saves {num_committed} were committed, {len(lost)} lost or skipped"
    yield (
        warning("saves", f"{message}, the last: {lost[-1].path}: {lost[-1].failure}")
        if lost
        else good("saves", message)
    )
    measured = [rank.meter.measured for rank in view.present.values()]
    advised = [(one, advice) for one in measured if (advice := advise(one)) is not None]
    overall = widest(advice for _, advice in advised)
    if overall is None:
        return
    slowest, _ = max(advised, key=lambda found: found[1].interval_seconds)
    yield _pace(slowest)
    yield _interval(slowest, overall)
    if slowest.host_cache_bytes:
        yield _cache(slowest, overall)


def _pace(measured: Measured) -> Finding:
    parts = [f"the slowest rank saves {figure(measured.nbytes / GIB)} GiB at a time"]
    for text, rate in (("copies", measured.copy_nbytes_per_second), ("writes", measured.flush_nbytes_per_second)):
        if rate is not None:
            parts.append(f"{text} {figure(rate / GIB)} GiB/s")
    if measured.step_seconds is not None:
        parts.append(f"takes {figure(measured.step_seconds)} s for a step without saves")
    return good("pace", ", ".join(parts))


def _interval(measured: Measured, advice: Advice) -> Finding:
    until = f"{figure(advice.committed_seconds)} s until one is committed"
    if measured.interval_seconds is None:
        return good("interval", f"{until}: a save every {advice.interval_text} or less often is sustainable")
    steps = "" if not measured.num_steps else f" ({figure(measured.num_steps)} steps)"
    what = f"{figure(measured.interval_seconds)} s{steps} between saves, {until}"
    if advice.is_outrun:
        return warning("interval", f"{what}: saves pile up, and training waits", advice.interval_remedy)
    return good("interval", f"{what}: sustainable")


def _cache(measured: Measured, advice: Advice) -> Finding:
    cache = f"{figure(measured.host_cache_bytes / GIB)} GiB of host cache"
    if advice.is_cache_short:
        held = f"each save holds training back for {figure(advice.held_seconds)} s"
        return warning("cache", f"{cache}: {held}", advice.cache_remedy)
    return good("cache", f"{cache}: it hides a save")
