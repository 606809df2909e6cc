"""One model over the workers of a group: how `tt.prepare` cuts it, what `model(…)` then does, and the whole at the end.

Rule: the script keeps the objects that it has. Until the job ends `model.forward` runs this worker's steps of the cut
graph (`split.run`), and what belongs to other workers is on the meta device. At the end, on worker (0,0), the model is
whole again, with the final values and its own forward.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.hooks import RemovableHandle

from topotrain.buffers import ModelParts, describe_model, in_file
from topotrain.exchange import StepEnd
from topotrain.front.autoplace import check_room, place_modules
from topotrain.front.context import Context
from topotrain.front.embedding import Embedding
from topotrain.gradients import PushPath
from topotrain.job import ConfigError, Job, Placement
from topotrain.split import devices
from topotrain.split.assign import Assignment, assignments
from topotrain.split.capture import Captured, capture
from topotrain.split.division import divide
from topotrain.split.infer import program
from topotrain.split.meeting import Hello, Meeting
from topotrain.split.parts import Localised, localise, restore
from topotrain.split.passage import STEPPED, Key, Passage
from topotrain.split.run import Runner
from topotrain.worker import Worker

_DICE = STEPPED - 1
"""`Key.edge` of the state of torch's generator."""
_ANY = 1 << 16
"""More workers than a group has: where there is one only, a device may be called by any number."""


def split(here: Context, model: nn.Module, optimizer: Optimizer, loader: Any) -> "Split | None":
    """Cut the model, if the job or the script says so; None: every worker holds all of it.

    Raises:
        ConfigError: it cannot be cut in this way, or not in this job.
    """
    job, workers = here.place.job, here.place.topology.workers_per_group
    said = None
    if not (job.splits or tagged(model)):
        said = says_where(model) if workers > 1 else None
        if said is None:
            return None
    if "_orig_mod" in model._modules:
        raise ConfigError("tt.prepare", "a compiled model", "one that is split must come before torch.compile")
    captured = said or capture(model)
    if workers == 1:
        assignments(model, job, _ANY, captured)  # what is wrong is said all the same
        localise(model, optimizer, divide(model, {}, 1), 0, job.seed)
        return None
    _check(job, model)
    found = assignments(model, job, workers, captured)
    if job.placement is Placement.kAuto:
        with _dice_kept(loader):
            found, chosen = place_modules(job, model, captured, found, loader)
        if here.is_main:
            print(chosen.explain(), file=sys.stderr)
    division = divide(model, found, workers)
    if not (job.splits or any(share.owners for whole in division.parameters for share in whole.shares)):
        accepted = "names workers for nothing that has parameters: place a module, or write a partition block"
        raise ConfigError("tt.device", None, accepted)
    check_room(job, model, division, here.me.index)
    return Split(here, model, optimizer, captured, found, localise(model, optimizer, division, here.me.index, job.seed))


def tagged(model: nn.Module) -> bool:
    """Whether the script has said of some part of the model which worker is to have it."""
    tags = {thing.__dict__.get(devices.PLACE) for thing in (*model.modules(), *model.parameters())}
    return any(devices.parse(tag).task is not None for tag in tags if tag)


def says_where(model: nn.Module) -> Captured | None:
    """The model's graph, if a forward names a worker with `tt.device`. Only code that speaks of it is traced."""
    if not any(_speaks_of_device(kind) for kind in {type(module) for module in model.modules()}):
        return None
    try:
        captured = capture(model)
    except ConfigError:  # `tt.device()` in a forward is not forbidden to a model that nobody splits
        return None
    names = {node.meta.get("device") for node in captured.graph.nodes}
    found = map(devices.parse, filter(None, names))
    return captured if any(device.task is not None and device.job != "ps" for device in found) else None


def _speaks_of_device(kind: type[nn.Module]) -> bool:
    code = getattr(kind.forward, "__code__", None)
    if code is None or "device" not in code.co_names:
        return False
    spoken = [kind.forward.__globals__.get(name) for name in code.co_names]
    return any(getattr(thing, "__name__", "").partition(".")[0] == "topotrain" for thing in spoken) or any(
        getattr(thing, "__module__", "") == "topotrain.front.api" for thing in spoken
    )


@contextmanager
def _dice_kept(loader: Any) -> Iterator[None]:
    """Who only looks at a loader leaves the order of its batches as it was."""
    sampler = getattr(loader, "sampler", None)
    own = [
        dice for thing in (loader, sampler) if isinstance(dice := getattr(thing, "generator", None), torch.Generator)
    ]
    states = [dice.get_state() for dice in own]
    with torch.random.fork_rng(devices=[]):
        yield
    for dice, state in zip(own, states, strict=True):
        dice.set_state(state)


def _check(job: Job, model: nn.Module) -> None:
    replace(job, placement=Placement.kAuto)  # refuses what it would refuse if the conf, and not the script, split
    for name, module in model.named_modules():
        rows = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if rows or isinstance(module, Embedding):
            accepted = "its rows travel one by one, which a split model does not do: use nn.Embedding(sparse=False)"
            raise ConfigError("model", name, accepted)
    for what in ("test", "validate", "checkpoint"):
        freq = getattr(job, f"{what}_freq")
        if freq:
            raise ConfigError(f"{what}_freq", freq, "must be 0: a split model is tested and written at the end only")


class Split:
    """A model that this worker holds its part of.

    Args:
        here: the worker's place.
        model, optimizer: the script's, changed already.
        captured, found: the model's graph, and where its modules are.
        localised: what has been done to it.
    """

    def __init__(
        self,
        here: Context,
        model: nn.Module,
        optimizer: Optimizer,
        captured: Captured,
        found: Mapping[str, Assignment],
        localised: Localised,
    ) -> None:
        self.parts = localised.parts
        self._here, self._model, self._optimizer = here, model, optimizer
        self._localised = localised
        self._forward = Forward(model, here.place.job, captured, found, here.place.topology.workers_per_group)
        names = {module: name for name, module in model.named_modules()}
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Elsewhere(self._forward, names[module], where))
            for module, where in localised.absent.items()
        ]
        self._hooks.append(model.register_state_dict_pre_hook(_no_state))  # type: ignore[no-untyped-call]
        model.forward = self._forward

    def follow(self, worker: Worker, passage: Passage) -> None:
        """The worker has begun: from now on the model can be called."""
        self._forward.start(worker, passage)
        self._hooks += [
            self._optimizer.register_state_dict_pre_hook(_no_optimizer_state),
            self._optimizer.register_load_state_dict_pre_hook(_no_optimizer_state),
        ]

    def weight_said(self) -> None:
        """The script says what the next backward counts. Raises RuntimeError if its forward has been done already."""
        if self._forward.open:
            raise RuntimeError("tt.weight must come before the forward of a split model: it takes part in the backward")

    def whole(self, worker: Worker) -> ModelParts:
        """Worker (0,0), at the end: take the job's result; the model is whole again.

        What does not fit into memory is in nameless files of the workspace.
        """
        folder = self._here.workspace
        worker.take_final(folder)
        room = in_file(folder)
        restore(
            self._localised,
            self._optimizer,
            lambda index: worker.buffers.own("params", index),
            worker.final_buffers.__getitem__,
            lambda like: room(like.numel(), like.dtype).as_strided(like.shape, like.stride()),
        )
        for hook in self._hooks:
            hook.remove()
        del self._model.forward
        return describe_model(self._model)


class Forward:
    """What stands in the place of `model.forward`. Graphs are cut when they are first needed: one for each kind of
    arguments (dtypes, sizes apart from the samples, what is no tensor), and for each mode if the model looks at it."""

    def __init__(
        self, model: nn.Module, job: Job, captured: Captured, found: Mapping[str, Assignment], workers: int
    ) -> None:
        self._model, self._job = model, job
        self._captured, self._found, self._workers = captured, found, workers
        self._runners: dict[object, Runner] = {}
        self._passage: Passage | None = None
        self._weight: Callable[[], float] = lambda: 1.0
        self._last: Runner | None = None
        self.open = False  # a forward has been made whose backward has not begun
        self.inside = False

    def start(self, worker: Worker, passage: Passage) -> None:
        """There is somebody to talk to."""
        self._passage, self._weight = passage, worker.weight
        self._meeting = _JobMeeting(passage, worker, self._begun)
        worker.counts = self._counts
        worker.before_commit.append(self._step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """This worker's part; the output for its samples."""
        if self._passage is None:
            raise ConfigError("model", None, "is split: it can be called once tt.prepare has returned")
        self.inside = True
        try:
            self._last = runner = self._runner(self._passage, args, kwargs)
            self.open = torch.is_grad_enabled()
            return runner(*args, **kwargs)
        finally:
            self.inside = False

    def _runner(self, passage: Passage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runner:
        samples = samples_of(args, kwargs)
        training = self._model.training
        key = (kind_of(args, kwargs, samples), training if self._captured.by_mode else None)
        if key not in self._runners:
            cut = program(
                self._captured, self._found, self._model, args, kwargs, samples, self._workers, training=training
            )
            job = self._job
            self._runners[key] = Runner(
                cut,
                self._model,
                passage,
                self._weight,
                job.microbatches,
                job.schedule.value,
                self._meeting,
                self._meeting.dice,
            )
        return self._runners[key]

    def _counts(self) -> float:
        return self._weight() if self._last is None else self._last.counts

    def _begun(self) -> None:
        self.open = False

    def _step(self, step: int, end: StepEnd) -> None:
        self.open = False
        self._meeting.stepped()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ConfigError("model", None, "is split over several workers and cannot be copied; at the end it is whole")

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__(None)


class _JobMeeting(Meeting):
    """A meeting in a job: the worker hears of each backward, and all draw masks with the dice of worker 0.

    A worker would not notice a backward that reaches none of its parameters. And the dice of the workers do not stay
    alike: in a job one of them draws the order of the batches, as the only process of an ordinary script does.
    """

    def __init__(self, passage: Passage, worker: Worker, begins: Callable[[], None]) -> None:
        super().__init__(passage)
        self._begins = begins
        assert isinstance(worker.path, PushPath)  # gradients of a split model are hidden
        self._path = worker.path
        self.dice = torch.default_generator if passage.me == 0 else torch.Generator()

    def begun(self) -> None:
        """A backward begins here."""
        super().begun()
        self._begins()
        self._path.begin()

    def meet(self, mine: Hello) -> tuple[Hello, ...]:
        """As `Meeting.meet`; the dice come before worker 0's hello, so that nobody has to wait for them."""
        passage, key, draws = self.passage, Key(self.forwards, 0, _DICE, False), mine.chance != 0
        for other in range(1, passage.size if draws and passage.me == 0 else 1):
            passage.send(other, key, self.dice.get_state())
        hellos = super().meet(replace(mine, chance=int(draws)))
        if draws and passage.me != 0:
            self.dice.set_state(passage.take(0, key)[0])
        return hellos


def samples_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The samples in a call's arguments: the length of the first tensor that has one.

    Raises:
        ConfigError: there is none.
    """
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ConfigError("model(…)", None, "a split model needs a tensor whose first dimension counts the samples")


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: int) -> object:
    """Calls of one kind have one graph."""
    leaves, form = tree_flatten((args, dict(kwargs)))
    return str(form), tuple(_kind(leaf, samples) for leaf in leaves)


def _kind(leaf: Any, samples: int) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    sizes = list(leaf.shape)
    if samples in sizes:
        sizes[sizes.index(samples)] = -1
    return leaf.dtype, tuple(sizes)


class _Elsewhere:
    """Refuses a call of a module that is not here, or not all of it, unless it is the cut graph that calls."""

    def __init__(self, forward: Forward, name: str, where: str) -> None:
        self._forward, self._name, self._where = forward, name, where

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self._forward.inside:
            accepted = f"is {self._where} of its group; call the whole model, on all workers of the group"
            raise ConfigError("model", self._name, accepted)


def _no_state(*_: Any) -> NoReturn:
    accepted = "is in parts on several workers until the job ends: use tt.report(…) and final.safetensors"
    raise ConfigError("model.state_dict()", None, accepted)


def _no_optimizer_state(*_: Any) -> NoReturn:
    raise ConfigError("optimizer.state_dict()", None, "is not known of a split model yet")
