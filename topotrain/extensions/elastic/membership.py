"""Incarnations of worker groups: a group that was started again is another one.

Rule: a group starts and ends as a whole. Its incarnation is 0 at first and rises when its workers are started again. A
shard that learns of a newer incarnation drops the messages of the group until the coordinator has decreed the change
in its log of decisions (`consistency`). Every shard carries the change out between the same two steps, so a step of
the former workers was applied by all shards or by none. From there on the messages of a worker count once it has sent
its incarnation. Applied batches count for ever, by data stream. Everything else that the group had sent is forgotten.

Where a step needs only some of its workers (`eligibility.singly`), each of them starts and ends by itself. All this is
then true of one worker, and the others continue.

Server (0,0), which hands out the batches, knows the groups of other servers, too. It asks their coordinator for their
progress (`AppliedBatchesOfStreams`) before it gives the rest to other groups.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import (
    Applied,
    Commit,
    Fail,
    Message,
    ProtocolError,
    StepDecision,
    StepVote,
    WorkerRejoined,
)
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.consistency import AWAY, REPLACED, RESTARTS
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, RegroupExtension
from topotrain.extensions.elastic.eligibility import refusal, singly
from topotrain.extensions.elastic.membership_messages import (
    AppliedBatchesOfStreams,
    GroupLeaveRequest,
    GroupLeft,
    RestartRequest,
)

STREAMS = 2000
"""Data streams in one `AppliedBatchesOfStreams`."""


Key = int | Address
"""A worker group, or one worker that starts and ends by itself."""


@dataclass(slots=True)
class _Group:
    """One worker group, or one worker. here: those of incarnation `asked` that have said so."""

    incarnation: int = 0  # whose words count here
    asked: int = 0  # the newest that was heard of
    here: set[Address] = field(default_factory=set)


class Members:
    """The incarnations of the worker groups that one server knows.

    Args:
        keys: worker groups, or (singly) workers that start and end by themselves.
    """

    def __init__(self, keys: Iterable[Key], singly: bool = False) -> None:
        self._singly = singly
        self._groups = {key: _Group() for key in keys}
        self.changed = False
        """Some group is not of its first incarnation any more; until then all messages count."""

    def key(self, worker: Address) -> Key:
        """The unit that starts and ends with a worker."""
        return worker if self._singly else worker.group

    def hears(self, worker: Address) -> bool:
        """Whether messages from and to a worker count."""
        group = self._groups.get(self.key(worker))
        return group is None or (group.asked == group.incarnation and self.counts(worker))

    def counts(self, worker: Address) -> bool:
        """Whether a worker is of the newest incarnation that was heard of."""
        group = self._groups[self.key(worker)]
        return not group.asked or worker in group.here

    def incarnation(self, key: Key) -> int:
        """The incarnation that counts here; 0 for a group of workers that start by themselves."""
        return self._groups[key].incarnation if key in self._groups else 0

    def asked(self, key: Key) -> int:
        """The newest incarnation that was heard of."""
        return self._groups[key].asked

    def returned(self, worker: Address, incarnation: int) -> None:
        """A worker says of which incarnation it is; one that has been replaced says it in vain."""
        group = self._groups[self.key(worker)]
        if incarnation == group.asked:
            group.here.add(worker)

    def expect(self, key: Key, incarnation: int) -> bool:
        """Drop messages of earlier incarnations. False: that is so already."""
        known = self._groups[key]
        new = incarnation > known.asked
        if new:
            known.asked, known.here = incarnation, set()
            self.changed = True
        return new

    def restarted(self, key: Key, incarnation: int) -> list[Address]:
        """The change is carried out here; returns the workers that wait for that."""
        self.expect(key, incarnation)
        known = self._groups[key]
        known.incarnation = max(known.incarnation, incarnation)
        return sorted(known.here) if known.asked == known.incarnation else []

    def deserted(self, group: int, incarnation: int) -> bool:
        """Whether no worker of this incarnation, or of a later one, has been here."""
        known = self._groups[group]
        return known.asked < incarnation or (known.asked == incarnation and not known.here)

    def undone(self) -> list[tuple[Key, int]]:
        """(key, incarnation) of changes that are known, and not carried out."""
        return [(key, known.asked) for key, known in self._groups.items() if known.asked > known.incarnation]

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"groups": {key: field_values(group) for key, group in self._groups.items()}, "changed": self.changed}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        for key, (incarnation, asked, here) in state["groups"].items():
            self._groups[key] = _Group(incarnation, asked, set(here))
        self.changed = state["changed"]


# --- how far a group of other servers came -----------------------------------------------------------------------


def questions(group: int, incarnation: int, streams: Sequence[int]) -> list[AppliedBatchesOfStreams]:
    """What server (0,0) asks that group's coordinator."""
    runs = [streams[at : at + STREAMS] for at in range(0, len(streams), STREAMS)] or [()]
    pairs = [tuple(number for stream in run for number in (stream, 0)) for run in runs]
    return [AppliedBatchesOfStreams(group, incarnation, part, len(runs), counts) for part, counts in enumerate(pairs)]


def answer(question: AppliedBatchesOfStreams, count: Callable[[int], int], ended: bool) -> AppliedBatchesOfStreams:
    """The coordinator's answer; count: how many batches of a stream are applied."""
    counts = tuple(n for stream in question.counts[::2] for n in (stream, count(stream)))
    return replace(question, counts=counts, ended=ended)


class CoordinatorAnswers:
    """What coordinators answered, by group, until all parts are here."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, AppliedBatchesOfStreams]] = {}

    def take(self, part: AppliedBatchesOfStreams) -> Mapping[int, int] | None:
        """Keep a part; (stream -> batches applied) once the answer is complete."""
        known = self._parts.setdefault(part.group, {})
        if any(other.incarnation != part.incarnation for other in known.values()):
            known.clear()
        known[part.part] = part
        if len(known) < part.parts:
            return None
        del self._parts[part.group]
        return {s: n for each in known.values() for s, n in zip(each.counts[::2], each.counts[1::2], strict=True)}

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"parts": self._parts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._parts = {group: dict(parts) for group, parts in state["parts"].items()}


# --- the change --------------------------------------------------------------------------------------------------


class ElasticGroups(RegroupExtension):
    """The worker groups that restart, leave and come back, as one server sees them.

    Args:
        server: the server.
        job, topology: its job.
    """

    messages = (WorkerRejoined, RestartRequest, AppliedBatchesOfStreams, GroupLeaveRequest, GroupLeft)
    before_model = (WorkerRejoined, RestartRequest, AppliedBatchesOfStreams, GroupLeft)
    decrees = (RESTARTS, REPLACED, AWAY)

    def __init__(self, server: Server, job: Job, topology: Topology) -> None:
        self._server, self._me, self._job, self._topology = server, server.me, job, topology
        self._hands_out = server.me == (Role.SERVER, 0, 0)  # it hands out the batches of all groups
        self._ours = server.groups
        known = range(topology.worker_groups) if self._hands_out else self._ours
        workers = (worker for group in known for worker in topology.workers(group))
        self.members = Members(workers, True) if singly(job) else Members(known)
        self._leaving: set[int] = set()  # groups that are to leave after their next step
        self._answers = CoordinatorAnswers()
        self._questions: list[tuple[Address, AppliedBatchesOfStreams]] = []

    # --- hooks of the server -------------------------------------------------------------------------------------

    def accepts(self, sender: Address, message: Message) -> bool:
        """As `ServerExtension.accepts`: not what the processes before the last restart have sent."""
        if not self.members.changed or sender.role is Role.SERVER or isinstance(message, WorkerRejoined):
            return True
        return self.members.hears(sender)

    def may_send(self, to: Address, message: Message) -> bool:
        """As `ServerExtension.may_send`."""
        return not self.members.changed or to.role is not Role.WORKER or self.members.hears(to)

    def amend_vote(self, vote: StepVote, commits: Mapping[int, Commit]) -> StepVote:
        """As `ServerExtension.amend_vote`."""
        incarnation = self.members.incarnation(vote.group)
        return replace(vote, incarnation=incarnation) if incarnation else vote

    def amend_reply(self, group: int, applied: Applied, first: Commit) -> Applied:
        """As `ServerExtension.amend_reply`."""
        return replace(applied, leaves=True) if group in self._leaving else applied

    def handle(self, sender: Address, message: Message) -> Outbox:
        """As `ServerExtension.handle`."""
        if isinstance(message, WorkerRejoined):
            self._returned(sender, message.incarnation)
        elif isinstance(message, RestartRequest):
            self._asked(message)
        elif isinstance(message, GroupLeaveRequest):
            self._start_leaving(message)
        elif isinstance(message, GroupLeft):
            self.leave(message.group, message.incarnation)
        elif isinstance(message, AppliedBatchesOfStreams):
            self._receive_counts(sender, message)
        return ()

    def on_decree(self, decision: StepDecision) -> Outbox:
        """As `ServerExtension.on_decree`; all decisions before this one are carried out."""
        group, incarnation = decision.group, decision.step
        if decision.change == RESTARTS:
            self._change(group, incarnation, partial(self._count, group), self._server.worker_groups.ended(group))
            self._answer()
        elif decision.change == REPLACED:
            self._replace(decision)
        else:
            self._continue_without(group, incarnation)
        return ()

    def on_lost(self, worker: Address) -> None:
        """As `ServerExtension.on_lost`: the other groups must not wait until the group comes back."""
        group, server = worker.group, self._server
        if server.decisions.log is None or group not in self._ours:
            return
        if server.worker_groups.ended(group) or server.has_finished(worker):
            return
        if self.members.counts(worker) and not self._refusal(group):
            key = self.members.key(worker)
            self._expect(key, self.members.asked(key) + 1)

    def on_reconnect(self) -> None:
        """As `ServerExtension.on_reconnect`: send again what is not carried out."""
        for key, incarnation in self.members.undone():
            self._ask(key, incarnation)

    def reset_group(self, group: int, ended: bool) -> None:
        """As `ServerExtension.reset_group`."""
        self._leaving.discard(group)

    # --- a restart -----------------------------------------------------------------------------------------------

    def _returned(self, worker: Address, incarnation: int) -> None:
        group, key = worker.group, self.members.key(worker)
        if incarnation > self.members.asked(key) and group in self._ours:
            why = self._refusal(group)
            if why and self._has_begun(group):
                for each in self._topology.workers(group):
                    self._server.queue.send(each, Fail(f"worker group {group} was started again, but {why}"))
                return
            if why:  # the whole job was: these are the first that are heard here, and there is nothing to forget
                if self._server.decisions.log is not None:
                    self._server.decisions.log.adopt(group, incarnation)
                self._change(group, incarnation, partial(self._count, group), False)
        self._expect(key, incarnation)
        self.members.returned(worker, incarnation)
        if self.members.hears(worker):
            self._welcome(worker)

    def _has_begun(self, group: int) -> bool:
        """Whether workers of the group have begun to train here."""
        server = self._server
        return group in server.replies.asked or any(each.has_begun() for each in server.hooks.has_begun)

    def _count(self, group: int, stream: int) -> int:
        """How many batches of a data stream of a group are applied."""
        return self._server.steps.batches.count(stream, group)

    def _refusal(self, group: int) -> str:
        return refusal(self._job, self._topology, group) or self._objection()

    def _objection(self) -> str:
        """Why no group can be started again alone, as only the extensions know."""
        return _first(extension.refuses_regroup() for extension in self._server.hooks.refuses_regroup)

    def _expect(self, key: Key, incarnation: int) -> None:
        if self.members.expect(key, incarnation):
            self._ask(key, incarnation)

    def _ask(self, key: Key, incarnation: int) -> None:
        """Have the change decreed, or ask the coordinator that learns when it is."""
        group, index = (key.group, key.index) if isinstance(key, Address) else (key, -1)
        coordinator = Address(Role.SERVER, self._topology.server_group_of(group), 0)
        if group in self._ours:
            self._server.queue.send(coordinator, RestartRequest(group, incarnation, index))
        elif self._hands_out:
            streams = [stream for each in self._server.hooks.streams for stream in each.streams(group)]
            for question in questions(group, incarnation, streams):
                self._server.queue.send(coordinator, question)

    def _asked(self, message: RestartRequest) -> None:
        group, incarnation = message.group, message.incarnation
        if group not in self._ours:
            self._expect(group, incarnation)
            return
        log = self._server.decisions.log
        assert log is not None
        if message.index < 0:
            decision = log.restart(group, incarnation)
        else:
            decision = log.replace(group, message.index, incarnation)
        if decision is None:
            return
        self._server.decisions.send(decision)
        if self._me.group:
            self._server.queue.send(Address(Role.SERVER, 0, 0), message)

    def _change(self, group: int, incarnation: int, count: Callable[[int], int], ended: bool) -> None:
        server = self._server
        server.reset_group(group, ended)
        welcome = self.members.restarted(group, incarnation)
        for extension in server.hooks.group_restarted:
            server.queue.send_all(extension.group_restarted(group, count, ended))
        for worker in welcome:
            self._welcome(worker)

    def _replace(self, decision: StepDecision) -> None:
        """One worker has another process. Raises ProtocolError for a worker that the group does not have."""
        if len(decision.members) != 1 or not 0 <= decision.members[0] < self._topology.workers_per_group:
            raise ProtocolError(f"another process for workers {decision.members}")
        worker = Address(Role.WORKER, decision.group, decision.members[0])
        self._server.reset_worker(worker)
        for each in self.members.restarted(worker, decision.step):
            self._welcome(each)

    def _welcome(self, worker: Address) -> None:
        server, incarnation = self._server, self.members.incarnation(self.members.key(worker))
        server.queue.send(worker, WorkerRejoined(incarnation, server.state.complete))
        if worker.group in self._ours:
            if server.worker_groups.come_back(worker.group):
                server.shutdown.back(worker.group)
                for extension in server.hooks.group_returns:
                    extension.group_returns(worker.group)
            server.decisions.rejoin(worker.group)

    # --- how far a group of other servers came -------------------------------------------------------------------

    def _receive_counts(self, sender: Address, message: AppliedBatchesOfStreams) -> None:
        group, incarnation = message.group, message.incarnation
        if group in self._ours:
            self._questions.append((sender, message))
            self._answer()
        elif incarnation == self.members.asked(group) > self.members.incarnation(group):
            counts = self._answers.take(message)
            if counts is not None:
                self._change(group, incarnation, lambda stream: counts.get(stream, 0), message.ended)

    def _answer(self) -> None:
        waiting, self._questions = self._questions, []
        for sender, question in waiting:
            group = question.group
            if self.members.incarnation(group) < question.incarnation:
                self._questions.append((sender, question))
            else:
                ended = self._server.worker_groups.ended(group)
                self._server.queue.send(sender, answer(question, partial(self._count, group), ended))

    # --- a group that leaves the job, and may come back ----------------------------------------------------------

    def may_change(self, group: int, wish: str) -> str:
        """Why the workers of a group cannot leave the job now ("leave"), be given up ("lose"), or come ("join").

        Empty: they can. Only the coordinator knows.
        """
        groups, hooks = self._server.worker_groups, self._server.hooks
        why = self._objection()
        if why:
            return why
        if wish == "join":
            return "the job is coming to its end" if any(map(groups.ended, self._ours)) else ""
        if groups.ended(group):
            return "its scripts have come to their end"
        why = _first(extension.refuses_leave() for extension in hooks.refuses_leave)
        if why:
            return why
        others = [each for each in self._ours if each != group and groups.runs(each)]
        return "" if others else "no other group trains that could read what it leaves"

    def _start_leaving(self, message: GroupLeaveRequest) -> None:
        if message.incarnation < self.members.asked(message.group):
            return
        self._leaving.add(message.group)
        for extension in self._server.hooks.group_leaves:
            self._server.queue.send_all(extension.group_leaves(message.group))

    def leave(self, group: int, incarnation: int) -> None:
        """In the coordinator: all processes of the group before this incarnation have ended, and none is to follow."""
        if self.members.deserted(group, incarnation):
            self._asked(RestartRequest(group, incarnation))  # nothing of theirs is applied after this
            self._server.decisions.decree(group, incarnation, AWAY)

    def _continue_without(self, group: int, incarnation: int) -> None:
        """No other group waits for this one, also at the job's end, unless it has come back already."""
        if not self.members.deserted(group, incarnation):
            return
        server = self._server
        server.worker_groups.leave(group)
        server.shutdown.away(group)
        server.exchange.end_group(group)
        if server.state.model is not None:
            server.exchange.drain()

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """As `ServerExtension.state_dict`."""
        members, answers = self.members.state_dict(), self._answers.state_dict()
        return {"members": members, "answers": answers, "questions": self._questions, "leaving": self._leaving}

    def load_state_dict(self, state: State) -> None:
        """As `ServerExtension.load_state_dict`."""
        self.members.load_state_dict(state["members"])
        self._answers.load_state_dict(state["answers"])
        self._questions, self._leaving = list(state["questions"]), set(state["leaving"])


def _first(texts: Iterable[str]) -> str:
    """The first text that is not empty; empty: all are."""
    return next(filter(None, texts), "")
