"""What a `ProgressReporter` needs, without a job: a worker with counts, a context that keeps events, no connection."""

from types import SimpleNamespace
from typing import Any

from topotrain.config.topology import Address
from topotrain.core.events import Event
from topotrain.training.reporting.logged_values import LoggedValues
from topotrain.training.worker_stats import WorkerStats


def context_of(me: Address, told: list[Event], **more: object) -> Any:
    """A worker's context, whose events come into `told`."""
    sink = SimpleNamespace(emit=told.append)
    return SimpleNamespace(me=me, emit=sink.emit, logged=LoggedValues(sink, str(me)), **more)


def worker_of(tally: WorkerStats, **more: object) -> Any:
    """A worker that has waited for nothing."""
    return SimpleNamespace(tally=tally, client=SimpleNamespace(channel=SimpleNamespace(waited=0.0)), **more)


def no_connections() -> Any:
    """Connections without traffic."""

    def reports(now: float, last: bool = False) -> tuple[Event, ...]:
        return ()

    return SimpleNamespace(traffic=lambda: (0, 0), link_traffic=lambda: (0, 0), reports=reports)
