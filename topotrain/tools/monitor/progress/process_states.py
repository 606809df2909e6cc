"""The processes of a job for report and terminal, by its topology."""

from collections import Counter
from collections.abc import Collection, Sequence

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Resized
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.recording.process_table import ProcessTable, ProcessTrack
from topotrain.tools.recording.recorded_layout import layout_data


class ProcessStates(ProcessTable):
    """Follows the processes of a topology, also where a resize changes it.

    Args:
        topology: the layout of the job.
        now: the time.
    """

    def __init__(self, topology: Topology, now: float) -> None:
        super().__init__()
        self._lay_out(topology, now)

    def _lay_out(self, topology: Topology, now: float) -> None:
        self.topology = topology
        self.use(layout_data(topology), now)

    def shown(self) -> Sequence[ProcessTrack]:
        """Return the processes, without servers that have no process of their own."""
        return [process for process in self.all() if not (process.is_server and self.servers_in_workers)]

    def workers(self) -> Sequence[ProcessTrack]:
        return [process for process in self.all() if not process.is_server]

    def on_event(self, event: Event, now: float) -> Collection[ProcessTrack]:
        if isinstance(event, Resized):
            self._lay_out(resized_layout(self.topology, event.workers), now)
        return super().on_event(event, now)


def describe(workers: Sequence[ProcessTrack]) -> str:
    low, high = min(each.figures.step for each in workers), max(each.figures.step for each in workers)
    steps = f"step {high}" if low == high else f"steps {low} to {high}"
    # As on the page: those of dead and absent workers are figures of an earlier time.
    counted = [each for each in workers if each.ending not in ("failed", "away")]
    losses = [each.figures.loss for each in counted if each.figures.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
    active = [each for each in counted if each.word == "training"] or counted
    rate = sum(each.figures.samples_per_s or 0.0 for each in active)
    mean = sum(each.figures.staleness.mean for each in workers) / len(workers)
    worst = max(each.figures.staleness.max for each in workers)
    counts = Counter(each.word for each in workers)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{steps}  {loss}{rate:,.0f} samples/s  staleness {mean:.2f} (max {worst})  workers: {states}"
