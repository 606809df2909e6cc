"""The first worker of a session: it serves the client and leads the other tasks."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from topotrain.comm.store import StoreError, StoreService, serve_store
from topotrain.comm.store.discovery.static_addresses import numeric, split_address
from topotrain.comm.transport import TransportError
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection, call
from topotrain.compat.tensorflow.session.session_task import (
    TaskAddress,
    TaskFailed,
    check_values,
    failed,
    numbers_of,
    part_of,
    receive_reply,
)
from topotrain.compat.tensorflow.session.task_graph import OVER, SessionRendezvous, SessionWorker
from topotrain.config.job import ConfigError
from topotrain.launch.by_hand.manual_server import tell
from topotrain.parallel.program.worker_program import replaced
from topotrain.parallel.remote.argument_codec import CallInput, encode
from topotrain.parallel.remote.graph_description import states_from


class SessionLeader:
    """Serves the client of a session, leads the other tasks, and does its own part.

    tasks: all of the cluster's. me: this one. host: where others reach it.
    """

    def __init__(
        self, connection: SessionConnection, tasks: Sequence[TaskAddress], me: TaskAddress, host: str, secret: bytes
    ) -> None:
        self._connection, self._tasks, self._me, self._host, self._secret = connection, tasks, me, host, secret
        self._others: dict[TaskAddress, SessionConnection] = {}
        self._part: SessionWorker | None = None
        self._store: StoreService | None = None

    def lead(self) -> None:
        """Serve until the client closes the session, or is gone, or a step fails."""
        why = f"the client of {self._me} is gone"
        try:
            self._connection.send(
                {"workers": self._count("worker"), "servers": self._count("ps"), "task": self._me.index}
            )
            why = self._serve_requests() or OVER
        except SessionClosed:
            pass
        finally:
            # Before the last reply: a client that has it may open the next session at once.
            self._end(why)
            tell(f"{self._me}: {OVER}" + ("" if why == OVER else f": {why}"))
        if why == OVER:
            with suppress(SessionClosed):
                self._connection.send({})

    def _serve_requests(self) -> str:
        """Carry out the client's requests. Returns why the session had to end, or ""."""
        while True:
            request, tensors = self._connection.receive()
            if request.get("do") == "close":
                return ""
            try:
                answer = self._do(request, tensors)
            # Any error of torch or of the job goes to the client, where the user is.
            except Exception as error:
                found = error if isinstance(error, TaskFailed) else failed(self._me, error, self._part)
                # A description may be refused: nothing was computed, so the session goes on.
                over = request.get("do") != "learn" or not found.config
                if over:
                    # Before the reply, so that the other tasks are free when the client tries again.
                    self._end(str(found))
                self._connection.send({**found.to_data(), "over": over})
                if over:
                    return str(found)
                continue
            self._connection.send(*answer)

    def _count(self, job: str) -> int:
        return sum(task.job == job for task in self._tasks)

    def _do(self, request: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        do = request.get("do")
        if do == "start" and self._part is None:
            self._start(request, tensors)
            return ({},)
        part = self._part
        if part is None or do not in ("learn", "run", "pull"):
            raise ConfigError("session", str(do)[:80], "cannot be done now: must be learn, run or pull after start")
        if do == "learn":
            self._together(request, part)
            return ({},)
        if do == "pull":
            return self._pull(request, part)
        # The first tensor is the state of the client's generator.
        rng_state = tensors[0] if request["draws"] else None
        inputs = tensors[1:] if request["draws"] else tensors
        step = {"do": "run", "number": request["number"], "settings": request["settings"]}
        # To all workers, as text: each draws the masks of its own operations with the same state.
        step["dice"] = None if rng_state is None else rng_state.numpy().tobytes().hex()
        output, _ = self._together(step, part, inputs)
        found: list[torch.Tensor] = [] if rng_state is None else [part.rng_state]
        return {"output": encode(replaced(output, partial(_number, found), (torch.Tensor,)))}, found

    def _start(self, request: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        states = states_from(request["states"], self._count("worker"), self._count("ps"))
        # The states come from the client, and everything below trusts them.
        check_values(states, tensors)
        # A store for this session: processes of an earlier one cannot meet this one's.
        self._store = serve_store(self._host, 0, self._secret)
        name = f"session-{secrets.token_hex(8)}"
        meet = SessionRendezvous(name, self._store.url, self._count("worker"), self._count("ps"), self._me.index)
        shared = {"do": "begin", "meet": asdict(meet), "states": request["states"], "optimizer": request["optimizer"]}
        mine = numbers_of(states, self._me.index)
        # Before the others are called: what is refused here costs them nothing.
        part = part_of(
            meet, self._me.index, {**shared, "numbers": mine}, [tensors[n] for n in mine], self._secret, self._host
        )
        for task in self._tasks:
            if task != self._me:
                numbers = numbers_of(states, task.index) if task.job == "worker" else []
                self._others[task] = connection = self._call(task)
                # A task takes a long message only from the session that it belongs to.
                self._send(task, connection, {"do": "join"})
                self._send(task, connection, {**shared, "numbers": numbers}, [tensors[n] for n in numbers])
        # All are asked first, and the replies are read after that: the tasks prepare at the same time.
        for task, connection in self._others.items():
            receive_reply(task, connection)
        self._part = part
        # Only when all have agreed, since from here on the tasks wait for each other.
        self._together({"do": "go"}, part)

    def _call(self, task: TaskAddress) -> SessionConnection:
        host, port = split_address(task.address)
        try:
            return call(numeric(host), port, self._secret)
        except (OSError, TransportError, StoreError) as error:
            raise TaskFailed(f"{task} at {task.address} cannot be reached from {self._me}: {error}") from error

    def _send(
        self,
        task: TaskAddress,
        connection: SessionConnection,
        request: Mapping[str, Any],
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        try:
            connection.send(request, tensors)
        except SessionClosed as error:
            raise TaskFailed(f"{task} is gone: {error}", cause=False) from error

    def _together(
        self, request: Mapping[str, Any], part: SessionWorker, inputs: Sequence[torch.Tensor] = ()
    ) -> tuple[Any, list[tuple[dict[str, Any], list[torch.Tensor]]]]:
        """Have all workers do it, this one too. Raises the error that explains most."""
        starts = request["do"] == "go"  # the ps tasks start as well
        others = {task: connection for task, connection in self._others.items() if starts or task.job == "worker"}
        # Also after a failure: a reply that stays unread would be taken for the next one.
        for task, connection in others.items():
            self._send(task, connection, request)
        failures, result, replies = [], None, []
        try:
            result = part.execute(request, inputs)
        except Exception as error:
            failures.append(failed(self._me, error, self._part))
            if request["do"] != "learn":
                # The others may be waiting for this one in the step. The servers pass the reason on to them.
                part.leave(failures[0].bare)
        for task, connection in others.items():
            try:
                replies.append(receive_reply(task, connection))
            except TaskFailed as error:
                failures.append(error)
        if failures:
            # A task that lost another one reports a consequence. The task with the cause reports the error itself.
            raise next((found for found in failures if found.cause), failures[0])
        return result, replies

    def _pull(self, request: Mapping[str, Any], part: SessionWorker) -> tuple[Any, ...]:
        found, replies = self._together({"do": "pull"}, part)
        for reply, tensors in replies:
            found |= dict(zip(reply["numbers"], tensors, strict=True))
        return {"numbers": list(found)}, list(found.values())

    def _end(self, why: str) -> None:
        for connection in self._others.values():
            if why == OVER:
                with suppress(SessionClosed):
                    connection.send({"do": "end"})
            # After any other end the closed connection alone says that the session is over.
            connection.close()
        self._others.clear()
        if self._part is not None:
            self._part.leave(why)
        if self._store is not None:
            self._store.close()
            self._store = None


def _number(found: list[torch.Tensor], tensor: torch.Tensor) -> CallInput:
    """Add a tensor to the output, and return its number."""
    found.append(tensor)
    return CallInput(len(found) - 1)
