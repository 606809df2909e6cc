"""The result of a prediction, for one job on certain machines.

Nothing here needs torch. Times are seconds, sizes are bytes.
"""

import json
from dataclasses import asdict, dataclass

VERSION = 1


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
    """A process that the others wait for: seconds in a step, as a mean over those that wait."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BusyResource:
    """A resource such as "server 0/1's link out", and the share of the time in which it is busy."""

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
    """The updates between the values of which a gradient was computed and its own update."""

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
