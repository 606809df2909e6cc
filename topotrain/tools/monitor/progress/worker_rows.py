"""The states of the workers, from the events of a job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Exited, Failed, Finished, Left, Started, StepDone


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The state of one worker."""

    unit: int
    who: str
    step: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0  # mean since its first step
    staleness_mean: float = 0.0
    staleness_max: int = 0
    state: str = "starting"


class WorkerRows:
    """The rows of all workers."""

    def __init__(self, topology: Topology) -> None:
        self._rows: dict[str, WorkerRow] = {}
        self.lay_out(topology)

    def lay_out(self, topology: Topology) -> None:
        """Use this layout from now on. Rows of workers that stay are kept."""
        workers = [worker for unit in topology.units for worker in unit.workers]
        rows = [WorkerRow(topology.unit_of(worker), str(worker)) for worker in workers]
        self._rows = {row.who: replace(self._rows.get(row.who, row), unit=row.unit) for row in rows}

    def __call__(self, event: Event) -> None:
        """Update the rows by one event."""
        match event:
            case Started(who=who) if who in self._rows:
                self._change(who, state="preparing")
            case StepDone(who=who) if who in self._rows:
                self._rows[who] = _stepped(self._rows[who], event)
            case Finished(who=who) if who in self._rows:
                self._change(who, state="finished", step=event.steps)
            case Failed(who=who) if who in self._rows:
                self._change(who, state="failed")
            case Left(group=group):
                for who in self._rows:
                    if who.startswith(f"worker {group}/"):
                        self._change(who, state="away")
            case Exited(who=who) if who in self._rows and event.code != 0 and self._rows[who].state != "failed":
                self._change(who, state="stopped")  # a failed worker has reported it; the others are being stopped
            case _:
                pass

    def all(self) -> list[WorkerRow]:
        """Return every worker's row, in layout order."""
        return list(self._rows.values())

    def _change(self, who: str, state: str, step: int | None = None) -> None:
        row = self._rows[who]
        # Replaced and never changed: the thread that draws reads rows without a lock.
        self._rows[who] = replace(row, state=state, step=row.step if step is None else step)


def _stepped(row: WorkerRow, event: StepDone) -> WorkerRow:
    return replace(
        row,
        step=event.step,
        loss=row.loss if event.loss is None else event.loss,
        samples_per_s=event.samples / event.time if event.time > 0 else 0.0,
        staleness_mean=event.staleness_mean,
        staleness_max=event.staleness_max,
        state="training",
    )


def describe(rows: Sequence[WorkerRow]) -> str:
    """Describe all workers in one line."""
    low, high = min(row.step for row in rows), max(row.step for row in rows)
    steps = f"step {high}" if low == high else f"steps {low} to {high}"
    losses = [row.loss for row in rows if row.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
    rate = sum(row.samples_per_s for row in rows)
    mean = sum(row.staleness_mean for row in rows) / len(rows)
    worst = max(row.staleness_max for row in rows)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{steps}  {loss}{rate:,.0f} samples/s  staleness {mean:.2f} (max {worst})  workers: {states}"
