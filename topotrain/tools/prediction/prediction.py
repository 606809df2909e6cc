"""The result of a prediction, for one job on certain machines.

Nothing here needs torch. Times are seconds, sizes are bytes.
"""

import json
from dataclasses import asdict, dataclass

VERSION = 1


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the time of a worker's step goes, as a mean over all workers.

    Attributes:
        compute: the script, forward and backward.
        push: after the backward, until the last gradient has left the worker's link.
        apply: until the last server has updated its values.
        pull: until the new values are there.
        wait: for other processes.
    """

    compute: float
    push: float
    apply: float
    pull: float
    wait: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.push + self.apply + self.pull + self.wait


@dataclass(frozen=True, slots=True)
class Wait:
    """A process that the others wait for.

    seconds: in a step, as a mean over the workers that wait.
    """

    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BusyResource:
    """A resource such as "server 0/1's link out" or "cores of host 0".

    share: of the time in which it is busy.
    """

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The messages from one process to another one in a step, as a mean.

    Attributes:
        name: sender and receiver, as in "worker 0/0 > server 0/1".
        nbytes: with headers.
        messages: their number.
        between_hosts: whether the two are on different hosts.
    """

    name: str
    nbytes: float
    messages: float
    between_hosts: bool


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The training state of one process, by the plan. process: such as "worker 0/0"."""

    process: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of gradients, in updates of other workers.

    It counts the updates between the values that a gradient was computed with and its own update.
    """

    mean: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted behavior of one layout.

    Attributes:
        framework: the name of the layout.
        processes: that run workers or servers.
        step_s: median time of a worker's step.
        step_p95_s: of twenty steps one is longer.
        samples_per_s: of the whole job.
        parts: where the time of a step goes.
        waits: the processes that are waited for, the longest wait first.
        busiest: resources, the busiest first.
        links: between each two processes that exchange messages.
        memory: of each process, as `topotrain plan` estimates it.
        staleness: of the gradients.
        start_s: from the start of the job until the first step.
        goodput: share of the time that is left of failures. None: no failures were asked for.
        error: the relative error to expect of `step_s`. None: none was measured for such a job.
        same_as_one_process: whether the updates are those of one process: synchronous, and nothing is lossy.
        seed: of the random draws.
    """

    framework: str
    processes: int
    step_s: float
    step_p95_s: float
    samples_per_s: float
    parts: StepParts
    waits: tuple[Wait, ...]
    busiest: tuple[BusyResource, ...]
    links: tuple[LinkLoad, ...]
    memory: tuple[ProcessMemory, ...]
    staleness: Staleness
    start_s: float
    goodput: float | None
    error: float | None
    same_as_one_process: bool
    seed: int = 0

    @property
    def useful_samples_per_s(self) -> float:
        """Samples per second that are left of failures."""
        return self.samples_per_s * (1.0 if self.goodput is None else self.goodput)

    def to_json(self) -> str:
        """Return the prediction as a line of JSON."""
        return json.dumps({"version": VERSION, **asdict(self)})
