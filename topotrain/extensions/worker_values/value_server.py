"""Values of scripts on server (0,0), which passes them on to a call's workers.

A call is complete when every worker of it has sent its value. The server computes nothing: each worker gets the values
of all, in the order of the workers, so that the result is the same on each and from run to run.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import torch

from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import LastingNotice, Notice
from topotrain.core.protocol import Fail, Message, ProtocolError
from topotrain.core.server.component_state import State
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, RegroupExtension, ReportingExtension
from topotrain.extensions.worker_values.value_messages import AwaitedCall, PassedCall, WorkerValue

JOB = -1
"""The key of the call over all workers, beside the numbers of the worker groups."""
SAME = "all workers must make the same calls, in the same order"
_GONE = -1


@dataclass(slots=True)
class _Call:
    """The call of a group, or of the job, that is under way or comes next."""

    number: int = 0
    values: dict[Address, WorkerValue] = field(default_factory=dict)


class ValueServer(RegroupExtension, ReportingExtension):
    """The calls of all workers of a job.

    Args:
        server: server (0,0).
        topology: the job's layout.
        absent: the worker groups that are not there at the start.
    """

    messages = before_model = (WorkerValue, PassedCall)

    def __init__(self, server: Server, topology: Topology, absent: Collection[int] = ()) -> None:
        self._server, self._topology = server, topology
        self._calls = {scope: _Call() for scope in (JOB, *range(topology.worker_groups))}
        self._ended: dict[Address, int] = {}  # workers that make no call any more, and the steps of their scripts
        self._metrics: dict[Address, str] = {}  # of workers that have ended, as in `PassedCall`
        self._buffers: dict[int, WorkerValue] = {}  # of the main worker when the job began, by part
        self._asked: list[tuple[Address, WorkerValue]] = []  # for parts that are not here yet
        for group in absent:
            self.group_over(group)

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        if not isinstance(message, WorkerValue):
            return super().place(sender, message, viewable)
        return torch.empty(message.room, dtype=torch.uint8)

    def handle(self, sender: Address, message: Message) -> Outbox:
        if isinstance(message, PassedCall):
            return self._passed(sender, message)
        assert isinstance(message, WorkerValue)
        if sender != (Role.WORKER, message.group, message.index):
            raise ProtocolError(f"{sender} sends a value of worker ({message.group},{message.index})")
        if message.number < 0:
            return self._first_buffers(sender, message)
        scope = JOB if message.job else sender.group
        call = self._calls[scope]
        if message.number != call.number:
            numbers = f"{sender} calls {message.what} as number {message.number + 1}, and the others are in number"
            return self._fail(self._workers(scope), f"{numbers} {call.number + 1}: {SAME}")
        call.values[sender] = message
        return self._refusal(scope, sender) or self._replies(scope, message)

    def _workers(self, scope: int) -> list[Address]:
        groups = range(self._topology.worker_groups) if scope == JOB else (scope,)
        return [worker for group in groups for worker in self._topology.workers(group)]

    def _refusal(self, scope: int, sender: Address) -> Outbox:
        """The end of a call that can never be complete; empty: it can."""
        call, other = self._calls[scope], self._calls[sender.group if scope == JOB else JOB]
        mine = call.values[sender]
        # A worker waits in one call at a time, so a call of the group and one of the job wait for each other.
        apart = {worker: value for worker, value in other.values.items() if worker.group == sender.group}
        for worker, value in {**apart, **call.values}.items():
            if value.what != mine.what:
                return self._fail(self._workers(JOB), f"{_said(worker, value)}, {_said(sender, mine)}: {SAME}")
        return self._left(scope, self._ended)

    def _left(self, scope: int, workers: Iterable[Address]) -> Outbox:
        """The end of a call that awaits one of these workers, which make none any more."""
        call = self._calls[scope]
        for worker in workers if call.values else ():
            if worker not in call.values and scope in (JOB, worker.group):
                steps = self._ended[worker]
                how = "is not in the job" if steps == _GONE else f"ended its script after {steps} steps"
                said = _said(*next(iter(call.values.items())))
                return self._fail(self._workers(scope), f"{said}, {worker} {how}: {SAME}")
        return ()

    def _replies(self, scope: int, message: WorkerValue) -> Outbox:
        call, workers = self._calls[scope], self._workers(scope)
        if len(call.values) == len(workers):
            self._calls[scope] = _Call(call.number + 1)
            return [(worker, call.values[each]) for worker in workers for each in workers]
        # One worker of a group speaks for it.
        if sum(worker.group == message.group for worker in call.values) > 1:
            return ()
        awaited = AwaitedCall(message.group, message.job, message.number, message.place)
        return [(worker, awaited) for worker in workers if worker not in call.values]

    def _passed(self, sender: Address, message: PassedCall) -> Outbox:
        if message.over:
            self._ended[sender], self._metrics[sender] = message.steps, message.metrics
            return [*self._left(sender.group, [sender]), *self._left(JOB, [sender])]
        scope = JOB if message.job else sender.group
        call = self._calls[scope]
        if message.number != call.number or sender in call.values or not call.values:
            return ()
        said = _said(*next(iter(call.values.items())))
        return self._fail(self._workers(scope), f"{said}, {sender} went on without this call: {SAME}")

    def _first_buffers(self, sender: Address, message: WorkerValue) -> Outbox:
        """The main worker tells the first values of its buffers, and others ask for them."""
        if message.body is None:
            self._asked.append((sender, message))
        elif sender == self._topology.workers(0)[0]:
            # A new process of the main worker may have drawn others.
            self._buffers.setdefault(message.number, message)
        known = [(worker, ask, self._buffers.get(ask.number)) for worker, ask in self._asked]
        self._asked = [(worker, ask) for worker, ask, there in known if there is None]
        return [
            (worker, replace(there, body=None) if there.what == ask.what else there)
            for worker, ask, there in known
            if there is not None
        ]

    @staticmethod
    def _fail(workers: Iterable[Address], text: str, config: bool = True) -> Outbox:
        return [(worker, Fail(text, config=config)) for worker in workers]

    def events(self) -> list[Notice]:
        """The metrics of the main worker's share, and the files of several workers."""
        told = {
            worker: dict(line.rsplit("=", 1) for line in text.splitlines() if "=" in line)
            for worker, text in sorted(self._metrics.items())
        }
        found: list[Notice] = []
        for name, mine in told.get(Address(Role.WORKER, 0, 0), {}).items():
            others = [
                f"{theirs[name]} on {worker}"
                for worker, theirs in told.items()
                if worker.group == 0 and theirs.get(name, mine) != mine
            ]
            if others:
                own = f"tt.report {name} is the main worker's own, {mine}, with {', '.join(others[:3])}"
                text = f"{own}: tt.mean, tt.sum or tt.gather make one value of all workers"
                found.append(Notice(str(self._server.me), text))
        writers = Counter(name for each in told.values() for name in each if os.path.isabs(name))
        twice = [path for path, count in writers.items() if count > 1]
        if twice:
            more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
            wrote = f"{writers[twice[0]]} workers wrote {twice[0]}{more}, one over the other's"
            text = f"{wrote}: use tt.save, or write it in `if tt.is_main():`"
            found.append(LastingNotice(str(self._server.me), text))
        return found

    # --- the workers -------------------------------------------------------------------------------------------------

    def group_over(self, group: int) -> Outbox:
        for worker in self._topology.workers(group):
            self._ended.setdefault(worker, _GONE)
        return self._left(JOB, self._topology.workers(group))

    def group_returns(self, group: int) -> None:
        self._ended = {worker: steps for worker, steps in self._ended.items() if worker.group != group}

    def reset_group(self, group: int, ended: bool) -> None:
        if not ended:
            self.group_returns(group)
            self._calls[group] = _Call()
            self._asked = [(worker, ask) for worker, ask in self._asked if worker.group != group]
            self._refuse_return(f"worker group {group}", JOB)

    def reset_worker(self, worker: Address) -> None:
        self._asked = [(other, ask) for other, ask in self._asked if other != worker]
        self._refuse_return(str(worker), JOB, worker.group)

    def _refuse_return(self, who: str, *scopes: int) -> None:
        # The launcher restarts more than this, unless the death came just before it knew of the first call.
        if any(self._calls[scope].number or self._calls[scope].values for scope in scopes):
            text = f"{who} was started again alone, and the others have its values of tt.mean and the like already"
            self._server.queue.send_all(self._fail(self._workers(JOB), text, config=False))

    def state_dict(self) -> State:
        calls = {scope: (call.number, call.values) for scope, call in self._calls.items()}
        return {
            "calls": calls,
            "ended": self._ended,
            "metrics": self._metrics,
            "buffers": self._buffers,
            "asked": self._asked,
        }

    def load_state_dict(self, state: State) -> None:
        self._calls = {scope: _Call(number, dict(values)) for scope, (number, values) in state["calls"].items()}
        self._ended, self._buffers, self._asked = dict(state["ended"]), dict(state["buffers"]), list(state["asked"])
        self._metrics = dict(state["metrics"])


def _said(worker: Address, value: WorkerValue) -> str:
    return f"{worker} called {value.what} after {value.place[0]} steps"
