"""Advice for a running job, from its own measurements.

It says whether another layout would be faster for the job.

The probe of its program is brought to what the job says: computing takes as long as its workers need, and the slow
ones among them are stragglers. The layout that it has is predicted as well. The measured speed over the
predicted one is a factor for all other layouts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.extensions.elastic.eligibility import leave_refusal
from topotrain.launch.recovery.resize import resized
from topotrain.tools.advice.advice import Advice, advise
from topotrain.tools.advice.advice_reasons import reason
from topotrain.tools.advice.candidate import Candidate, Family, LeftOut
from topotrain.tools.advice.candidate_list import CandidateSource
from topotrain.tools.advice.job_measurements import JobMeasurement, MeasuredWorker
from topotrain.tools.advice.layout_search import Rehearsed, SearchListener
from topotrain.tools.advice.predictor import Predictor
from topotrain.tools.advice.wishes import Wishes
from topotrain.tools.prediction.host_resources import sharing_on, slowdown
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.measured_errors import LARGEST, error_in_words
from topotrain.tools.probe.probe_file import Probe

SLOW = 1.15
"""A worker that computes so many times as long as the median one is a straggler."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another layout for a running job.

    Attributes:
        label: of the layout.
        how: a command. Empty: the job must be started again, with this block.
        samples_per_s: predicted and left of failures, times what is measured over what is predicted now.
        gain: over the present speed, 0.1 for a tenth more.
        error: the expected relative error of the prediction. None: not measured for such a job.
        changes: of the statistics.
        reason: in words.
    """

    label: str
    how: str
    samples_per_s: float
    gain: float
    error: float | None
    changes: tuple[str, ...]
    reason: str

    @property
    def is_clear(self) -> bool:
        """Whether the gain is larger than the prediction's error, or any measured one."""
        return self.gain > (LARGEST if self.error is None else self.error)


@dataclass(frozen=True, slots=True)
class RunningAdvice:
    """The present layout, and others by their speed.

    Attributes:
        present: the label of the layout that runs.
        measured: samples per second of the job.
        predicted: of this layout, with what the job has measured.
        goodput: share of the present speed that failures leave. None: no failures were asked for.
        stragglers: numbers of slow workers, and how many times longer they compute.
        reachable: by `topotrain jobs join` and `leave`.
        others: by another block.
        left_out: what cannot be reached, and why.
    """

    present: str
    measured: float
    predicted: float
    goodput: float | None
    stragglers: dict[int, float]
    reachable: tuple[Change, ...]
    others: tuple[Change, ...]
    left_out: tuple[LeftOut, ...]

    def as_data(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "version": 1,
            "present": self.present,
            "measured_samples_per_s": self.measured,
            "predicted_samples_per_s": self.predicted,
            "goodput": self.goodput,
            "stragglers": {str(number): factor for number, factor in self.stragglers.items()},
            "reachable": [_change_data(each) for each in self.reachable],
            "others": [_change_data(each) for each in self.others],
            "not_considered": [{"what": each.what, "why": each.why} for each in self.left_out],
        }

    def explain(self) -> str:
        """Return the advice as lines."""
        lines = [f"now: {self.present}: {self.measured:,.0f} samples/s measured, {self.predicted:,.0f} predicted"]
        if self.goodput is not None:
            lines.append(f"failures: {self.goodput:.1%} of its steps are left; the speeds below are without the others")
        slow = (
            f"worker number {number} computes {times:.1f} times as long" for number, times in self.stragglers.items()
        )
        lines += slow
        for title, found in (("with join and leave:", self.reachable), ("with another block:", self.others[:3])):
            if found:
                lines += [title, *(f"  {_change_text(each)}" for each in found)]
        lines += [f"not considered: {each.what}: {each.why}" for each in self.left_out]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        clear = [each for each in self.reachable if each.is_clear]
        if clear:
            best = max(clear, key=lambda each: each.gain)
            return f"advised: {best.how}: {best.gain:+.0%}"
        better = [each for each in self.others if each.is_clear]
        if better:
            best = max(better, key=lambda each: each.gain)
            return f"advised: start again from a snapshot with {best.label}: {best.gain:+.0%}"
        return "advised: no change: no other layout is faster by more than the error of its prediction"


@dataclass(frozen=True)
class RunningComparison:
    """Compares the layout of a running job with others.

    Attributes:
        measurement: of the job.
        probe: of its program.
        machines: link and memory that the user has given.
        job: the fields of the job beside its cluster block.
        predictor: of layouts.
    """

    measurement: JobMeasurement
    probe: Probe
    machines: Machines
    job: Job
    predictor: Predictor

    def compare(self, wishes: Wishes, listener: SearchListener | None = None) -> RunningAdvice:
        """Return the advice.

        Raises ConfigError where the job's own layout cannot be predicted.
        """
        job = replace(self.job, cluster=self._present())
        probe, machines = self.calibrated(), self._machines()
        # With its own numbers: a straggler of a running job is a worker.
        now = self.predictor.predict(job, probe, machines)
        # The measured steps had no failure.
        factor = self.measurement.samples_per_s / now.samples_per_s
        scale = _Scale(now.useful_samples_per_s * factor, factor)
        left_out: list[LeftOut] = []
        near = []
        for how, cluster, slow in self._near(left_out):
            try:
                near.append(self._change(scale, how, replace(job, cluster=cluster), replace(machines, stragglers=slow)))
            except ConfigError as error:
                left_out.append(LeftOut(how, str(error)))
        advice = advise(probe, self._by_host(machines), job, wishes, self.predictor, listener)
        present = Candidate(Family.OWN, job, machines.topology(job, probe.transports["tcp"].mbit), machines)
        others = tuple(
            _other(scale, advice, each) for each in advice.rehearsed if each.candidate.job.cluster != job.cluster
        )
        return RunningAdvice(
            present=present.label,
            measured=self.measurement.samples_per_s,
            predicted=now.samples_per_s,
            goodput=now.goodput,
            stragglers=dict(machines.stragglers),
            reachable=tuple(sorted(near, key=lambda each: -each.gain)),
            others=others,
            left_out=(*left_out, *advice.left_out),
        )

    def calibrated(self) -> Probe:
        """Return the probe with the times of the job's usual workers."""
        workers = self.measurement.workers
        scale = median(worker.compute_s / self._probed_s(worker) for worker in workers)
        batch = self.probe.batch
        names = ("forward_s", "backward_s", "other_s", "fixed_s", "per_sample_s")
        slower = {name: getattr(batch, name) * scale for name in names}
        return replace(self.probe, batch=replace(batch, **slower))

    def _probed_s(self, worker: MeasuredWorker) -> float:
        """Return how long a worker would compute by the probe.

        The other workers of its host compute at the same time.
        """
        batch = self.probe.batch
        beside = max(1, len(self.measurement.workers) // self.measurement.hosts)
        return (batch.compute_s(max(1, round(worker.samples))) + batch.other_s) * slowdown(
            beside, *sharing_on(self.machines, self.probe)
        )

    def _present(self) -> Cluster:
        """Return the block without groups that have left."""
        cluster = self.measurement.cluster
        return replace(cluster, nworker_groups=cluster.nworker_groups - len(self.measurement.away))

    def _machines(self) -> Machines:
        """Return the machines with the slow workers of the job as stragglers.

        The numbers of the stragglers are those among the present workers.
        """
        given = replace(self.machines, hosts=0 if self.measurement.hosts == 1 else self.measurement.hosts)
        usual = median(worker.compute_s / self._probed_s(worker) for worker in self.measurement.workers)
        slow = {}
        ordered = sorted(self.measurement.workers, key=lambda worker: (worker.group, worker.index))
        for number, worker in enumerate(ordered):
            times = worker.compute_s / self._probed_s(worker) / usual
            if times >= SLOW:
                slow[number] = times
        return replace(given, stragglers=slow).with_job(replace(self.job, cluster=self._present()))

    def _by_host(self, machines: Machines) -> Machines:
        """Return the machines with stragglers as an advice takes them.

        With several hosts the stragglers are hosts.
        """
        if machines.hosts <= 1:
            return machines
        topology = replace(machines, stragglers={}).topology(replace(self.job, cluster=self._present()))
        members = topology.workers_per_group
        hosts: dict[int, float] = {}
        for number, times in machines.stragglers.items():
            worker = topology.workers(number // members)[number % members]
            hosts[topology.host_of(worker)] = times
        return replace(machines, stragglers=hosts)

    # ---- layouts that the running job can change to ------------------------------------------------------------------

    def _near(self, left_out: list[LeftOut]) -> Iterator[tuple[str, Cluster, dict[int, float]]]:
        """Yield commands, the cluster after each of them, and its stragglers."""
        cluster, slow = self._present(), dict(self._machines().stragglers)
        if self.measurement.cluster.nworker_groups == 1:
            yield from self._resized(cluster, slow, left_out)
            return
        yield from self._leaving(cluster, slow, left_out)
        for group in sorted(self.measurement.away)[:1]:
            more = replace(cluster, nworker_groups=cluster.nworker_groups + 1)
            yield f"topotrain jobs join WORKSPACE --group {group}", more, slow

    def _resized(
        self, cluster: Cluster, slow: dict[int, float], left_out: list[LeftOut]
    ) -> Iterator[tuple[str, Cluster, dict[int, float]]]:
        members = cluster.nworkers_per_group
        for command, count in (("leave", members - 1), ("join", members + 1)):
            how = f"topotrain jobs {command} WORKSPACE --workers 1"
            if not count:
                continue
            try:
                # The last worker is the one that leaves.
                yield how, resized(cluster, count), {number: times for number, times in slow.items() if number < count}
            except ConfigError as error:
                left_out.append(LeftOut(how, str(error)))

    def _leaving(
        self, cluster: Cluster, slow: dict[int, float], left_out: list[LeftOut]
    ) -> Iterator[tuple[str, Cluster, dict[int, float]]]:
        """Yield the leaving of groups that can leave.

        Each slow group is among them, and one of all other groups.
        """
        members, job = cluster.nworkers_per_group, replace(self.job, cluster=self.measurement.cluster)
        topology = layout(job.cluster)
        present = sorted({worker.group for worker in self.measurement.workers})
        plain = False
        for place, group in enumerate(present):
            mine = range(place * members, (place + 1) * members)
            is_slow = any(number in slow for number in mine)
            if (plain and not is_slow) or len(present) == 1:
                continue
            how = f"topotrain jobs leave WORKSPACE --group {group}"
            why = leave_refusal(job, topology, group)
            if why:
                if is_slow:
                    left_out.append(LeftOut(how, why))
                continue
            plain = plain or not is_slow
            kept = {
                number - members * (number >= mine.stop): times for number, times in slow.items() if number not in mine
            }
            yield how, replace(cluster, nworker_groups=cluster.nworker_groups - 1), kept

    def _change(self, scale: "_Scale", how: str, job: Job, machines: Machines) -> Change:
        probe = self.calibrated()
        candidate = CandidateSource(probe, replace(machines, stragglers={}), job, Wishes()).candidate(Family.OWN, job)
        found = self.predictor.predict(job, probe, machines)
        rehearsed = Rehearsed(replace(candidate, machines=machines), found, candidate.bound(probe))
        return scale.change(rehearsed, how, reason(rehearsed, ()))


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scale of predictions.

    present: the speed now, as failures leave it. factor: what is measured over what is predicted.
    """

    present: float
    factor: float

    def change(self, one: Rehearsed, how: str, reason: str) -> Change:
        """Return a layout as a change of the present one."""
        rate = one.samples_per_s * self.factor
        changes = one.candidate.changes
        return Change(one.candidate.label, how, rate, rate / self.present - 1, one.prediction.error, changes, reason)


def _other(scale: _Scale, advice: Advice, one: Rehearsed) -> Change:
    return scale.change(one, "", advice.reason(one))


def _change_text(change: Change) -> str:
    what = f"{change.how}: {change.label}" if change.how else change.label
    marked = f" ({', '.join(change.changes)})" if change.changes else ""
    gain = f"{change.gain:+.0%} {error_in_words(change.error)}"
    return f"{what}{marked}: {change.samples_per_s:,.0f} samples/s, {gain}; {change.reason}"


def _change_data(change: Change) -> dict[str, Any]:
    names: Sequence[str] = ("label", "how", "samples_per_s", "gain", "error", "changes", "reason")
    return {name: getattr(change, name) for name in names}
