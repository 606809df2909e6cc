"""The functions that a script calls.

In an ordinary process each of them does nothing, or what plain PyTorch would do.
"""

import builtins
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from topotrain.config import async_momentum
from topotrain.config.job import ConfigError, Grads, Reduce, Shard, Updater
from topotrain.config.sharding import SliceMap
from topotrain.core.client.client_context import StepOutcome
from topotrain.core.events import LastingNotice, Notice
from topotrain.core.model.schema import FlatBuffers, torch_dtype
from topotrain.core.optim import kernel_choice
from topotrain.core.optim.updater_block import build, set_lr
from topotrain.training import context as process
from topotrain.training.adopted_optimizer import AdoptedOptimizer
from topotrain.training.context import Connections, Context, Metric, PrepareRequest
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import BatchReplay, DataPlan, ShardedLoader
from topotrain.training.data.job_progress import NEEDS_EPOCHS, EpochProgress, PlainPasses
from topotrain.training.data.sampling import AS_IS
from topotrain.training.data.script_position import ScriptPosition
from topotrain.training.data.split_loader import SplitLoader
from topotrain.training.data.unprepared_loaders import UnpreparedLoaders
from topotrain.training.final_parameters import FINAL, reserve
from topotrain.training.loss_watch import LossWatch, watch_losses
from topotrain.training.misuse_checks import MisuseChecks, refuse_nested, refuse_wrapped
from topotrain.training.parameters.divided_model import STATE_IN_PARTS, DividedModel
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.parameters.lazy_pull import wait_by_layer
from topotrain.training.parameters.prepared_objects import PreparedObjects, RowModule, Stateful, joined, sort_objects
from topotrain.training.reporting.logged_values import Loggable, numbers
from topotrain.training.step_progress import NormLog, ProgressReporter
from topotrain.training.worker import Worker, WorkerMemory
from topotrain.training.worker_extension import WorkerExtension
from topotrain.training.worker_limits import bound

Batch = TypeVar("Batch")
Module = TypeVar("Module", bound=nn.Module)
OptimizerType = TypeVar("OptimizerType", bound=Optimizer)
LoaderType = TypeVar("LoaderType", bound=DataLoader[Any])
Preparable = nn.Module | Optimizer | DataLoader[Any] | Stateful
A = TypeVar("A", bound=Preparable)
B = TypeVar("B", bound=Preparable)
C = TypeVar("C", bound=Preparable)
D = TypeVar("D", bound=Preparable)
E = TypeVar("E", bound=Preparable)
F = TypeVar("F", bound=Preparable)
G = TypeVar("G", bound=Preparable)
H = TypeVar("H", bound=Preparable)
T = TypeVar("T")

_OTHER_VALUES = (
    "the script has made other initial values here than those of the main worker, which count: seed it alike on all "
    "workers (torch.manual_seed). What it has read from single parameters or buffers since tt.prepare, such as for an "
    "average, are the values of this worker"
)
_BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)


@overload
def prepare(model: Module, optimizer: None, /) -> tuple[Module, Optimizer]: ...
@overload
def prepare(model: Module, optimizer: None, loader: LoaderType, /) -> tuple[Module, Optimizer, LoaderType]: ...
@overload
def prepare(model: Module, optimizer: OptimizerType, loader: None, /) -> tuple[Module, OptimizerType, None]: ...
@overload
def prepare(a: A, /) -> A: ...
@overload
def prepare(a: A, b: B, /) -> tuple[A, B]: ...
@overload
def prepare(a: A, b: B, c: C, /) -> tuple[A, B, C]: ...
@overload
def prepare(a: A, b: B, c: C, d: D, /) -> tuple[A, B, C, D]: ...
@overload
def prepare(a: A, b: B, c: C, d: D, e: E, /) -> tuple[A, B, C, D, E]: ...
@overload
def prepare(a: A, b: B, c: C, d: D, e: E, f: F, /) -> tuple[A, B, C, D, E, F]: ...
@overload
def prepare(a: A, b: B, c: C, d: D, e: E, f: F, g: G, /) -> tuple[A, B, C, D, E, F, G]: ...
@overload
def prepare(a: A, b: B, c: C, d: D, e: E, f: F, g: G, h: H, /) -> tuple[A, B, C, D, E, F, G, H]: ...
@overload
def prepare(*objects: Preparable | None) -> Any: ...
def prepare(*objects: object) -> Any:
    """Connect models, their optimizers and their data to the job of this process.

    The same objects are returned, changed in place, as many as were given and in their order. Parameters are in the
    job's buffers, `step()` of each optimizer commits a step on the servers, and iterating over the loader gives this
    worker's share. In an ordinary process nothing changes.

    The job begins when the script first uses one of the objects: a batch, a forward, a step, `tt.epochs`, a state dict.
    Until then there may be more calls, and the parameters are the script's: what they are then are the job's initial
    values, those of worker (0,0) where workers differ. Later calls may bring new loaders.

    Args:
        objects: in any order, each recognized by its type:
            models on the CPU or on NVIDIA GPUs (see `device`), with all their parameters made
            optimizers, any of the tested `torch.optim` classes. None in the place of the only one: that of the conf's
            `updater` block, which is returned in this place
            DataLoaders with the group's batches. Without one the script divides its data itself
            anything with `state_dict`, such as scalers, as for `keep`. Schedulers of the optimizers are found.

    Returns:
        The objects as a tuple. Of one object, the object.

    Raises:
        ConfigError: an object cannot be trained this way, or the script has used what an earlier call returned.
    """
    here = process.current()
    call = sort_objects(objects)
    if process.planning():
        return _plan(call)
    if here is None:
        return _prepare_plainly(call)
    if here.worker is not None:
        # A loader may be new in each epoch, and come with what is prepared already.
        known = here.knows((*call.models, *call.optimizers, *call.stateful)) and not call.needs_updater
        if not known or (call.loaders and here.loader is None):
            raise process.again(call)
        return call.returned(lambda loader: _divide(here, loader))
    refuse_wrapped(call.models)
    refuse_nested(call.optimizers, here.place.job.import_)
    if call.needs_updater:
        call = call.with_built(_build(here, call.model))
    made = joined((*process.so_far(), call), complete=False)
    if here.loader is None and call.loader is not None:
        here.read_from(
            ShardedLoader(
                call.loader,
                _data_plan(here, made.models, len(made.optimizers) > 1, len(made.loaders) > 1),
                begin=process.use,
            )
        )
    # The names cannot collide with those of `tt.keep`, which are Python names without a space.
    for thing in call.stateful:
        here.kept[f"prepare {sum(name.startswith('prepare ') for name in here.kept)}"] = thing
    for optimizer in call.optimizers:
        if optimizer not in here.adopted:
            here.adopted[optimizer] = AdoptedOptimizer(optimizer, process.use)
    here.given.extend((*call.models, *call.optimizers, *call.stateful))
    process.first_use(
        lambda calls: _begin(here, calls), call, [model for model in call.models if here.will_split(model)]
    )
    return call.returned(lambda loader: _divide(here, loader))


def _divide(here: Context, loader: DataLoader[Any]) -> ShardedLoader:
    assert here.loader is not None
    return here.loader.beside(loader)


def _begin(here: Context, calls: Sequence[PreparedObjects]) -> None:
    """Open the job with the objects of all calls: the script uses one of them."""
    made = joined(calls)
    worker = _enter_job(here, made)
    # Last: a fresh process restores its buffers and kept objects here.
    here.resume_at(_position(here, worker))
    updater = here.place.job.updater
    for call in calls:
        if call.built is not None and updater is not None:
            worker.attach(_LrSchedule(call.built, updater, worker))


def _plan(call: PreparedObjects) -> Any:
    """Let the first use carry the objects of all calls out of the script."""

    def seen(calls: Sequence[PreparedObjects]) -> None:
        made = joined(calls)
        raise process.PlanRun(PrepareRequest(made.model, made.optimizers, made.loader, made.several))

    process.first_use(seen, call)
    for optimizer in call.optimizers:
        optimizer.register_step_pre_hook(process.use)
        optimizer.register_state_dict_pre_hook(process.use)
    # A stand-in for the updater block's, which the script may give to a scheduler.
    stand_in = call.with_built(torch.optim.SGD(call.model.parameters(), 1.0)) if call.needs_updater else call
    plan = DataPlan(0, 1, 0, 1, (), "broadcast", False, 0, 1, True)
    return stand_in.returned(lambda loader: ShardedLoader(loader, plan, begin=process.use))


def _prepare_plainly(call: PreparedObjects) -> Any:
    if call.needs_updater:
        raise ConfigError("tt.prepare", None, "outside a job an optimizer is needed: there is no updater block")
    counted = call.loader is not None and call.optimizers
    process.note_prepared(PlainPasses(call.loader, call.optimizers) if counted else None)
    for optimizer in call.optimizers:
        _warn_of_wrong_kernels(optimizer)
        optimizer.register_step_post_hook(process.count_plain_step)
    rows = [module for model in call.models for module in model.modules() if isinstance(module, RowModule)]
    for module in rows if call.optimizers else ():
        module.follow(call.optimizers[0])
    process.observer().prepared(call)
    return call.returned(lambda loader: loader)


def _position(here: Context, worker: Worker) -> ScriptPosition | None:
    found = (extension.script_position(here, worker) for extension in here.extensions)
    return next((position for position in found if position is not None), None)


def _warn_of_wrong_kernels(optimizer: Optimizer) -> None:
    """Warn of `fused=True` where it computes wrongly, which is an error in a job."""
    for group in optimizer.param_groups:
        try:
            kernel_choice.check_named(type(optimizer), group, kernel_choice.kinds(group["params"]))
        except ConfigError as error:
            # stacklevel: the line of the script that calls `tt.prepare`.
            warnings.warn(str(error), stacklevel=4)


class _LrSchedule(WorkerExtension):
    """Sets the learning rate of the updater block."""

    def __init__(self, optimizer: Optimizer, updater: Updater, worker: Worker) -> None:
        self._optimizer, self._updater, self._tally = optimizer, updater, worker.tally
        self.after_epoch()

    def after_step(self, outcome: StepOutcome | None) -> None:
        self.after_epoch()

    def after_epoch(self) -> None:
        # By the steps of the group, some of which may have been made without this worker.
        set_lr(self._optimizer, self._updater, self._tally.steps)


def _build(here: Context, model: nn.Module) -> Optimizer:
    updater = here.place.job.updater
    if updater is None:
        raise ConfigError("updater", None, "tt.prepare got no optimizer, so the conf needs an updater block")
    return build(updater, model.named_parameters())


def _enter_job(here: Context, made: PreparedObjects) -> Worker:
    request = PrepareRequest(made.model, made.optimizers, made.loader, made.several)
    place, model, loader = here.place, request.model, request.loader
    cut = _divided(here, request)
    if place.job.cluster.backup and (cut is not None or loader is None):
        accepted = "must be 0 where a model is split" if cut else "above 0 needs the loader: it gives batches again"
        raise ConfigError("cluster.backup", place.job.cluster.backup, accepted)
    aside = [weight for extension in here.extensions for weight in extension.set_aside(here, request)]
    local = next(filter(None, (extension.local_optimizer(here, request) for extension in here.extensions)), None)
    optimizers = request.optimizers if local is None else local.optimizers
    parts = replace(describe_model(model, aside, optimizers) if cut is None else cut.parts, aside=tuple(aside))
    connections = here.connect()
    for extension in here.extensions:
        extension.connected(here, request)

    # Now, because a job must not find at its end that the disk is full.
    if here.is_main:
        tensors = (*parts.tensors, *parts.buffer_tensors, *aside)
        reserve(here.workspace / FINAL, sum(t.nbytes for t in tensors) if cut is None else cut.nbytes)
    worker = Worker(
        here.me,
        place.job,
        place.topology,
        parts,
        request.optimizers,
        connections.exchange,
        _UnitMemory(here, connections),
        local,
    )
    if loader is not None:
        replay = _batch_replay(here, worker)
        data = connections.exchange.extension(DataClient)
        assert here.loader is not None
        # Before the worker starts: a loader that cannot be divided must fail while no other worker waits.
        here.loader.join_all(
            _data_plan(here, made.models, len(made.optimizers) > 1, len(made.loaders) > 1), data, worker, replay
        )
    bound(here, model, loader, cut is not None)
    # One worker says it for all. In a job that goes on, or in asynchronous groups, the values may be trained already.
    first = here.resumed is None and place.identity.incarnation == 0 and place.topology.worker_groups == 1
    if worker.start(compare=first and here.me.index == 1):
        here.emit(Notice(str(here.me), _OTHER_VALUES))
    if cut is not None:
        cut.start(worker)
    if worker.lazy:
        wait_by_layer(model, worker)
    for number, optimizer in builtins.enumerate(request.optimizers):
        here.adopted[optimizer].join(worker, number, "" if cut is None else STATE_IN_PARTS)
    here.join(worker, cut)
    if place.job.debug and here.is_main:
        worker.attach(NormLog(worker, here.workspace / "debug.jsonl"))
    # Hooks run in the order of attachment, so the reporter, attached later, sees the counts that features change.
    for extension in here.extensions:
        extension.attach(here, worker)
    _warn(here, worker)
    rising = LossWatch(here, worker)
    watch_losses(worker, rising, here.at_close)
    worker.attach(ProgressReporter(here, worker, connections, rising))
    checks = MisuseChecks(here, worker)
    here.at_close.callback(checks.close)
    here.check_with(checks)
    if here.loader is not None and place.topology.worker_groups * place.topology.workers_per_group > 1:
        worker.attach(UnpreparedLoaders(worker, here.loader, here.at_close))
    # Spans from here on belong to the first step.
    here.spans.step_done(0)
    return worker


def _divided(here: Context, request: PrepareRequest) -> DividedModel | None:
    found = (extension.divide(here, request) for extension in here.extensions)
    return next((divided for divided in found if divided is not None), None)


def _batch_replay(here: Context, worker: Worker) -> BatchReplay | None:
    found = (extension.batch_replay(here, worker) for extension in here.extensions)
    return next((replay for replay in found if replay is not None), None)


def _warn(here: Context, worker: Worker) -> None:
    """Warn of too much momentum, and of groups that add.

    This comes before training, and not only when the loss rises.
    """
    text = async_momentum.warning(here.place.job, here.place.topology, worker.momentum, worker.optimizer_names)
    if text and here.is_main:
        here.emit(LastingNotice(str(here.me), text))


class _UnitMemory(WorkerMemory):
    """A worker's memory: that of its transports, and values that workers share."""

    def __init__(self, here: Context, connections: Connections) -> None:
        super().__init__(connections, connections.memory)
        self._fd, self._connections = here.shared_values, connections

    def flat_buffers(self, slice_map: SliceMap) -> FlatBuffers:
        flats = super().flat_buffers(slice_map)
        # In-memory Hogwild: the launcher gives the workers of a unit a descriptor. Where a server of the host shows its
        # values, they are shared already.
        if self._fd is not None and not self._connections.exchange.model.windowed:
            # In whole cache lines, so that spaces share none.
            sizes = [-(-space.length * space.itemsize // 64) * 64 for space in slice_map.spaces]
            region = self._connections.memory.adopt(self._fd, sum(sizes))
            for space in slice_map.spaces:
                offset = sum(sizes[: space.index])
                flats.put("params", space.index, region.tensor(offset, space.length, torch_dtype(space.dtype)))
        return flats


def _data_plan(here: Context, models: Sequence[nn.Module], several: bool, loaders: bool = False) -> DataPlan:
    """This worker's data. several: more than one optimizer. loaders: more than one."""
    job, topology = here.place.job, here.place.topology
    groups = topology.worker_groups
    modules = (module for model in models for module in model.modules())
    if several and job.shard is Shard.kLease:
        accepted = (
            "must be kAuto or kStatic with several optimizers: after a death a group goes on within its last batch"
        )
        raise ConfigError("shard", job.shard.value, accepted)
    # A loop that counts batches by `len(loader)` needs the exact number, and leases give a nominal one. A lease that is
    # given up is read by another group, which would not know how many steps were made with its last batch.
    # Groups that lease from two loaders at once would wait for each other.
    counted = here.counted or several or loaders
    leased = job.shard is Shard.kAuto and groups > 1 and not counted and not job.fixed_shares
    lease = job.shard is Shard.kLease or leased
    return DataPlan(
        group=here.me.group,
        groups=groups,
        index=here.me.index,
        workers=topology.workers_per_group,
        shares=job.cluster.shares,
        mode="lease" if lease else "static" if groups > 1 else "broadcast",
        per_worker_batch=job.per_worker_batch,
        seed=job.seed,
        min_share=2 if any(isinstance(module, _BATCH_NORM) for module in modules) else 1,
        is_main=here.is_main,
        own_streams=job.cluster.backup > 0,
        sums=job.reduce is Reduce.kSum,
    )


class EpochLoop:
    """The loop over the epochs of `range(count)` that are left."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begun: range | None = None

    def _remaining(self) -> range:
        process.use()
        here = process.current()
        position = None if here is None else here.continuing
        return range(self._count) if position is None else position.remaining(self._count)

    # For progress bars, which show a total.
    def __len__(self) -> int:
        return len(self._remaining() if self._begun is None else self._begun)

    def __iter__(self) -> Iterator[int]:
        process.use()
        here = process.current()
        position = None if here is None else here.continuing
        loop = EpochProgress(self._count)
        process.begin_loop(loop)
        # Asked before the loop begins, after which the script's "next loop" is another one.
        self._begun = self._remaining()
        for number in self._begun if position is None else position.epochs(self._count):
            loop.begin(number, process.passes())
            yield number
            # The epochs of two nested loops cannot be told apart after a restart.
            if not process.is_latest(loop):
                accepted = "has another loop over tt.epochs inside: they may follow one another; use range() inside"
                raise ConfigError("tt.epochs", self._count, accepted)
        loop.end()


def epochs(count: int) -> EpochLoop:
    """`range(count)`, or after a restart the epochs that are left.

    The first of them is the one that was under way. A script may have several such loops, one after the other.

    Args:
        count: epochs of the whole training, with those before a restart.

    Returns:
        an iterator over epoch numbers from 0, with a length.

    Raises:
        ConfigError: the number of epochs is not a whole number of at least 0, or a loop is inside another one.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError("tt.epochs", count, "must be a whole number >= 0")
    return EpochLoop(count)


def enumerate(batches: Iterable[Batch], start: int = 0) -> Iterator[tuple[int, Batch]]:
    """Python's `enumerate`; after a restart the numbers go on where the epoch does.

    A restart leaves out the batches of the present epoch of which steps are made already. So a script that uses the
    number of a batch, to accumulate gradients or for a schedule, gets the same numbers as without the restart.

    Args:
        batches: the prepared loader, or what reads it, such as `zip` of two loaders or a progress bar.
        start: number of the first batch of an epoch.

    Returns:
        an iterator over pairs of number and batch. With leases (`kLease`) a worker that starts again counts an
        equal part of what all groups have read as its own.
    """
    loader = process.passes()
    before = loader.place() if isinstance(loader, ShardedLoader) else (0, 0)
    for number, batch in builtins.enumerate(batches):
        if not number and isinstance(loader, ShardedLoader):
            start += loader.number_from(before)
        yield start + number, batch


def progress() -> float:
    """The share of the job's samples that are done, for learning rate schedules.

    A group that trains alone makes more or fewer steps than others, so a schedule by its own steps ends too early or
    too late. `LambdaLR(optimizer, lambda _: rate_at(tt.progress()))` is one by the job. A batch counts from when the
    loader gives it, so a scheduler's `step()` behind `optimizer.step()` has the figure with this batch. The figure
    never falls within a process. Where each group has a fixed part of the data, it is the share of the own part: all
    runs have the same. With leases it has the batches of this group, and those that the others had done when its
    present lease began.

    Returns:
        a number from 0.0, before the first batch, to 1.0, behind the last. Of several loops over `tt.epochs`, that of
        the present one. With `tt.Trainer` the share of `train_steps`.

    Raises:
        ConfigError: the number of epochs is not known, since the loop is not over `tt.epochs`; or that of the batches
            in one, since the loader has no length or `prepare` got none.
    """
    loop = process.latest_loop()
    if loop is not None:
        return loop.share()
    passes = process.passes()
    if passes is not None and passes.position():
        raise ConfigError("tt.progress", None, NEEDS_EPOCHS)
    # A scheduler calls its function when it is made, before the loop.
    return 0.0


def keep(**objects: Any) -> None:
    """Name objects that a restart must restore: tt.keep(average=ema, scaler=scaler).

    Anything with `state_dict` and `load_state_dict`, of numbers, texts, lists, dicts and tensors. It is copied when an
    epoch begins, and at each snapshot. After a restart it is loaded here, or in `prepare` if that comes later, and
    again when the epoch begins that was under way. Model, optimizer, its LR schedulers and the random number generators
    are kept without this call. Outside a job it does nothing.

    Raises:
        ConfigError: an object has no such methods, or there is another one of that name.
    """
    here = process.current()
    for name, thing in objects.items():
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise ConfigError(f"tt.keep {name}", type(thing).__name__, "must have state_dict and load_state_dict")
        if here is not None:
            # The same object again is no error: the call may be in a loop.
            if here.kept.setdefault(name, thing) is not thing:
                raise ConfigError(f"tt.keep {name}", type(thing).__name__, "must be the object that has the name")
            if here.continuing is not None:
                here.continuing.restore_kept(name)


def report(**metrics: Metric) -> None:
    """Report metrics: numbers, or functions of the job's final parameters.

    Functions are called once, on worker (0,0), with these parameters in the model. In an ordinary process they are
    called at once, and every metric is printed.

    Args:
        metrics: by name a number, such as a share between 0 and 1, or a function without parameters that returns one.

    Raises:
        ConfigError: a value is not a number.
    """
    # Checked here, where the traceback shows the script's line, and not at the job's end.
    for name, value in metrics.items():
        if not callable(value):
            _number(name, value)
    here = process.current()
    if here is not None:
        here.metrics.update(metrics)
        return
    for name, value in metrics.items():
        number = float(value() if callable(value) else value)
        process.observer().reported(name, number)
        print(f"{name}: {number:.6g}")


def log(**values: Loggable) -> None:
    """Log values while the job runs: tt.log(loss=loss, lr=schedule.get_last_lr()[0]).

    Each worker sends its last values at most four times a second, and the rest at its end. Displays, files and trackers
    of the job get them. A tensor on a GPU is copied there, and read only when it is sent. In an ordinary process the
    values are checked, and nothing else happens.

    Args:
        values: by name a number, or a tensor with one element. A worker may log 100 names. Further ones are left
            out, and a notice names the first of them.

    Raises:
        ConfigError: a value is not a number.
    """
    # Also in an ordinary process: a script that runs there must not fail in a job.
    found, here = numbers(values), process.current()
    if here is not None:
        here.logged.add(found, None if here.worker is None else here.worker.tally, time.monotonic())


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"tt.report {name}", value, "must be a number, or a function that returns one") from None


def split(loader: LoaderType, over: Literal["group", "job"] = "group") -> LoaderType:
    """Divide a loader to evaluate with over the workers of the group, or of the job.

    Each worker reads its share of each batch, and every sample is read by one worker. A batch that has no sample for
    this worker is left out, so workers may read different numbers of batches: add up within the loop, and take
    `tt.sum`, or `tt.mean` with the number of samples as the weight, behind it. No worker waits for another one.

    Args:
        loader: one that `tt.prepare` was not given, with the same data on all workers.
        over: the workers that share it.

    Returns:
        The loader of this worker's part, which has a length if the loader has one. In an ordinary process, and with
        one worker, the loader itself.

    Raises:
        ConfigError: this is no DataLoader, or one of `tt.prepare`.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError("tt.split", type(loader).__name__, "must be a DataLoader that tt.prepare was not given")
    if over not in ("group", "job"):
        raise ConfigError("tt.split over", over, "must be 'group' or 'job'")
    here = process.current()
    topology = None if here is None else here.place.topology
    workers = 1 if topology is None else topology.workers_per_group * (topology.worker_groups if over == "job" else 1)
    if here is None or workers == 1:
        return loader
    index = here.number if over == "job" else here.me.index
    seed = here.place.job.seed
    return cast(LoaderType, SplitLoader(loader, DataPlan(0, 1, index, workers, (), "static", False, seed, 1, False)))


def as_is(loader: T) -> T:
    """Let each worker read a loader as it is.

    `tt.prepare` and the loop do not divide it. Use this for data that is divided already, such as by a
    DistributedSampler, and for a loader that every worker is to read as a whole. The batches of workers then count
    alike in a step, whatever their size; `tt.weight` sets another weight.

    Args:
        loader: a DataLoader.

    Returns:
        The loader.
    """
    # Only DataLoaders are looked at, and a generator has no attributes.
    with suppress(AttributeError):
        setattr(loader, AS_IS, True)
    return loader


def rank() -> int:
    """This worker's number in the job, from 0. In an ordinary process it is 0."""
    here = process.current()
    return 0 if here is None else here.number


def is_main() -> bool:
    """Whether this is worker (0,0). True in an ordinary process."""
    here = process.current()
    return here is None or here.is_main


def weight(count: float) -> None:
    """Set the weight of the next backward in the group's mean, such as its tokens.

    The default is its number of samples.

    Args:
        count: samples, tokens or any other unit that all workers of the group use.

    Raises:
        ValueError: the weight is negative or not a number.
    """
    # In this form the comparison refuses NaN, too.
    if not count >= 0:
        raise ValueError(f"weight = {count}: must be >= 0")
    worker = _worker()
    if worker is not None:
        here = process.current()
        if here is not None and here.split is not None:
            here.split.weight_said()
        worker.batches.set_weight(float(count))


@contextmanager
def local() -> Iterator[None]:
    """Make the backwards inside this block private: they send nothing.

    No worker waits, and `.grad` is the gradient of this worker's share. Clear it before the backward of the step.
    """
    worker = _worker()
    if worker is None:
        yield
        return
    worker.path.private = True
    try:
        yield
    finally:
        worker.path.private = False


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, which also works with `grads: kHidden`.

    With hidden gradients the servers clip at `step()`, which alone knows the norm. Gradients that no backward made
    are reduced over the group first, so all its workers must make this call.

    Args:
        parameters: those of the prepared model, as for torch.
        max_norm: the largest norm of the group's gradient.
        norm_type: the order of the norm.

    Returns:
        the norm before clipping, a tensor without dimensions. With hidden gradients it is that of the last step, and
        NaN before the first.
    """
    worker = _worker()
    if worker is None or worker.job.grads is Grads.kVisible:
        if worker is not None:
            worker.path.reduce_own()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    worker.clip(float(max_norm), float(norm_type))
    return torch.tensor(worker.tally.last_norm, device=worker.device)


def _worker() -> Worker | None:
    # An evaluation in a thread of its own may call these functions, and must not change the script's step.
    if process.is_outside_step():
        return None
    process.use()
    here = process.current()
    return None if here is None else here.worker
