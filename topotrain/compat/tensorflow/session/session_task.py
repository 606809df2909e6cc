"""The common part of all tasks of a session: errors, and the own part of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from topotrain.comm.transport import TransportError
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection
from topotrain.compat.tensorflow.session.task_graph import SessionRendezvous, SessionWorker, error_text
from topotrain.config.job import ConfigError
from topotrain.core.client.client import JobError, PeerLost
from topotrain.parallel.remote.graph_description import StateDescription, states_from

# Consequences of another error, which the task that failed first reports.
_EXPECTED = (JobError, PeerLost, TransportError)


@dataclass(frozen=True, slots=True)
class TaskAddress:
    """A task: "ps" or "worker", its number, and its address."""

    job: str
    index: int
    address: str

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"


class TaskFailed(Exception):
    """A task could not do what it was asked to.

    text: for the client, with the task's name. config: the client can correct it. cause: it is not a consequence of an
    error elsewhere. bare: the text without the task's name.
    """

    def __init__(self, text: str, config: bool = False, cause: bool = True, bare: str = "") -> None:
        super().__init__(text)
        self.config, self.cause, self.bare = config, cause, bare or text

    def to_data(self) -> dict[str, Any]:
        return {"error": str(self), "config": self.config, "cause": self.cause}


def part_of(
    meet: SessionRendezvous,
    index: int,
    request: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    secret: bytes,
    host: str,
) -> SessionWorker:
    """Return the part of worker `index` in a session. Raises ConfigError.

    request, tensors: the first worker's message. secret, host: see `SessionWorker`.
    """
    states = states_from(request["states"], meet.workers, meet.servers)
    mine = numbers_of(states, index)
    # Both sides compute this from the states, so a difference is an error in one of them.
    if request["numbers"] != mine or not isinstance(request["optimizer"], str):
        raise ConfigError("states", None, f"must be those of worker {index}")
    check_values([states[number] for number in mine], tensors)
    values = dict(zip(mine, tensors, strict=True))
    return SessionWorker(meet, index, states, values, request["optimizer"], secret, host)


def check_values(states: Sequence[StateDescription], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError for values of other forms than the states have."""
    forms = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors]
    if forms != [(state.form.dtype, state.form.sizes) for state in states]:
        raise ConfigError("states", None, "must have the values that they are described with")


def numbers_of(states: Sequence[StateDescription], worker: int) -> list[int]:
    return [number for number, state in enumerate(states) if state.worker == worker]


def receive_reply(task: TaskAddress, connection: SessionConnection) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a task's reply. Raises TaskFailed where it failed, or is gone."""
    try:
        reply, tensors = connection.receive()
    except SessionClosed as error:
        raise TaskFailed(f"{task} is gone: {error}", cause=False) from error
    if "error" in reply:
        raise TaskFailed(str(reply["error"]), bool(reply.get("config")), bool(reply.get("cause", True)))
    return reply, tensors


def failed(task: TaskAddress, error: BaseException, part: SessionWorker | None) -> TaskFailed:
    """Return an error of a task as TaskFailed. `part` may know the cause."""
    text = error_text(error) if part is None else part.reason(error)
    # Expected errors name the task that failed first.
    whole = text if isinstance(error, _EXPECTED) else f"{task}: {text}"
    return TaskFailed(whole, isinstance(error, ConfigError), not isinstance(error, _EXPECTED), text)
