"""`cluster { auto: true }`: the fastest synchronous layout in short runs here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import dumps_cluster
from topotrain.config.topology import layout
from topotrain.launch.agent.worker_threads import allowed_cores
from topotrain.parallel.estimate.memory_check import memory_limits
from topotrain.tools.advice.advice import fastest
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.advice.candidate import Candidate
from topotrain.tools.advice.named_blocks import on_one_host
from topotrain.tools.advice.trial_runs import ShortRun, run_for
from topotrain.tools.probe.forked_processes import forked_processes

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
