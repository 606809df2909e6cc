"""The script's optimizer as the inner one, between two rounds of a worker."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import Cluster, ConfigError, Merge, Updater
from topotrain.core.client.client import Client
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.client.value_pull import ValueObserver
from topotrain.core.optim.updater_block import build
from topotrain.core.profiling.spans import Clock
from topotrain.core.protocol import NO_REVISION
from topotrain.extensions.inner_state.inner_state import InnerState
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.outer_optimizer.exchanged_steps import ExchangedSteps
from topotrain.extensions.outer_optimizer.grace.exchange_times import ExchangeTimes
from topotrain.extensions.outer_optimizer.local_values import LocalValues, TakeRule
from topotrain.extensions.outer_optimizer.radial.radial_marks import mark_radial
from topotrain.extensions.outer_optimizer.round_client import RoundClient
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN
from topotrain.extensions.outer_optimizer.rounds import (
    RoundSchedule,
    StepTimes,
    UntoldSteps,
    check_fragments,
    fragment_to_push,
    fragments_of,
)
from topotrain.training.context import Connections
from topotrain.training.gradients.gradient_hooks import GradientPath
from topotrain.training.gradients.local_steps import LocalOptimizer
from topotrain.training.parameters.device_parameters import ParameterHolder, QueuedPush
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.worker_stats import ProcessClock, StepBatches

NO_TABLES = "must not be given where the model has tables or sparse weights: their rows are no local values"
_REVISION = 1


class DifferencePath(GradientPath):
    """Pushes the received values minus the worker's own, at a commit.

    Args:
        buffers, gradients, batches: as for `GradientPath`.
        values: the worker's own values.
        trained: the numbers of the parameters that the optimizer changes.
        inner: has the weight of a push.
    """

    def __init__(
        self,
        buffers: ModelBuffers,
        gradients: GradientExchange,
        batches: StepBatches,
        values: LocalValues,
        trained: Iterable[int],
        inner: "InnerOptimizer",
    ) -> None:
        super().__init__(buffers, gradients, batches)
        self._values, self._inner = values, inner
        self._present = [0] * len(buffers.map.buckets)
        for index in trained:
            for bucket, piece in self._pieces[index]:
                self._present[bucket.id] |= 1 << piece

    def push_only(self, buckets: Collection[int]) -> None:
        """Push these buckets (numbers): other workers of the group push the rest."""
        self._present = [present if number in buckets else 0 for number, present in enumerate(self._present)]

    def _hook(self, index: int, tensor: nn.Parameter) -> None:
        """Register nothing: the gradient of a backward stays with the script's optimizer."""

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        """No hook is registered."""

    def _end(self) -> None:
        """No hook is registered."""

    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        weight = self._inner.weight()
        self._values.push(optimizer)
        self.backwards = 1
        revisions = [NO_REVISION] * len(self._present)
        for bucket in self._map.buckets:
            present = self._present[bucket.id]
            if present and self._takes[bucket.id] == optimizer:
                revisions[bucket.id] = _REVISION
                body = self._flats.view(self._inner.difference, bucket)
                push = QueuedPush(self._gradients, self._step, _REVISION, bucket, weight, present, body, False)
                self._mirror.then(push)
        self._mirror.drain()
        return tuple(revisions), 0, 0


class InnerOptimizer(LocalOptimizer):
    """The steps of one worker between two rounds.

    Args:
        optimizer: the script's.
        cluster: the settings of the rounds.
        named: the model's parameters.
        embeddings: those of them that are embeddings.
        clock: measures steps. None: that of this process.
        choices: a recording or a replay of what depends on time. None: there is none.
        more: the script's other optimizers. A step is one of them, or of the first.

    Raises:
        ConfigError: the optimizer cannot make its steps this way.
    """

    difference = "local"
    """The flat buffer of what is pushed."""

    def __init__(
        self,
        optimizer: Optimizer,
        cluster: Cluster,
        named: Iterable[tuple[str, nn.Parameter]],
        embeddings: Collection[nn.Parameter] = (),
        clock: Clock | None = None,
        choices: ExchangeChoices | None = None,
        more: Sequence[Optimizer] = (),
    ) -> None:
        self._choices = choices or ExchangeChoices()
        self._inner, self._weigh = (optimizer, *more), cluster.weigh
        self.shared_state = InnerState(optimizer, self._choices, more)
        """The optimizer's state, for other worker groups."""
        self._schedule = RoundSchedule(cluster.sync_freq, cluster.fragments, cluster.overlap)
        self._decoupled = cluster.quorum > 0
        self._rule = TakeRule(cluster.keep, cluster.blend) if cluster.trains_in_exchange else None
        self._make_step = [plain_step(type(each)) for each in self._inner]
        self._trained = {id(p) for each in self._inner for group in each.param_groups for p in group["params"]}
        assert cluster.outer is not None
        trained = [(name, p) for name, p in named if id(p) in self._trained]
        self.optimizers = outer_optimizers(cluster.outer, trained, cluster.fragments)
        if cluster.merge is Merge.kRadial:
            for made in self.optimizers:
                mark_radial(made, embeddings)
        self._untold = UntoldSteps(cluster.fragments)
        self._exchanges: ExchangeTimes | None = None
        self._turn = self._fragment = 0  # of the next push, and of the last one
        self._due = False  # the last answer of `pushes`
        self._times = StepTimes() if cluster.paces_by_time else None
        self._clock = clock or ProcessClock()
        self._seconds = 0.0  # of a step, before the last push
        self._made = self._pushed_at = 0  # calls of `step`: all, and before the last push

    def open(self, buffers: ModelBuffers, client: Client, batches: StepBatches) -> GradientPath:
        parts = buffers.parts
        if parts.aside:
            raise ConfigError("cluster.outer", None, NO_TABLES)
        self._buffers, self._batches = buffers, batches
        self._rounds = client.extension(RoundClient)
        exchanges = client.gradients.hooks.by_class.get(ExchangeTimes)
        self._exchanges = exchanges if isinstance(exchanges, ExchangeTimes) else None
        trained = [index for index, tensor in enumerate(parts.tensors) if id(tensor) in self._trained]
        self._values = LocalValues(parts.tensors, buffers, buffers.map, self._rule, trained, self.difference)
        return DifferencePath(buffers, client.gradients, batches, self._values, trained, self)

    @property
    def untold(self) -> UntoldSteps:
        """The steps of which no round was told."""
        return self._untold

    @property
    def unsure_steps(self) -> float:
        """The steps that are in no round, as far as this worker knows.

        They are counted as in `UntoldSteps.dropped`.
        """
        # Those of a push that is under way are lost if the worker dies before its round is over.
        return self._untold.pending_steps + (self._untold.last_told if self._values.is_pushing else 0.0)

    def observer(self, holder: ParameterHolder) -> ValueObserver:
        if self._rule is None:
            return self._values
        return ExchangedSteps(self._values, self._untold, self._batches, self._rule)

    # --- steps ---------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """The samples of the steps since the last push."""
        return self._batches.samples

    @property
    def optimizer_of_push(self) -> int:
        return self._fragment

    @property
    def has_sum(self) -> bool:
        return bool(self._untold.pending) or self._batches.samples > 0

    def pushes(self, step: int) -> bool:
        self._due = self._choices.pushes(step, self._is_due) if self._decoupled else self._schedule.pushes(step)
        return self._due

    @property
    def _is_due(self) -> bool:
        """Whether a worker that waits for no other one pushes now."""
        if self._values.is_pushing:
            return False
        # Counted behind the last round, which may have taken longer than the steps between two. A worker that comes
        # back pushes at once: later it would be too late for the round, and wait for the next one of the fragment.
        return self.named != OWN_TURN or self._made - self._pushed_at >= self.interval

    def fetches(self, step: int) -> bool:
        # As `pushes` has said: a message may have come since.
        return self._due

    @property
    def defers(self) -> bool:
        return self._schedule.overlap > 0 or self._decoupled

    def settles(self, step: int, over: bool) -> bool:
        if self._decoupled:
            return self._choices.takes(step, over and self._values.is_pushing)
        return self._schedule.takes(step)

    def step(self, inv_scale: float, number: int = 0) -> None:
        # Without a fused kernel a GradScaler has unscaled the gradients. With one the kernel does it.
        with self.shared_state.changing():
            self._make_step[number](self._inner[number])
        self._untold.step()
        self._values.learn()

    @contextmanager
    def sum_as_gradient(self) -> Iterator[None]:
        named = self.named
        turn = fragment_to_push(self._turn if named == OWN_TURN else named, self._untold.steps)
        self._fragment = self._choices.fragment(self._made, turn)
        self._rounds.follow()
        if self._times is not None and self._times.seconds:
            self._seconds = self._times.seconds
            self._rounds.tell_time(self._seconds)
        self._untold.read(self.samples)
        if self._exchanges is not None:
            self._exchanges.begin()
        yield
        self._values.end_push()
        self._untold.push(self._fragment)
        self._turn = (self._fragment + 1) % self._schedule.fragments
        self._pushed_at = self._made

    @property
    def named(self) -> int:
        """The fragment that the coordinator has named for the next push, or OWN_TURN."""
        return self._rounds.named

    @property
    def interval(self) -> int:
        """This worker's own steps between two pushes."""
        return self._schedule.interval_at(self._seconds, self._rounds.fastest)

    # --- the others of the group ---------------------------------------------------------------------------------

    def meet(self, connections: Connections) -> None:
        """Connect to the other workers of the group. Here: there are none."""

    def leave(self) -> None:
        """The script has ended."""

    # --- hooks of the worker -------------------------------------------------------------------------------------

    def weight(self) -> float:
        return self._untold[self._fragment].weight(self._weigh)

    def before_step(self) -> None:
        self._made += 1
        if self._times is not None:
            self._times.step(self._clock.now())

    def before_change(self) -> None:
        accepted = "cannot be used with cluster.outer, where the script may change parameters without it, as its own"
        raise ConfigError("tt.assign", None, accepted)


def outer_optimizers(outer: Updater, named: list[tuple[str, nn.Parameter]], fragments: int) -> tuple[Optimizer, ...]:
    """Return the servers' optimizer of each fragment of these parameters.

    Raises:
        ConfigError: there are fewer parameters.
    """
    unique = list({id(p): (name, p) for name, p in named}.values())
    check_fragments(fragments, len(unique))
    fragment = fragments_of([p.nbytes for _, p in unique], fragments)
    found = []
    for number in range(fragments):
        made = build(outer, [each for each, its in zip(unique, fragment, strict=True) if its == number])
        for group in made.param_groups:
            # The kernel that torch takes by default. The step is too rare for a faster one to matter.
            group.update({"fused": False} if "fused" in group else {})
        found.append(made)
    return tuple(found)


def plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the `step` of an optimizer's class without the hooks of the script.

    Raises:
        ConfigError: it needs a closure.
    """
    step: Any = kind.step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        accepted = "must be an optimizer with a step() that needs no closure, with cluster.outer"
        raise ConfigError("optimizer", kind.__name__, accepted)
    # torch wraps the method of each class in one that runs hooks. The adopted optimizer runs them.
    found: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found
