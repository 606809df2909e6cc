"""The state of a worker's own optimizer as bytes, and as a part of its steps.

A worker that starts again makes its script's optimizer anew, and has no state that is newer than the begin of its
epoch. The state of a living worker group is of the present values, up to the steps since the last round. So a worker
that comes back, or joins, takes that.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError
from topotrain.core.events import EventNotifier, StateTaken
from topotrain.extensions.inner_state.inner_state_client import (
    CopyMoment,
    InnerStateClient,
    StateQuestion,
    StateSource,
)
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.resume.state_serialization import UnserializableState, pack, unpack
from topotrain.training.context import Context
from topotrain.training.final_parameters import from_bytes, to_bytes
from topotrain.training.worker_extension import WorkerExtension

_WHAT = "the state of another worker's optimizer"


class OptimizerStates:
    """The states of several optimizers of a worker, as one object."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return the states by number."""
        return {str(number): each.state_dict() for number, each in enumerate(self._optimizers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, each in enumerate(self._optimizers):
            each.load_state_dict(state[str(number)])


class InnerState(StateSource, CopyMoment):
    """The state of the optimizers that step in this process.

    Args:
        choices: the steps behind which it is copied. None: whenever another group asks.
        more: the optimizers besides the first.
    """

    def __init__(
        self, optimizer: Optimizer, choices: ExchangeChoices | None = None, more: Sequence[Optimizer] = ()
    ) -> None:
        self._optimizers, self._changes = (optimizer, *more), Lock()
        self._choices = choices or ExchangeChoices()
        self._made = 0  # steps
        self._kept: dict[int, torch.Tensor | None] = {}  # step -> the state behind it, which a replay is to copy
        self._due: int | None = None  # the step behind which the state that was asked for last is copied
        self._asked: StateQuestion | None = None  # waits for that step

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, the optimizer makes a step."""
        if self._choices.is_copied(self._made):
            self._kept[self._made] = self._copy()
        # The thread of a connection copies between two steps, also while the worker waits in a round.
        with self._changes:
            yield
            self._made += 1
            asked, due = self._asked, self._asked is not None and self._made == self._due
            self._asked = None if due else asked
        if asked is not None and due:
            asked.answer()

    def when_due(self, question: StateQuestion) -> None:
        with self._changes:
            self._due = self._choices.copies(self._made)
            waits = self._made < self._due
            self._asked = question if waits else None
        if not waits:
            question.answer()

    def copy(self) -> torch.Tensor | None:
        if self._due is not None and self._due in self._kept:
            return self._kept[self._due]
        return self._copy()

    def _copy(self) -> torch.Tensor | None:
        tensors: dict[str, torch.Tensor] = {}
        try:
            with self._changes:
                packed = pack([Optimizer.state_dict(each)["state"] for each in self._optimizers], tensors)
        # Its state is not plain data.
        except UnserializableState:
            return None
        text = json.dumps({"shapes": self._shapes(), "state": packed}).encode()
        tensors["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # `frombuffer` needs writable memory.
        return torch.frombuffer(bytearray(to_bytes(tensors)), dtype=torch.uint8)

    def take(self, data: torch.Tensor) -> str:
        """Take the state of `copy`; settings such as rates stay.

        Returns why it does not fit, or "".
        """
        try:
            tensors = from_bytes(data.numpy().tobytes(), _WHAT)
            plain = json.loads(tensors.pop("json").numpy().tobytes())
            states, shapes = unpack(plain["state"], tensors), plain["shapes"]
        except (ConfigError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            return f"it cannot be read: {error}"
        fits = shapes == self._shapes() and isinstance(states, list) and len(states) == len(shapes)
        if not (fits and all(map(_fits, states, map(len, shapes)))):
            return "its optimizer has other parameters"
        for optimizer, state in zip(self._optimizers, states, strict=True):
            own = Optimizer.state_dict(optimizer)
            Optimizer.load_state_dict(optimizer, {"state": state, "param_groups": own["param_groups"]})
        return ""

    def _shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for group in each.param_groups for p in group["params"]] for each in self._optimizers]


def _fits(state: object, parameters: int) -> bool:
    """Whether this is the state of so many parameters, by number."""
    if not isinstance(state, dict):
        return False
    return all(type(key) is int and 0 <= key < parameters and isinstance(each, dict) for key, each in state.items())


class StateOfOthers(WorkerExtension):
    """Takes another worker group's state before the first step of a returning worker.

    Args:
        here: the worker.
        name: of the optimizer in `Context.kept`.
        state: of the optimizer.
        client: asks.
    """

    def __init__(self, here: Context, name: str, state: InnerState, client: InnerStateClient) -> None:
        self._here, self._name, self._state, self._client = here, name, state, client
        self._waits = True
        client.ask()

    def before_step(self) -> None:
        # Here, and not in `tt.prepare`: the state travels while the script computes its first gradient.
        if not self._waits:
            return
        self._waits = False
        data = self._client.answer()
        why = "no other worker group could give its own" if data is None else self._state.take(data)
        self._here.emit(StateTaken(str(self._here.me), not why))
        if why:
            notifier = EventNotifier(self._here, str(self._here.me))
            notifier.notify(f"the optimizer's state is that of the begin of the epoch, or fresh: {why}")
        else:
            self._here.supersede(self._name)


def share_state(here: Context, name: str, state: InnerState) -> WorkerExtension | None:
    """Give the state of this worker's optimizer to others.

    A worker that comes back takes that of another.

    Returns:
        what takes it, before the worker's first step.
    """
    client = here.connect().exchange.extension(InnerStateClient)
    client.offer(state, state)
    if here.place.identity.incarnation == 0:
        return None
    return StateOfOthers(here, name, state, client)
