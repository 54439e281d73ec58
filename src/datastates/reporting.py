"""What one rank says of its saves, in records, metrics and the log."""

from __future__ import annotations

from datastates.commit_log import CommitLog
from datastates.config import CheckpointConfig
from datastates.events import EventLog, Listener
from datastates.openmetrics import MetricsFile, metrics_path
from datastates.run_meter import RunMeter


class Reporting:
    """Opens what the config wants to have written.

    Attributes:
        events: receives the records; whoever takes it over closes it.
        commit_log: is to hear of each attempt that is committed.
    """

    def __init__(self, config: CheckpointConfig, rank: int, listener: Listener | None) -> None:
        """Args:
        config: the settings.
        rank: this process's.
        listener: receives the records, too, see `EventLog.add`.

        Raises:
            OSError: a file cannot be made.
        """
        self.events = _open_events(config, rank, listener)
        meter = RunMeter(config.host_cache_bytes)
        self.events.add(meter.note)
        self.commit_log = CommitLog(self.events, meter)


def _open_events(config: CheckpointConfig, rank: int, listener: Listener | None) -> EventLog:
    events = EventLog(rank, config.events_dir, listener)
    if config.metrics_dir is not None:
        try:
            metrics = MetricsFile(metrics_path(config.metrics_dir, rank))
        except BaseException:
            events.close()
            raise
        events.add(metrics, metrics.end)
    return events
