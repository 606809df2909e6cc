"""Short runs of advised layouts on this machine.

They take a few seconds, and show predicted beside measured figures.

Each is a `topotrain run` of its own, in a workspace that is deleted. Units that would be hosts are processes of this
machine, with the link that was asked for between them. The prediction beside it is of these processes.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from topotrain.config.job import Job
from topotrain.config.job_file import dumps
from topotrain.core.events import StepDone
from topotrain.tools.advice.advice import Rehearsed
from topotrain.tools.advice.predictor import Predictor
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe

WARM_STEPS = 3
"""Steps of each worker that do not count: in these buffers are allocated."""
START_S = 60.0
"""Seconds within which the workers of a trial must have begun."""
END_S = 30.0
_POLL_S = 0.1
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
        off = self.predicted / self.measured - 1 if self.measured else 0.0
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


def tried(rehearsed: Sequence[Rehearsed], probe: Probe, predictor: Predictor, seconds: float) -> Iterator[Trial]:
    """Run layouts one after another, and yield the figures of each."""
    for each in rehearsed:
        job, machines = here(each.candidate.job, each.candidate.machines)
        predicted = predictor.predict(job, probe, machines).samples_per_s
        with TemporaryDirectory(prefix="topotrain-try-") as folder:
            rate, note = TrialRun(job, Path(folder), seconds).measure()
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


class TrialRun:
    """One `topotrain run` that ends after some seconds of steps.

    Args:
        job: with its program.
        folder: for its files.
        seconds: of steps that are measured.
    """

    def __init__(self, job: Job, folder: Path, seconds: float) -> None:
        # Snapshots and evaluations would be measured, too.
        cluster = replace(job.cluster, workspace=str(folder / "workspace"))
        self._job = replace(job, cluster=cluster, snapshot_s=0.0, checkpoint_freq=0, resume=False, rendezvous="")
        self._folder, self._seconds = folder, seconds

    def measure(self) -> tuple[float | None, str]:
        """Return the samples per second, or None and why there is no figure."""
        conf, log = self._folder / "trial.conf", self._folder / "log"
        conf.write_text(dumps(self._job), encoding="utf-8")
        command = [sys.executable, "-m", "topotrain", "run", str(conf), "--quiet"]
        with open(log, "wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            try:
                rates = self._follow(process)
            finally:
                ended = process.poll()
                _end(process)
        found = rates.samples_per_s()
        if found is None:
            return None, _why(ended, log)
        return found, ""

    def _follow(self, process: "subprocess.Popen[bytes]") -> StepRates:
        """Read the job's recording until enough is measured, or the job has ended."""
        from topotrain.tools.recording.recording_file import FILE, RecordingFollower

        rates, began = StepRates(), time.monotonic()
        with contextlib.closing(RecordingFollower(Path(self._job.workspace) / FILE)) as follower:
            while True:
                ended = process.poll() is not None
                for timed in follower.poll():
                    if isinstance(timed.event, StepDone):
                        rates.add(timed.event)
                late = rates.seconds == 0.0 and time.monotonic() - began > START_S
                if ended or late or rates.seconds >= self._seconds:
                    return rates
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run with all its processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def _why(code: int | None, log: Path) -> str:
    """Return why a run gave no figure."""
    if code is None:
        return f"no worker has made {WARM_STEPS + 2} steps within {START_S:g} s"
    if code == 0:
        return "the program has ended after too few steps"
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return f"it ended with code {code}: {' / '.join(lines[-_LINES:])}"
