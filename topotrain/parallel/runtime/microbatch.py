"""Execution of one micro-batch on one worker."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from topotrain.parallel.program.layouts import even
from topotrain.parallel.program.split_program import (
    LocationKind,
    Program,
    ProgramStep,
    ResultRef,
    SizeArgument,
    StepKind,
)
from topotrain.parallel.program.worker_program import LocalStep, edges_of, replaced, share, taken_out
from topotrain.parallel.runtime import dropout
from topotrain.parallel.runtime.channel import TensorKey
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.transfers import EdgeTransfer, ForwardMessages, TransferPlan

OWN_SHARE = (LocationKind.BATCH, LocationKind.SAME, LocationKind.OWN)
_PLANS = 10_000  # cached plans of a program: numbers of samples may vary without limit


class ForwardSettings:
    """The constants of all forwards: the program, this worker's steps, the model."""

    def __init__(self, program: Program, model: nn.Module, me: int) -> None:
        self.program, self.model, self.me = program, model, me
        self.stops, self.edges = share(program, me), edges_of(program)
        self.taken = frozenset(step.number for step in taken_out(program))
        # Values from other workers need a gradient. Autograd runs their nodes only if an input needs one, too.
        self.anchor = torch.zeros((), requires_grad=True)
        self._plans: dict[tuple[int, tuple[int, ...]], TransferPlan] = {}

    def plan(self, edge: int, samples: tuple[int, ...]) -> TransferPlan:
        """Return the transfers of an edge."""
        # Few numbers of samples occur, so plans are kept.
        found = self._plans.get((edge, samples))
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            found = self._plans[edge, samples] = TransferPlan.of(self.edges[edge], self.me, samples)
        return found


@dataclass(slots=True)
class ForwardPass:
    """One forward: arguments, samples of each worker, and micro-batches.

    Attributes:
        modules: the modules of this worker's steps, by number.
        apart: steps that draw random numbers themselves.
    """

    number: int
    messages: ForwardMessages
    given: Mapping[str, Any]
    samples: tuple[int, ...]
    micros: int
    drops: Mapping[int, dropout.Dropout]
    masks: dict[tuple[int, int], torch.Tensor]
    modules: Mapping[int, nn.Module]
    apart: Set[int]

    def samples_of(self, micro: int) -> tuple[int, ...]:
        """Return each worker's samples in a micro-batch."""
        return tuple(end - first for first, end in (even(count, self.micros)[micro] for count in self.samples))


class MicroBatchState:
    """State of one micro-batch: live values, tokens of its moves, and its position.

    `cold` is an edge that no gradient returns over, and `root` is the value that this worker has made for it.
    """

    # Steps run in the program's order, so that sums in the backward have a fixed order.

    def __init__(
        self, settings: ForwardSettings, forward_pass: ForwardPass, micro: int, cold: int | None = None
    ) -> None:
        self.settings, self.forward_pass, self.micro, self.cold = settings, forward_pass, micro, cold
        self.root: Any = None
        self.samples = forward_pass.samples_of(micro)
        self.values: dict[ResultRef, Any] = {}
        self.tokens: list[torch.Tensor] = []
        self.departed: list[EdgeTransfer] = []
        self.place = 0
        self._arrivals: list[EdgeTransfer] | None = None
        self._moves: dict[int, EdgeTransfer] = {}

    @property
    def done(self) -> bool:
        """Whether all stops have run."""
        return self.place == len(self.settings.stops)

    @property
    def at_end(self) -> bool:
        """Whether all steps have run. Only the last arrivals may be left."""
        return self.place >= len(self.settings.stops) - 1

    @property
    def next(self) -> LocalStep:
        """The next stop."""
        return self.settings.stops[self.place]

    def missing(self) -> list[tuple[int, TensorKey]]:
        """Return the tensors for which the next stop has to wait."""
        if self._arrivals is None:
            self._arrivals = [self._move(edge) for edge in self.next.arrivals if not self._stays(edge)]
        return [wanted for move in self._arrivals for wanted in self.forward_pass.messages.missing(move)]

    def run(self) -> None:
        """Run the next stop with its moves, and wait for missing tensors."""
        stop = self.next
        for edge in stop.arrivals:
            self._arrive(edge)
        if stop.step is not None:
            value = self._step(stop.step)
            self.values[ResultRef(stop.step.number)] = value
            for edge in stop.leaves:
                self._leave(edge, value)
        # A value that no later step reads would keep its memory until the end of the forward.
        for ref in stop.frees:
            del self.values[ref]
        self.place, self._arrivals = self.place + 1, None

    def resolve(self, nested: Any, step: ProgramStep | None = None) -> Any:
        """Replace references in arguments by values; without a step, in the output."""
        own = step is None or step.layout.where in OWN_SHARE
        samples = self.samples[self.settings.me] if own else sum(self.samples)

        def leaf(found: ResultRef | SizeArgument) -> Any:
            return self.values[found] if isinstance(found, ResultRef) else found.per_sample * samples + found.more

        return replaced(nested, leaf)

    def _stays(self, edge: int) -> bool:
        return self.settings.edges[edge].source.where in (LocationKind.SAME, LocationKind.WHOLE)

    def _move(self, edge: int) -> EdgeTransfer:
        if edge not in self._moves:
            self._moves[edge] = EdgeTransfer(
                self.settings.plan(edge, self.samples), self.micro, self.forward_pass.messages
            )
        return self._moves[edge]

    def _leave(self, edge: int, value: Any) -> None:
        if self._stays(edge):
            if self.settings.edges[edge].target.on(self.settings.me):
                self.values[ResultRef(self.settings.edges[edge].value, edge)] = self._move(edge).own_part(value)
            return
        move = self._move(edge)
        if edge == self.cold:
            # No gradient returns over this edge: the backward starts here, from the root.
            self.root, value = value, value.detach()
        token = move.leave(value)
        if token is not None:
            self.tokens.append(token)
            self.departed.append(move)

    def _arrive(self, edge: int) -> None:
        if self._stays(edge):
            return
        value, token = self._move(edge).arrive(self.settings.anchor)
        self.values[ResultRef(self.settings.edges[edge].value, edge)] = value
        if token is not None:
            self.tokens.append(token)

    def _step(self, step: ProgramStep) -> Any:
        try:
            if step.number not in self.forward_pass.apart:
                return self._compute(step)
            # The state of a step's own draws differs from forward to forward, and is the same when the run is repeated.
            seed = torch.initial_seed() + self.forward_pass.number
            # Removed as it is used: masks of the whole forward would stay in memory otherwise.
            masks = self.forward_pass.masks.pop((step.number, self.micro), None)
            with dropout.apart(step, masks, seed, self.micro, self.settings.me):
                return self._compute(step)
        except Exception as error:
            where = f"{step.line}: " if step.line else ""
            error.add_note(f"{where}in step {step.name} of the split model on worker {self.settings.me} of its group")
            raise

    def _compute(self, step: ProgramStep) -> Any:
        if step.kind is StepKind.INPUT:
            return self._share(step, self.forward_pass.given[step.target])
        if step.kind is StepKind.ATTRIBUTE:
            return attrgetter(step.target)(self.settings.model)
        args, kwargs = self.resolve(step.args, step), self.resolve(dict(step.kwargs), step)
        drop = self.forward_pass.drops.get(step.number)
        if drop is not None:
            return drop(
                args[0] if args else kwargs["input"], self.forward_pass.masks.pop((step.number, self.micro), None)
            )
        if step.kind is StepKind.MODULE:
            return self.forward_pass.modules[step.number](*args, **kwargs)
        if step.kind is StepKind.METHOD:
            return getattr(args[0], step.target)(*args[1:], **kwargs)
        value = step.target(*args, **kwargs)
        return self._share(step, value) if step.number in self.settings.taken else value

    def _share(self, step: ProgramStep, value: Any) -> Any:
        """Return this micro-batch's samples of an argument."""
        shape, samples = step.shape, self.forward_pass.samples[self.settings.me]
        if self.forward_pass.micros == 1 or shape is None or shape.batch < 0:
            return value
        first, end = even(samples, self.forward_pass.micros)[self.micro]
        return value.narrow(shape.batch, first * shape.per_sample, (end - first) * shape.per_sample)


def pipe(batches: Sequence[MicroBatchState], channel: NetworkChannel) -> None:
    """Run all micro-batches to the end, the lowest that can run first."""
    # The end stops run after all steps. Values that arrive there come first in the backward. So a worker that waits for
    # their gradient does not wait for backwards of other micro-batches.
    for only_steps in (True, False):
        while left := [
            index for index, batch in enumerate(batches) if not (batch.at_end if only_steps else batch.done)
        ]:
            ran, wanted = one_step(batches, left)
            if not ran:
                channel.wait_any(wanted)


def one_step(batches: Sequence[MicroBatchState], candidates: Iterable[int]) -> tuple[bool, list[tuple[int, TensorKey]]]:
    """Run the next stop of the first candidate that can run.

    Returns:
        Whether a stop was run. If not, also the tensors for which the candidates wait.
    """
    wanted = list[tuple[int, TensorKey]]()
    for index in candidates:
        batch = batches[index]
        # No micro-batch overtakes the one before it, so modules with state (BatchNorm) see them in order.
        if batch.done or (index > 0 and batches[index - 1].place <= batch.place):
            continue
        missing = batch.missing()  # checked only once: wait_any notices a message that arrives after this
        if not missing:
            batch.run()
            return True, []
        wanted += missing
    return False, wanted
