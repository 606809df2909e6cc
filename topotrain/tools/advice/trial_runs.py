"""Short runs of advised layouts on this machine.

They take a few seconds, and show predicted beside measured figures.

Each is a job of its own, in a workspace that is deleted. Units that would be hosts are processes of this
machine, with the link that was asked for between them. The prediction beside it is of these processes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from topotrain.config.job import Job
from topotrain.core.events import Event, StepDone
from topotrain.tools.advice.advice import Predictor, Rehearsed
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.probe.forked_processes import ForkedProcesses, forked_processes
from topotrain.tools.probe.probe_file import Probe

WARM_STEPS = 3
"""Steps of each worker that do not count: in these buffers are allocated."""
START_S = 60.0
"""Seconds within which the workers of a trial must have begun."""
_LINES = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """A layout with its predicted and measured speed on this machine.

    Speeds are in samples per second. measured: None where the run gave no figure. note: why not.
    """

    label: str
    predicted: float
    measured: float | None
    note: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {"layout": self.label, "predicted": self.predicted, "measured": self.measured, "note": self.note}

    def explain(self) -> str:
        """Return a line."""
        if self.measured is None:
            return f"{self.label}: predicted {self.predicted:,.0f} samples/s, not measured: {self.note}"
        off = self.predicted / self.measured - 1
        return (
            f"{self.label}: predicted {self.predicted:,.0f} samples/s, measured {self.measured:,.0f} "
            f"(the prediction is {abs(off):.0%} {'above' if off >= 0 else 'below'})"
        )


def here(job: Job, machines: Machines) -> tuple[Job, Machines]:
    """Return a job and machines in which the hosts are units of this machine."""
    if machines.hosts <= 1:
        return job, replace(machines, stragglers={})
    local = replace(job, cluster=replace(job.cluster, link=machines.link))
    return local, Machines().with_job(local)


def tried(
    rehearsed: Sequence[Rehearsed], probe: Probe, seconds: float, served: str = "", predictor: Predictor = predict
) -> Iterator[Trial]:
    """Run layouts one after another, and yield the figures of each.

    seconds: of measured steps. served: the socket of a running forkserver; "": one is started.
    """
    with forked_processes(served) as processes:
        for each in rehearsed:
            job, machines = here(each.candidate.job, each.candidate.machines)
            predicted = predictor(job, probe, machines).samples_per_s
            with TemporaryDirectory(dir=processes.folder) as folder:
                rate, note = _measure(processes, job, folder, seconds)
            yield Trial(each.candidate.label, predicted, rate, note)


class StepRates:
    """Adds up the samples of workers, each from its first warm step to its last."""

    def __init__(self) -> None:
        self._first: dict[str, StepDone] = {}
        self._last: dict[str, StepDone] = {}

    def add(self, event: StepDone) -> None:
        """Take note of a step."""
        if event.step > WARM_STEPS:
            self._first.setdefault(event.who, event)
            self._last[event.who] = event

    @property
    def seconds(self) -> float:
        """The shortest time of any worker that has begun; 0: none has."""
        return min((self._last[who].time - self._first[who].time for who in self._first), default=0.0)

    def samples_per_s(self) -> float | None:
        """Return the sum of the workers' rates; None: too few steps."""
        rates = [
            (last.samples - first.samples) / (last.time - first.time)
            for first, last in ((self._first[who], self._last[who]) for who in self._first)
            if last.time > first.time
        ]
        return sum(rates) if rates else None


class _Over(Exception):
    """Enough steps are measured, or none has come in time."""


def _measure(processes: ForkedProcesses, job: Job, folder: str, seconds: float) -> tuple[float | None, str]:
    """Run a job for some seconds of steps; return its samples per second, or None and why there is no figure."""
    # Snapshots and evaluations would be measured, too.
    cluster = replace(job.cluster, workspace=f"{folder}/workspace")
    job = replace(job, cluster=cluster, snapshot_s=0.0, checkpoint_freq=0, resume=False, rendezvous="")
    rates, began = StepRates(), time.monotonic()

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            rates.add(event)
        late = rates.seconds == 0.0 and time.monotonic() - began > START_S
        if late or rates.seconds >= seconds:
            raise _Over

    try:
        failed = processes.run_job(job, on_event)
        why = f"it failed: {' / '.join(failed.splitlines()[-_LINES:])}" if failed else ""
        why = why or "the program has ended after too few steps"
    except _Over:
        why = f"no worker has made {WARM_STEPS + 2} steps within {START_S:g} s"
    found = rates.samples_per_s()
    if found == 0:
        return None, "its samples are not counted, because it gives tt.prepare no loader"
    return found, why if found is None else ""
