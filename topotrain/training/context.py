"""The one global: what this process is in a job, if it is in one."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from topotrain.comm.router import RouterConfig
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address
from topotrain.core.client.client import Client
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.group_channel import GroupChannel
from topotrain.core.events import Connects, Event, EventSink
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.transport_contract import MessageSender
from topotrain.training.adopted_optimizer import AdoptedOptimizer
from topotrain.training.data.distributed_loader import BatchReplay, ShardedLoader
from topotrain.training.data.job_progress import LoopProgress, Passes
from topotrain.training.data.script_position import ScriptPosition
from topotrain.training.gradients.local_steps import LocalOptimizer
from topotrain.training.parameters.divided_model import IN_PARTS, DividedModel
from topotrain.training.parameters.prepared_objects import PreparedObjects
from topotrain.training.reporting.logged_values import LoggedValues
from topotrain.training.worker import Worker

Metric = float | Callable[[], float]


class Connections(ABC):
    """The connections of a worker to the servers of its job."""

    exchange: Client
    memory: ProcessMemory

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, in memory that the transport can share."""

    @abstractmethod
    def meet_group(self) -> ClientExtension:
        """Connect the workers of the group, which all call this once; their channel."""

    @property
    @abstractmethod
    def group_sender(self) -> MessageSender:
        """Sends to the other workers of the group, without waiting."""

    @abstractmethod
    def join_group(self, channel: GroupChannel) -> None:
        """Connect a channel to the other workers of the group, which all call this once."""

    @abstractmethod
    def traffic(self) -> tuple[int, int]:
        """Bytes of messages out and in."""

    def link_traffic(self) -> tuple[int, int]:
        """Those of `traffic` over TCP, which leads to other hosts."""
        return 0, 0

    def reports(self, now: float, last: bool = False) -> Iterable[Event]:
        """The due events about the connections; last: all, since no others follow."""
        return ()

    @abstractmethod
    def close(self, finished: bool = True) -> None:
        """Close them. finished: the script came to its end."""


class Connector(ABC):
    """Opens the connections of a worker, when the script first needs them."""

    @abstractmethod
    def connect(self, place: RouterConfig, me: Address) -> Connections:
        """The connections of worker `me`. Errors are those of the transports."""


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """The arguments of all calls of `tt.prepare`, or an optimizer of the job file.

    Attributes:
        model: the model, or a module with all models in it.
        optimizers: by number. Empty: only while a script is planned.
        loader: the DataLoader, or None.
        several: whether there are several models.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    loader: Any
    several: bool = False

    def only_optimizer(self, what: str) -> Optimizer:
        """The optimizer. Raises ConfigError if there are several; `what` says why."""
        if len(self.optimizers) == 1:
            return self.optimizers[0]
        names = " and ".join(type(each).__name__ for each in self.optimizers)
        raise ConfigError("tt.prepare", names, f"must be one optimizer, with a parameter group for each part: {what}")


class PrepareExtension:
    """A feature's part of preparing a script, of its training and of its end.

    Every method does nothing unless a subclass overrides it. The launcher's composition names all extensions of a
    process (`Context.extensions`). The methods are called in the order in which they are defined here.
    """

    def splits(self, model: nn.Module) -> bool:
        """Whether the script assigns parts of the model to workers of the group."""
        return False

    def holds_elsewhere(self, here: "Context", tensor: torch.Tensor) -> bool:
        """Whether the script has assigned this tensor of the model to another worker."""
        return False

    # --- tt.prepare

    def divide(self, here: "Context", request: PrepareRequest) -> DividedModel | None:
        """Divide the model over the group's workers. None: each worker holds all of it."""
        return None

    def set_aside(self, here: "Context", request: PrepareRequest) -> Sequence[nn.Parameter]:
        """Parameters that this feature transfers, and the flat buffers leave out."""
        return ()

    def local_optimizer(self, here: "Context", request: PrepareRequest) -> LocalOptimizer | None:
        """Let the script's optimizer run in this process. None: the servers run it.

        Raises:
            ConfigError: the optimizer cannot run this way.
        """
        return None

    def connected(self, here: "Context", request: PrepareRequest) -> None:
        """The connections to the servers are open, and the worker is not made yet."""

    def batch_replay(self, here: "Context", worker: Worker) -> BatchReplay | None:
        """The feature that gives batches again. None: no batch is given twice."""
        return None

    def attach(self, here: "Context", worker: Worker) -> None:
        """The worker has started: join its steps."""

    def script_position(self, here: "Context", worker: Worker) -> ScriptPosition | None:
        """The position of the script, to resume it; None: not by this feature."""
        return None

    # --- the end

    def stop_pushing(self, here: "Context") -> None:
        """This worker pushes nothing more; called before the worker itself says so."""

    def export(self, here: "Context") -> dict[str, torch.Tensor]:
        """Weights of the result by name that the worker's buffers do not hold."""
        return {}

    def resume_hint(self, workspace: Path) -> str:
        """How a job can go on that could not write its result; "" if not by this feature."""
        return ""

    def close(self, here: "Context") -> None:
        """The job is over for this process, and the connections close next."""


class FirstUse:
    """Begins the job when the script first uses what it has prepared.

    Until then `tt.prepare` may be called again.

    Args:
        begin: is given all calls. Its errors are the script's, at each use.
    """

    def __init__(self, begin: Callable[[Sequence[PreparedObjects]], object]) -> None:
        self._begin = begin
        self.calls: list[PreparedObjects] = []
        self._forwards: list[RemovableHandle] = []
        self._states: list[RemovableHandle] = []
        self._replaced: list[nn.Module] = []

    def follow(self, call: PreparedObjects, split: Collection[nn.Module]) -> None:
        """Watch the models of one more call; the job gives those in `split` a new forward."""
        self.calls.append(call)
        for model in call.models:
            # A script may call a part of its model. Functions of this module: the hooks go into copies of the model.
            self._forwards += [module.register_forward_pre_hook(_use_module) for module in model.modules()]
            self._states.append(model.register_state_dict_pre_hook(_use_state))  # type: ignore[no-untyped-call]
            if model in split and "forward" not in vars(model):
                # torch looks the forward up before it calls the hooks: this one finds the job's.
                model.forward = lambda *args, model=model, **kwargs: model.forward(*args, **kwargs)
                self._replaced.append(model)

    def begin(self, reads: bool) -> None:
        """The script uses an object; reads: torch goes over the hooks of a state dict."""
        for handle in (*self._forwards, *(() if reads else self._states)):
            handle.remove()
        while self._replaced:
            del self._replaced.pop().forward
        # An evaluation may come first, and what the job makes must not belong to it.
        with torch.inference_mode(False):
            self._begin(self.calls)


class TrainingChecks(ABC):
    """Checks of what a script has trained."""

    @abstractmethod
    def check(self) -> None:
        """At the end of the script: raise ConfigError if its backwards trained nothing."""


class ProcessOwner:
    """The code that made this process part of a job. Each method does nothing here."""

    by_hand = False
    """Whether the script itself has joined the job, and may leave it."""

    def loop_ended(self) -> None:
        """The script has come to the end of a pass, or of `tt.epochs`."""

    def leave(self) -> None:
        """The script ends its part, if it may. Raises the job's errors."""


class OpenTables(Protocol):
    """The tables of a script; see `table_registry.JobTables`."""

    @property
    def in_steps(self) -> bool:
        """Whether rows are pushed with the steps of the model."""
        ...


@dataclass(slots=True)
class Context:
    """A worker process of a job."""

    place: RouterConfig
    me: Address
    workspace: Path
    sink: EventSink
    connector: Connector
    extensions: Sequence[PrepareExtension] = ()
    shared_values: int | None = None  # descriptor of a memfd that several workers of the unit share
    worker: Worker | None = None  # once the script uses what it has prepared
    connections: Connections | None = None  # opened by `connect`
    loader: ShardedLoader | None = None  # once the script has prepared one
    tables: OpenTables | None = None  # once the script has a table
    split: DividedModel | None = None  # where the model is split over the group
    metrics: dict[str, Metric] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # what `tt.keep` was given, by name
    alike: set[str] = field(default_factory=set)  # those of `kept` that are the same on all workers of a group
    superseded: set[str] = field(default_factory=set)  # those with a state that is newer than the saved one
    continuing: ScriptPosition | None = None  # once the job has begun
    training: TrainingChecks | None = None  # once the job has begun
    resumed: object = None  # checkpoint_reader.Manifest, where the job is continued
    spans: Recorder = SILENT
    gpus: bool = True  # `tt.device` may name one
    unrepeatable: str = ""  # why the script cannot repeat a step; known before it has prepared
    counted: bool = False  # the training loop goes by the number of batches that an epoch is said to have
    owner: ProcessOwner = field(default_factory=ProcessOwner)
    given: list[object] = field(default_factory=list)  # to `tt.prepare`, before the job began
    adopted: dict[Optimizer, AdoptedOptimizer] = field(default_factory=dict)  # what `tt.prepare` was given
    at_close: ExitStack = field(default_factory=ExitStack)  # what was changed in the process, to undo it
    logged: LoggedValues = field(init=False)  # by `tt.log`

    def __post_init__(self) -> None:
        self.logged = LoggedValues(self.sink, str(self.me))

    @property
    def is_main(self) -> bool:
        """Worker (0,0)."""
        return self.me.group == 0 and self.me.index == 0

    @property
    def number(self) -> int:
        """The worker's number in the job, from 0, group by group."""
        return self.me.group * self.place.topology.workers_per_group + self.me.index

    def emit(self, event: Event) -> None:
        """Report an event of this worker."""
        self.sink.emit(event)

    def owned_by(self, owner: ProcessOwner) -> None:
        """Let `owner` know of the script's loops and of `tt.leave`."""
        self.owner = owner

    def supersede(self, name: str) -> None:
        """An object of `kept` has a state that is newer than the saved one."""
        self.superseded.add(name)

    def refuse_repeats(self, reason: str) -> None:
        """The script cannot repeat a step, so that a death restarts its whole group."""
        self.unrepeatable = reason

    def connect(self) -> Connections:
        """The connections to the servers; the first call opens them."""
        if self.connections is None:
            self.emit(Connects(str(self.me)))
            connections = self.connector.connect(self.place, self.me)
            connections.exchange.channel.record_spans(self.spans)
            self.connections = connections
        return self.connections

    def join(self, worker: Worker, split: DividedModel | None) -> None:
        """The worker of this process has started, perhaps with a part of the model only."""
        self.worker, self.split = worker, split

    def count_by_length(self, counted: bool) -> None:
        """Note whether the training loop goes by the length that an epoch is said to have."""
        self.counted = counted

    def check_with(self, checks: TrainingChecks) -> None:
        """Let these check at the end what the script trained."""
        self.training = checks

    def knows(self, things: Sequence[object]) -> bool:
        """Whether `tt.prepare` was given all of these before the job began."""
        return all(any(thing is known for known in self.given) for thing in things)

    def read_from(self, loader: ShardedLoader) -> None:
        """The script gets this loader of `tt.prepare`."""
        self.loader = loader

    def open_tables(self, tables: OpenTables) -> None:
        """The script has its first table."""
        self.tables = tables

    def resume_at(self, position: ScriptPosition | None) -> None:
        """The script has prepared, and goes on from this position."""
        self.continuing = position
        if self.loader is not None:
            self.loader.resume_with(position)

    def will_split(self, model: nn.Module) -> bool:
        """Whether `tt.prepare` will divide this model over the workers of the group."""
        if self.place.topology.workers_per_group == 1:
            return False
        return self.place.job.splits or self.names_workers(model)

    def names_workers(self, model: nn.Module) -> bool:
        """Whether the script assigns parts of the model to workers."""
        return any(extension.splits(model) for extension in self.extensions)


# No Exception, which a script may catch around `tt.prepare`.
class PlanRun(BaseException):
    """Carries the arguments of `prepare` out of a script that is only planned."""

    def __init__(self, request: PrepareRequest) -> None:
        super().__init__("planning")
        self.request = request


class PrepareObserver:
    """Sees the calls of a script in an ordinary process. Methods do nothing here."""

    def prepared(self, call: PreparedObjects) -> None:
        """The script has prepared these objects."""

    def reported(self, name: str, value: float) -> None:
        """The script has reported a metric."""


class _OutsideStep(threading.local):
    """Whether a thread's work is in no step."""

    # A default on the class, which every thread sees without an `__init__` of its own.
    active = False

    def begin(self) -> None:
        self.active = True

    def end(self) -> None:
        self.active = False


_current: Context | None = None
_planning = False
_unused: FirstUse | None = None  # while the script has prepared, and used nothing of it
_prepared = False  # an ordinary process has called `tt.prepare`
_plain: Passes | None = None  # over the loader that it has given
_plain_steps = 0  # of the optimizers that it has given
_observer = PrepareObserver()  # of an ordinary process
_loop: LoopProgress | None = None  # of the training loop that began last
_outside_step = _OutsideStep()


def current() -> Context | None:
    """This process's place in a job, or None in an ordinary process."""
    return _current


def enter(context: Context | None) -> None:
    """Make this process part of a job; with None, of none any more."""
    global _current, _loop, _unused
    _current, _loop, _unused = context, None, None
    # A process that joins or leaves a job may call `tt.prepare` once more.
    forget()


def prepared() -> bool:
    """Whether an ordinary process has called `tt.prepare`."""
    return _prepared


def note_prepared(passes: Passes | None) -> None:
    """An ordinary process calls `tt.prepare`, perhaps with a loader."""
    global _prepared, _plain
    _prepared, _plain = True, _plain if passes is None else passes


def count_plain_step(*_: object) -> None:
    """An ordinary process has made a step of an optimizer that `tt.prepare` was given."""
    global _plain_steps
    _plain_steps += 1


def plain_steps() -> int:
    """The number of such steps."""
    return _plain_steps


def observe_prepare(observer: PrepareObserver) -> None:
    """Let `observer` see the calls of `tt.prepare` in this ordinary process."""
    global _observer
    _observer = observer


def observer() -> PrepareObserver:
    """What sees the calls of this ordinary process."""
    return _observer


def forget() -> None:
    """Let an ordinary process join a job."""
    global _prepared, _plain
    _prepared, _plain = False, None


def again(call: PreparedObjects) -> ConfigError:
    """The error of a `tt.prepare` after the job has begun."""
    names = " and ".join(type(each).__name__ for each in (*call.optimizers, *call.models)) or None
    accepted = (
        "comes too late: the job began when the script first used what it had prepared (a batch, a forward, a step, "
        "tt.epochs). Call tt.prepare as often as needed, but before that. An optimizer of a later phase is made and "
        "prepared before the first phase: a parameter may be in several"
    )
    return ConfigError("tt.prepare", names, accepted)


def first_use(
    begin: Callable[[Sequence[PreparedObjects]], object], call: PreparedObjects, split: Collection[nn.Module] = ()
) -> None:
    """Note a call of `tt.prepare`; the first use of any call's object runs `begin`.

    Args:
        begin: is given all calls.
        call: this call.
        split: those of its models that will be divided over the workers of a group.
    """
    global _unused
    if _unused is None:
        _unused = FirstUse(begin)
    _unused.follow(call, split)


def so_far() -> Sequence[PreparedObjects]:
    """The calls of `tt.prepare`, while the script has used nothing of them."""
    return () if _unused is None else _unused.calls


def use(*_: Any) -> None:
    """The script uses something that may be prepared: the job begins, if it has not.

    Every function that needs the job's worker calls this first. Raises the errors of `tt.prepare`.
    """
    _begin(False)


def _use_module(module: nn.Module, *_: Any) -> None:
    _begin(False)
    cut = None if _current is None else _current.split
    # As with a state dict below.
    if cut is not None and not cut.over:
        cut.check_call(module)


def _use_state(module: nn.Module, *_: Any) -> None:
    _begin(True)
    cut = None if _current is None else _current.split
    # The hook that a split model has by now is not called: torch goes over the older ones.
    if cut is not None and cut.is_of(module) and not cut.over:
        raise ConfigError("model.state_dict()", None, IN_PARTS)


def _begin(reads: bool) -> None:
    global _unused
    unused, _unused = _unused, None
    if unused is not None:
        try:
            unused.begin(reads)
        except BaseException:
            # A script that goes on must not train alone.
            _unused = unused
            raise


def begin_loop(loop: LoopProgress) -> None:
    """A training loop begins."""
    global _loop
    _loop = loop


def is_latest(loop: LoopProgress) -> bool:
    """Whether no other training loop has begun since."""
    # None: this process has left its job within the loop.
    return _loop is None or loop is _loop


def latest_loop() -> LoopProgress | None:
    """The training loop of this job, or of an ordinary process, that began last."""
    return _loop


def passes() -> Passes | None:
    """The passes over the prepared loader. None: there is none."""
    return _plain if _current is None else _current.loader


def plan_only() -> None:
    """Let `prepare` raise `PlanRun` from now on."""
    global _planning
    _planning = True


def planning() -> bool:
    """Whether the script is run only to see its model."""
    return _planning


def placed() -> bool:
    """Whether a script's call to join a job by hand has no effect."""
    # A launcher has made this process part of a job, or the script is only planned.
    return _planning or (_current is not None and not _current.owner.by_hand)


@contextmanager
def outside_step() -> Iterator[None]:
    """Inside, this thread's work is in no step: an evaluation, say."""
    _outside_step.begin()
    try:
        yield
    finally:
        _outside_step.end()


def is_outside_step() -> bool:
    """Whether this thread is inside `outside_step`."""
    return _outside_step.active
