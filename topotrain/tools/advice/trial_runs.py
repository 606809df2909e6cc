"""Short runs of layouts on this machine.

Those of `advise --try` and of `cluster { auto: true }` are alike. Each is a job of its own, in a workspace that is
deleted. Units that would be hosts are processes of this machine, with the link that was asked for between them. The
prediction beside a run is of these processes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import dumps_cluster
from topotrain.config.topology import layout
from topotrain.core.events import Event, Resources, StepDone
from topotrain.launch.agent.worker_threads import allowed_cores
from topotrain.parallel.estimate.memory_check import memory_limits
from topotrain.tools.advice.advice import Predictor, Rehearsed, fastest
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.advice.candidate import Candidate
from topotrain.tools.advice.named_blocks import on_one_host
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.probe.forked_processes import ForkedProcesses, forked_processes
from topotrain.tools.probe.probe_file import Probe

WARM_STEPS = 3
"""Steps of each worker that do not count: in these buffers are allocated."""
START_S = 60.0
"""Seconds within which the workers of a trial must have begun."""
NO_SAMPLES = "its samples are not counted, because it gives tt.prepare no loader"
_LINES = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """A layout with its predicted and measured samples per second on this machine."""

    layout: str
    predicted: float
    measured: float | None  # None: the run gave no figure
    note: str = ""  # why not

    def explain(self) -> str:
        if self.measured is None:
            return f"{self.layout}: predicted {self.predicted:,.0f} samples/s, not measured: {self.note}"
        off = self.predicted / self.measured - 1
        return (
            f"{self.layout}: predicted {self.predicted:,.0f} samples/s, measured {self.measured:,.0f} "
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
            run = run_for(processes, job, seconds)
            rate, note = run.samples_per_s, run.note
            yield Trial(each.candidate.label, predicted, rate or None, NO_SAMPLES if rate == 0 else note)


class ShortRun:
    """The figures of one run: each worker counts from its first warm step to its last."""

    def __init__(self) -> None:
        self._first: dict[str, StepDone] = {}
        self._last: dict[str, StepDone] = {}
        self.process_bytes = 0  # of the largest process
        self.failed = False
        self.note = ""  # why there is no figure

    def add(self, event: Event) -> None:
        if isinstance(event, Resources):
            self.process_bytes = max(self.process_bytes, event.memory_bytes)
        if isinstance(event, StepDone) and event.step > WARM_STEPS:
            self._first.setdefault(event.who, event)
            self._last[event.who] = event

    @property
    def seconds(self) -> float:
        """The shortest time of any worker that has begun; 0: none has."""
        return min((self._last[who].time - self._first[who].time for who in self._first), default=0.0)

    @property
    def step_samples(self) -> int:
        """The samples of a step of one worker; 0: not known."""
        return min((last.samples // last.step for last in self._last.values()), default=0)

    @property
    def samples_per_s(self) -> float | None:
        """The sum of the workers' rates; None: too few steps."""
        return self._rate(lambda event: event.samples)

    @property
    def steps_per_s(self) -> float | None:
        return self._rate(lambda event: event.step)

    def _rate(self, count: Callable[[StepDone], int]) -> float | None:
        pairs = [(self._first[who], self._last[who]) for who in self._first]
        rates = [
            (count(last) - count(first)) / (last.time - first.time) for first, last in pairs if last.time > first.time
        ]
        return sum(rates) if rates else None


class _Over(Exception):
    """Enough steps are measured, or none has come in time."""


def run_for(processes: ForkedProcesses, job: Job, seconds: float) -> ShortRun:
    """Run a job for some seconds of steps."""
    run, began = ShortRun(), time.monotonic()

    def on_event(event: Event) -> None:
        run.add(event)
        late = run.seconds == 0.0 and time.monotonic() - began > START_S
        if late or run.seconds >= seconds:
            raise _Over

    with TemporaryDirectory(dir=processes.folder) as folder:
        # Snapshots and evaluations would be measured, too.
        cluster = replace(job.cluster, workspace=f"{folder}/workspace")
        job = replace(job, cluster=cluster, snapshot_s=0.0, checkpoint_freq=0, resume=False, rendezvous="")
        try:
            failed = processes.run_job(job, on_event)
            run.note = "the program has ended after too few steps"
            if failed:
                run.failed, run.note = True, f"it failed: {' / '.join(failed.splitlines()[-_LINES:])}"
        except _Over:
            run.note = f"no worker has made {WARM_STEPS + 2} steps within {START_S:g} s"
    return run


RUN_S = 3.0
"""Seconds of steps that a run measures."""


@dataclass(frozen=True, slots=True)
class AutomaticLayout:
    """The chosen layout, and why. job: as if its block had been written by hand."""

    job: Job
    reason: str

    def explain(self) -> str:
        """Return two lines: which layout and why, and the block to write by hand."""
        kept = dumps_cluster(without_layout(self.job).cluster).splitlines()
        # Each field of a synchronous layout is a line below "cluster {".
        lines = [line for line in dumps_cluster(self.job.cluster).splitlines()[1:-1] if line not in kept]
        block = " ".join(["cluster {", *(line.strip() for line in lines), "}"])
        return f"auto: {self.reason}\nauto: by hand this is {block}"


def choose(job: Job, served: str = "", show: Callable[[str], None] = lambda text: None) -> AutomaticLayout:
    """Run this machine's synchronous layouts for some seconds; choose the fastest.

    served: the socket of a running forkserver; "": one is started. show: shows which layout runs.

    Raises:
        ConfigError: the program fails with one worker.
    """
    with forked_processes(served) as processes:

        def measure(candidate: Candidate) -> ShortRun:
            show(f"measuring {candidate.label}")
            return run_for(processes, candidate.job, RUN_S)

        (alone,) = _candidates(job, 1)
        first = measure(alone)
        if first.failed:
            raise ConfigError("program", job.program, first.note)
        if not first.steps_per_s:
            return AutomaticLayout(alone.job, f"{alone.label}, because nothing could be compared: {first.note}")
        others = list(_candidates(job, _workers(job, first)))[1:]
        runs = [(alone, first), *((each, measure(each)) for each in others)]
    # Without a loader samples are not counted.
    unit = "samples" if first.samples_per_s else "steps"
    speeds = [(each, run.samples_per_s if unit == "samples" else run.steps_per_s) for each, run in runs]
    return _chosen([(each, speed) for each, speed in speeds if speed], unit)


def _candidates(job: Job, workers: int) -> Iterator[Candidate]:
    """Yield the layouts that compute the same as one process, one worker first."""
    bare = without_layout(job)
    for block in on_one_host(workers):
        # Whether gradients may be hidden, only the script knows.
        if block.job:
            continue
        its = replace(bare, cluster=replace(bare.cluster, **block.cluster))
        candidate = Candidate(its, layout(its.cluster), setting=block.setting)
        if not candidate.changes:
            yield candidate


def _workers(job: Job, alone: ShortRun) -> int:
    """Return for how many workers this machine has cores, memory and samples."""
    most, memory = allowed_cores(), memory_limits().machine
    if alone.step_samples and not job.per_worker_batch:
        most = min(most, alone.step_samples)
    if memory is not None and alone.process_bytes:
        most = min(most, memory // alone.process_bytes)
    return max(1, most)


def _chosen(found: Sequence[tuple[Candidate, float]], unit: str) -> AutomaticLayout:
    winner = found[fastest(found)]
    others = sorted((each for each in found if each is not winner), key=lambda each: -each[1])
    first, *following = (f"{candidate.label}: {speed:,.0f} {unit}/s" for candidate, speed in (winner, *others[:1]))
    next_one = "".join(f"; next: {text}" for text in following)
    return AutomaticLayout(winner[0].job, f"{first}, measured here in at most {RUN_S:g} s{next_one}")
