"""Values over the workers: `tt.mean`, `sum`, `max`, `min`, `gather`, `broadcast`.

Every worker gets the values of all and computes the result from them in the order of the workers. So the result is the
same on all workers, and from run to run.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial, reduce
from numbers import Integral, Real
from operator import add
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn

from topotrain.config.job import ConfigError, Reduce
from topotrain.core.client.client_context import StepEnd, StepOutcome
from topotrain.core.events import Repeatable, Unrepeatable
from topotrain.core.protocol.codec import MAX_TEXT
from topotrain.extensions.resume.state_serialization import UnserializableState, pack, unpack
from topotrain.extensions.worker_values.group_batch_norm import normalize_over_group
from topotrain.extensions.worker_values.value_client import CallPlace, ValueClient
from topotrain.extensions.worker_values.value_messages import LARGEST
from topotrain.extensions.worker_values.written_files import watch_saves
from topotrain.training import context as process
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.final_parameters import from_bytes, to_bytes
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

Rows = list[tuple[torch.Tensor, float]]
V = TypeVar("V", bound=float | torch.Tensor)
Thing = TypeVar("Thing")
Over = Literal["group", "job"]


class CallPlaces(WorkerExtension):
    """Where a worker is in its script, by which a call that it leaves out is noticed."""

    def __init__(self, here: Context, worker: Worker, client: ValueClient) -> None:
        self._here, self._worker, self._client = here, worker, client
        self._steps = self._before = 0  # `step()` calls, and backwards before the last one
        self.version = 0
        """The number of updates of the values that this worker has."""
        client.at = self.at

    def at(self) -> CallPlace:
        """Return the worker's place."""
        passes = 0 if self._here.loader is None else self._here.loader.passes
        commits = self._worker.committed + self._client.unsettled
        return CallPlace(self._steps, self._worker.path.ended - self._before, passes, commits)

    def before_step(self) -> None:
        self._steps, self._before = self._steps + 1, self._worker.path.ended

    def before_commit(self, step: int, end: StepEnd) -> None:
        self._client.commits = True

    def after_step(self, outcome: StepOutcome | None) -> None:
        self._client.commits = False
        self.version = self.version if outcome is None else outcome.version


class ValueExtension(PrepareExtension):
    """The calls of a worker, and the first values of its buffers."""

    def __init__(self) -> None:
        self.over = False
        self.called: set[bool] = set()
        """Whether the script has called over its group, and over the job."""

        self._model = nn.Module()
        self.places: CallPlaces | None = None
        self._files: set[str] = set()

    def connected(self, here: Context, request: PrepareRequest) -> None:
        self._model = request.model
        if here.place.topology.workers_per_group > 1:
            normalize_over_group(here, request.model, partial(_gathered, "the forward of SyncBatchNorm", grad=True))

    def attach(self, here: Context, worker: Worker) -> None:
        client = worker.client.extension(ValueClient)
        self._files = watch_saves(here.at_close)
        self.places = CallPlaces(here, worker, client)
        worker.attach(self.places)
        # The parts of a split model have buffers of their own.
        if here.split is None and _several(here):
            _begin_alike(self._model, client, here.is_main)

    def stop_pushing(self, here: Context) -> None:
        self.over = True
        if here.connections is not None and _several(here):
            here.connections.exchange.extension(ValueClient).end(_told(here, self._files))


def _told(here: Context, paths: set[str]) -> str:
    """This worker's numbers of `tt.report` and existing files, as they are compared."""
    found = {name: value for name, value in here.metrics.items() if not callable(value)}
    found |= dict.fromkeys((path for path in sorted(paths) if path.isprintable() and os.path.isfile(path)), 1.0)
    text = "\n".join(f"{name}={float(value):.6g}" for name, value in found.items())
    # What does not fit is left out; without its last line, which may be a part of one.
    return text if len(text.encode()) <= MAX_TEXT // 4 else text[: MAX_TEXT // 16].rpartition("\n")[0]


def _several(here: Context) -> bool:
    return here.place.topology.workers_per_group * here.place.topology.worker_groups > 1


def _begin_alike(model: nn.Module, client: ValueClient, main: bool) -> None:
    """Set a model's buffers to those of the main worker, also those outside its state."""
    buffers = [buffer for buffer in model.buffers() if buffer.layout is torch.strided and not buffer.is_meta]
    flat = [buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    data = torch.cat([*flat, torch.empty(0, dtype=torch.uint8)])
    if client.share_first(data, main):
        for buffer, old, new in zip(buffers, flat, torch.split(data, [each.numel() for each in flat]), strict=True):
            if not torch.equal(old, new):
                # A copy: the bytes of another buffer may come before it, so that it is not aligned.
                buffer.detach().copy_(new.clone().view(buffer.dtype).reshape(buffer.shape))


# --- the functions of a script -------------------------------------------------------------------------------------


@overload
def mean(value: torch.Tensor, weight: float | None = None, over: Over = "group") -> torch.Tensor: ...
@overload
def mean(value: float, weight: float | None = None, over: Over = "group") -> float: ...
def mean(value: Any, weight: float | None = None, over: Over = "group") -> Any:
    """The mean of a value over the workers, the same on all of them.

    All workers must make this call, as often and in the same order as other calls of this kind. In an ordinary process
    it returns the value.

    Args:
        value: a number, or a tensor of floating point or complex numbers of any shape, the same on all workers.
        weight: of this worker's value, such as the samples that it is the mean of. None: all values count alike.
        over: "group": the workers of this worker's group, which train in step. "job": the workers of all groups.

    Returns:
        a number, or a tensor of this shape, dtype and device, without a gradient.

    Raises:
        ConfigError: the value is something else, the workers' values do not fit together, or all weights are 0.
        JobError: another worker makes another call, or none.
    """
    if weight is not None and not weight >= 0:  # in this form NaN is refused, too
        raise ConfigError("tt.mean weight", weight, "must be a number >= 0")
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        raise ConfigError("tt.mean", str(value.dtype), "must be of floating point: use value.float()")

    def averaged(rows: Rows) -> torch.Tensor:
        # A mean over no sample is NaN, and must not count.
        parts = [_wide(row) * each for row, each in rows if each]
        if not parts:
            raise ConfigError("tt.mean weight", 0, "must be above 0 on one of the workers")
        return reduce(torch.add, parts) / reduce(add, [each for _, each in rows])

    exact = float(value) if isinstance(value, Real) else value
    return _reduced("tt.mean", exact, over, averaged, 1.0 if weight is None else float(weight))


def sum(value: V, over: Over = "group") -> V:
    """The sum of a value over the workers, the same on all of them.

    See `mean` for the calls that must be made, and for the errors.

    Args:
        value: a number, or a tensor of any shape and dtype, the same on all workers.
        over: "group" or "job", as for `mean`.

    Returns:
        a number, or a tensor of this shape and device. Its dtype is that of the value; of whole numbers and truth
        values int64.
    """
    return _reduced("tt.sum", value, over, lambda rows: reduce(torch.add, [_wide(row) for row, _ in rows]))


def max(value: V, over: Over = "group") -> V:
    """The largest value over the workers; of tensors, element by element.

    NaN counts as the largest. See `mean` for the calls that must be made, and for the errors.

    Args:
        value: a number, or a tensor of real numbers of any shape and dtype, the same on all workers.
        over: "group" or "job", as for `mean`.

    Returns:
        a number, or a tensor of this shape, dtype and device, the same on all workers.
    """
    return _reduced("tt.max", value, over, lambda rows: reduce(torch.maximum, [row for row, _ in rows]))


def min(value: V, over: Over = "group") -> V:
    """The smallest value over the workers, as `max` is the largest one."""
    return _reduced("tt.min", value, over, lambda rows: reduce(torch.minimum, [row for row, _ in rows]))


def gather(tensor: torch.Tensor, grad: bool = False, over: Over = "group") -> torch.Tensor:
    """The tensors of all workers, one after the other along the first dimension.

    Parts of a batch come together in the order of the whole batch. With `grad` a loss over all of them has the
    gradients of the plain script, such as a contrastive loss over features: each worker computes the loss of its own
    samples, or the whole loss. Every worker must then go backward through the result. See `mean` for the calls that
    must be made, and for further errors. In an ordinary process it returns the tensor itself.

    Args:
        tensor: of at least one dimension. The workers' tensors may differ in the first one only.
        grad: the result has a gradient. A part of a batch that has weight 0 is left out: a worker that gets no sample
            of a small batch reads one that must not count.
        over: "group" or "job", as for `mean`. A gradient goes to the workers of the group only.

    Returns:
        a tensor of the same dtype and device. Its first dimension is the sum of theirs.

    Raises:
        ConfigError: the tensors do not fit together, or a gradient is asked for and cannot be there.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        raise ConfigError("tt.gather", type(tensor).__name__, "must be a tensor of at least one dimension")
    if grad and over != "group":
        raise ConfigError("tt.gather over", over, 'must be "group" with grad=True: groups do not share a backward')
    if grad and torch.is_grad_enabled() and not tensor.requires_grad:
        raise ConfigError("tt.gather", "a tensor without gradient", "must have one with grad=True")
    return _gathered("tt.gather(grad=True)" if grad else "tt.gather", tensor, grad, over)


def broadcast(value: Thing, over: Over = "group") -> Thing:
    """The value of the first worker of the group, on all of its workers.

    See `mean` for the calls that must be made, and for further errors. In an ordinary process it returns the value.

    Args:
        value: of numbers, texts, None, lists, tuples, dicts and tensors. That of other workers is not looked at.
        over: "group" or "job", as for `mean`. Over the job it is the value of the main worker.

    Returns:
        the value. On other workers than the first it is a copy, with tensors on the CPU.

    Raises:
        ConfigError: the value has a part of another type.
    """
    here = process.current()
    first = here is None or (here.me.index == 0 and (over == "group" or here.is_main))
    rows = exchange("tt.broadcast", value if first else None, over)
    return value if first or rows is None else rows[0]


def _gathered(what: str, tensor: torch.Tensor, grad: bool, over: Over = "group") -> torch.Tensor:
    """The tensors of all workers. grad: with a gradient, without those of weight 0."""
    rows = exchange(what, [tensor, _weight() if grad else 1.0], over)
    if rows is None:
        return tensor
    parts = [
        part if row[1] else part[:0] for row, part in zip(rows, _alike(what, [row[0] for row in rows], 1), strict=True)
    ]
    if grad and tensor.requires_grad and torch.is_grad_enabled():
        return _Gathered.apply(tensor, parts)  # type: ignore[no-any-return, no-untyped-call]
    return torch.cat(parts).to(tensor.device)


def global_step() -> int:
    """The number of the job's optimizer steps, as far as this worker knows.

    In a synchronous job they are the steps of the group, so that a loop `while tt.global_step() < N` ends for all
    workers at once. Where groups train apart and share their servers, they are the steps of all groups, as of this
    worker's last step. Each group then leaves such a loop when it knows of N steps, and steps that are under way still
    count. In an ordinary process they are the steps of the optimizers given to `prepare`.

    Raises:
        ConfigError: the groups do not share their servers, or make steps that no server knows.
    """
    process.use()
    here = process.current()
    if here is None:
        return process.plain_steps()
    worker, topology, cluster = here.worker, here.place.topology, here.place.job.cluster
    if worker is None:
        return 0
    if topology.worker_groups == 1:
        return worker.tally.steps
    if topology.server_groups > 1 or cluster.outer is not None or cluster.n_push > 1:
        accepted = (
            "must be in a job whose groups send every step to the same servers; tt.progress() is there in every job"
        )
        raise ConfigError("tt.global_step", f"{topology.worker_groups} groups", accepted)
    places = _extension(here).places
    return 0 if places is None else places.version


def _extension(here: Context) -> ValueExtension:
    return next(each for each in here.extensions if isinstance(each, ValueExtension))


class _Gathered(torch.autograd.Function):
    """The parts of all workers; a gradient goes to the worker of its part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        here = process.current()
        assert here is not None
        before = [len(part) for part in parts[: here.me.index]]
        ctx.first, ctx.size = reduce(add, before, 0), len(parts[here.me.index])
        ctx.like = tensor.shape
        return torch.cat(list(parts)).to(tensor.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = _weight()
        rows = exchange("the backward of tt.gather", [gradient, own], "group")
        assert rows is not None
        if not own or not ctx.size:
            return gradient.new_zeros(ctx.like), None
        mine = slice(ctx.first, ctx.first + ctx.size)
        # The servers take the mean of the workers' gradients by these weights.
        parts = [row[0][mine] * (row[1] / own) for row in rows if row[1]]
        return reduce(add, parts).to(gradient.device), None


def _weight() -> float:
    """The weight of this worker's gradient in that of the group."""
    here = process.current()
    if here is None or here.worker is None or here.place.job.reduce is Reduce.kSum:
        return 1.0
    return here.worker.batches.weight()


def _reduced(what: str, value: V, over: Over, reduction: Callable[[Rows], torch.Tensor], weight: float = 1.0) -> V:
    """A reduction of the values and weights of all workers, of the kind of `value`."""
    given: Any = value
    if not isinstance(given, Real | torch.Tensor):
        raise ConfigError(what, type(value).__name__, "must be a number or a tensor")
    exact = isinstance(value, Integral)
    mine = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=None if exact else torch.float64)
    rows = exchange(what, [mine, weight], over)
    if rows is None:
        return value
    found = reduction(list(zip(_alike(what, [row[0] for row in rows]), [row[1] for row in rows], strict=True)))
    if not isinstance(value, torch.Tensor):
        return cast(V, found.item())
    return cast(V, found.to(value.device, found.dtype if found.dtype is torch.int64 else value.dtype))


def _wide(value: torch.Tensor) -> torch.Tensor:
    """A value in the precision in which it is added."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


# --- the exchange ----------------------------------------------------------------------------------------------------


def exchange(what: str, value: Any, over: Over) -> list[Any] | None:
    """The values of all workers, in their order. None: this worker is the only one."""
    if over not in ("group", "job"):
        raise ConfigError(f"{what} over", over, 'must be "group" or "job"')
    here = process.current()
    topology = None if here is None else here.place.topology
    # A group that is the whole job may start again.
    job = over == "job" and topology is not None and topology.worker_groups > 1
    workers = 1 if topology is None else topology.workers_per_group * (topology.worker_groups if job else 1)
    if here is None or workers == 1:
        return None
    _note_call(here, what, job)
    client = here.connect().exchange.extension(ValueClient)
    name = f'{what}(over="job")' if job else what
    return [_unpacked(what, data) for data in client.call(job, workers, name, _packed(what, value))]


def _note_call(here: Context, what: str, job: bool) -> None:
    mine = _extension(here)
    if mine.over or process.is_outside_step():
        raise RuntimeError(f"{what} in an evaluation that the main worker makes alone, such as a function of tt.report")
    if here.place.job.cluster.backup:
        accepted = f"must be 0 where {what} is used: a step may be made without a worker"
        raise ConfigError("cluster.backup", here.place.job.cluster.backup, accepted)
    if job in mine.called:
        return
    mine.called.add(job)
    # The others have the value of a worker that dies, and do not make the call again with its new process.
    reason = f"the script calls {what}, which takes all workers"
    here.refuse_repeats(reason)
    here.emit(Repeatable(str(here.me), reason))
    if job:
        here.emit(Unrepeatable(str(here.me), reason, job=False))


def _packed(what: str, value: Any) -> torch.Tensor:
    tensors: dict[str, torch.Tensor] = {}
    try:
        text = json.dumps(pack(value, tensors)).encode()
    except UnserializableState as error:
        accepted = f"must be of numbers, texts, lists, tuples, dicts and tensors, and has {error}"
        raise ConfigError(what, type(value).__name__, accepted) from None
    data = to_bytes({"json": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors})
    if len(data) > LARGEST:
        raise ConfigError(what, f"{len(data):,} bytes", f"must have at most {LARGEST:,} bytes on each worker")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(what: str, data: torch.Tensor) -> Any:
    tensors = from_bytes(data.numpy().tobytes(), what)
    return unpack(json.loads(tensors.pop("json").numpy().tobytes()), tensors)


def _alike(what: str, rows: list[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
    """Return `rows`, which must be of one dtype, and one shape from dimension `first`."""
    kinds = [f"{str(row.dtype).removeprefix('torch.')} of shape {tuple(row.shape[first:])}" for row in rows]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigError(what, kinds[0], f"must be of one kind on all workers: worker {number} of them has {kind}")
    return rows
