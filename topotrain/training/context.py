"""The one global: what this process is in a job, if it is in one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from topotrain.comm.router import RouterConfig
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address
from topotrain.core.events import Event
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.launch.runtime.process_host import WorkerConnections
from topotrain.training.worker import Worker

Metric = float | Callable[[], float]


class TrafficCounter(Protocol):
    """Roads that count and can be left."""

    def traffic(self) -> tuple[int, int]: ...

    def close(self, finished: bool = True) -> None: ...


@dataclass(slots=True)
class Context:
    """A worker process of a job."""

    place: RouterConfig
    me: Address
    workspace: Path
    emit: Callable[[Event], None]
    shared_values: int | None = None  # descriptor of a memfd that several workers of the unit share
    worker: Worker | None = None
    roads: TrafficCounter | None = None
    loader: Any = None
    tables: Any = None  # keeping.InJob, once the script has a table
    split: Any = None  # splitting.Split, where the model is split over the group
    metrics: dict[str, Metric] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # what `tt.keep` was given, by name
    continuing: Any = None  # continuing.Continuing, once the script has prepared
    training: Any = None  # training.Training, once the script has prepared
    resumed: Any = None  # earlier.Past, where the job is continued
    finishing: Callable[[], None] | None = None
    parting: Callable[[], None] | None = None  # the last word of one that leaves while the job goes on
    spans: Recorder = SILENT
    roads_of: Callable[[RouterConfig, Address], WorkerConnections] = WorkerConnections
    gpus: bool = True  # `tt.device` may name one
    counted: bool = False  # the training loop goes by the number of batches that an epoch is said to have
    loop_ended: Callable[[], None] | None = None  # called where the script comes to the end of a pass, or of `epochs`
    leave: Callable[[], None] | None = None  # set where the script itself may end its part

    @property
    def is_main(self) -> bool:
        """Worker (0,0)."""
        return self.me.group == 0 and self.me.index == 0

    @property
    def number(self) -> int:
        """The worker's number in the job, from 0, group by group."""
        return self.me.group * self.place.topology.workers_per_group + self.me.index


class PlanRun(BaseException):
    """Carries what `prepare` got out of a script that was run only up to there (topotrain plan)."""

    def __init__(self, model: Any, optimizer: Any, loader: Any = None) -> None:
        super().__init__("planning")
        self.model = model
        self.optimizer = optimizer
        self.loader = loader


_current: Context | None = None
_planning = False
_prepared = False  # an ordinary process has called `tt.prepare`
_loops = 0  # so many loops over `tt.epochs` have begun
_aside = threading.local()


def current() -> Context | None:
    """This process's place in a job, or None in an ordinary process."""
    return _current


def enter(context: Context | None) -> None:
    """This process is part of a job from here on; with None, of none any more."""
    global _current
    _current = context
    forget()


def prepared() -> bool:
    """Whether an ordinary process has called `tt.prepare`."""
    return _prepared


def prepare_once() -> None:
    """An ordinary process calls `tt.prepare`. Raises ConfigError where it has done so before, as in a job."""
    global _prepared
    if _prepared:
        raise again()
    _prepared = True


def forget() -> None:
    """An ordinary process may call `tt.prepare` again."""
    global _prepared
    _prepared = False


def again() -> ConfigError:
    """The error of a second `tt.prepare`."""
    accepted = (
        "was called before: a job has one model and one optimizer. tt.leave() in between lets an ordinary process "
        "(a notebook, say) prepare another one"
    )
    return ConfigError("tt.prepare", None, accepted)


def begin_loop() -> int:
    """A loop over `tt.epochs` begins; returns its number."""
    global _loops
    _loops += 1
    return _loops


def is_latest(loop: int) -> bool:
    """Whether no other loop over `tt.epochs` has begun since."""
    return loop == _loops


def plan_only() -> None:
    """From here on `prepare` raises Planning."""
    global _planning
    _planning = True


def planning() -> bool:
    """Whether the script is run only to see its model."""
    return _planning


def placed() -> bool:
    """Whether words by which a script would join a job by hand mean nothing: it has its place, or is only planned."""
    return _planning or (_current is not None and _current.leave is None)


@contextmanager
def aside() -> Iterator[None]:
    """What this thread does inside is no part of a step: an evaluation, say."""
    _aside.active = True
    try:
        yield
    finally:
        _aside.active = False


def is_aside() -> bool:
    """Whether this thread is inside `aside`."""
    return getattr(_aside, "active", False)
