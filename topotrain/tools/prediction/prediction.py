"""The result of a prediction, for one job on certain machines.

Nothing here needs torch. Times are seconds, sizes are bytes.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from topotrain.tools.plan.layout_plan import columns

VERSION = 1
_SHOWN = 4
_BUSY, _IDLE = 0.8, 0.3
"""A resource that is busy for a larger share of the time bounds the job. Below the other one it does not matter."""
_PARTS = (
    ("compute", "script, forward and backward"),
    ("push", "until the last gradient, and the commit, are on their servers"),
    ("wait", "for those of other workers"),
    ("apply", "servers add up, agree and update"),
    ("pull", "until the mean, and the new values, are here"),
)


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the time of a worker's step goes, as a mean over all workers."""

    compute: float  # the script, forward and backward
    push: float  # after the backward, until the last gradient has left the worker's link
    apply: float  # until the last server has updated its values
    pull: float  # until the new values are there
    wait: float  # for other processes

    @property
    def total(self) -> float:
        return self.compute + self.push + self.apply + self.pull + self.wait


@dataclass(frozen=True, slots=True)
class Wait:
    """A process, and the mean seconds in a step for which others wait for it."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BusyResource:
    """A resource such as "server 0/1's link out", and its busy share of the time."""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The messages from one process to another one in a step, as a mean."""

    name: str  # such as "worker 0/0 > server 0/1"
    nbytes: float  # with headers
    messages: float
    between_hosts: bool


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The training state of one process, such as "worker 0/0"."""

    process: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Staleness:
    """The updates between the values of a gradient and its own update."""

    mean: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted behavior of one layout."""

    framework: str
    processes: int  # that run workers or servers
    step_s: float  # the median of a worker's step
    step_p95_s: float
    samples_per_s: float  # of the whole job
    parts: StepParts
    waits: tuple[Wait, ...]  # the longest first
    busiest: tuple[BusyResource, ...]  # the busiest first
    links: tuple[LinkLoad, ...]
    memory: tuple[ProcessMemory, ...]  # as `topotrain plan` estimates it
    staleness: Staleness
    start_s: float  # from the start of the job until the first step
    goodput: float | None  # share of the time that is left of failures; None: no failures were asked for
    error: float | None  # the relative error to expect of `step_s`; None: none was measured for such a job
    same_as_one_process: bool  # the updates are those of one process: synchronous, and nothing is lossy
    seed: int = 0

    @property
    def useful_samples_per_s(self) -> float:
        """Samples per second that are left of failures."""
        return self.samples_per_s * (1.0 if self.goodput is None else self.goodput)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})

    def explain(self) -> str:
        """Return the prediction as text: a short table, and sentences that can be checked."""
        head = f"{self.framework}, {self.processes} workers and servers"
        said = (*self._resources(), *self._traffic(), self._updates(), *self._costs(), *self._how())
        return "\n".join([head, "", *self._table(), "", *said])

    def _table(self) -> Iterator[str]:
        yield f"step       {_time(self.step_s)}, of twenty one takes {_time(self.step_p95_s)}"
        yield f"samples    {self.samples_per_s:,.4g} per second"
        whole = self.parts.total or 1.0
        for name, text in _PARTS:
            seconds = getattr(self.parts, name)
            yield f"  {name:<7}  {_time(seconds):>10}  {seconds / whole:4.0%}  {text}"

    def _resources(self) -> Iterator[str]:
        for resource in self.busiest[:1]:
            tail = ": it bounds the job" if resource.share > _BUSY else ""
            if resource.share < _IDLE:
                tail = ": no resource is full, and messages on their way take the rest of the time"
            yield f"{resource.name}: busy for {resource.share:.0%} of the time{tail}"
        rest = ", ".join(f"{each.name} {each.share:.0%}" for each in self.busiest[1:_SHOWN] if each.share >= 0.005)
        if rest:
            yield f"after it: {rest}"
        for wait in self.waits[:1]:
            yield f"{wait.process} is waited for most: {_time(wait.seconds)} of a step"

    def _traffic(self) -> Iterator[str]:
        far = [link for link in self.links if link.between_hosts]
        where = "between hosts" if far else "between processes of a host"
        shown = sorted(far or self.links, key=lambda link: -link.nbytes)
        if not shown:
            yield "links: no messages between processes"
            return
        whole, count = sum(link.nbytes for link in shown), sum(link.messages for link in shown)
        yield f"links: {_size(whole)} and {count:,.4g} messages in a step {where}; the most:"
        rows = [(f"  {link.name}", _size(link.nbytes), f"{link.messages:,.4g} messages") for link in shown[:_SHOWN]]
        yield from columns(("  link", "in a step", ""), rows)[1:]

    def _updates(self) -> str:
        stale = self.staleness
        if self.same_as_one_process:
            return "updates: as in one process: synchronous, and nothing is lossy"
        if not stale.max:
            return "updates: not those of one process; no gradient is stale"
        return (
            f"updates: not those of one process; a gradient is {stale.mean:.3g} updates old, of twenty one "
            f"{stale.p95:g}, at most {stale.max:g}"
        )

    def _costs(self) -> Iterator[str]:
        if self.memory:
            most = max(self.memory, key=lambda each: each.nbytes)
            held = f"{_size(most.nbytes)} of training state in {most.process}"
            yield f"memory: {held}, the most of all; without activations"
        yield f"start: {self.start_s:,.3g} s until the first step"
        if self.goodput is not None:
            left = f"{self.useful_samples_per_s:,.4g} samples per second"
            yield f"failures: {self.goodput:.1%} of the steps are left, {left}"

    def _how(self) -> Iterator[str]:
        how = f"how: rehearsed with the job's own servers and workers in virtual time (seed {self.seed})"
        yield how if self.error is None else f"{how}; expect the step within {self.error:.0%}"
        if self.error is None:
            none = f"no error was measured for {self.processes} processes on such hosts"
            yield f"error: {none}, only for two workers on the probed one"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _size(nbytes: float) -> str:
    """Return bytes as text, in units of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:,.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.4g} GB"
