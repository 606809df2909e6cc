"""Who may be heard: a worker group that was started again is a new generation, and its words are not those before it.

Rule: a group lives and dies as a whole. Its incarnation is 0 at first and rises when its workers are started again. A
shard that hears of a newer one hears nobody of the group until the coordinator has decreed the change in its log of
decisions (`consistency`): every shard carries it out between the same two steps, so a step of the dead was applied by
all or by none. From there on a worker is heard once it has said itself which incarnation it is of. What was applied
counts for ever, by data stream; everything else that the group had said is forgotten.

Where a step can do without some of its workers (`regrouping.singly`), each of them lives and dies by itself, and all
this is true of one worker: the others go on.

Groups that use other servers are known to server (0,0), too, which hands out the batches: it asks their coordinator
how far they came (`AppliedBatchesOfStreams`) before it gives the rest to others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Fail, Message, WorkerRejoined
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.consistency import AWAY, DecisionLog
from topotrain.extensions.elastic.eligibility import refusal, singly
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams, RestartRequest

STREAMS = 2000
"""Data streams in one `AppliedBatchesOfStreams`."""


Key = int | Address
"""Who lives and dies together: a worker group, or one worker."""


@dataclass(slots=True)
class _Group:
    """One worker group, or one worker. here: those of incarnation `asked` that have said so."""

    incarnation: int = 0  # whose words count here
    asked: int = 0  # the newest that was heard of
    here: set[Address] = field(default_factory=set)


class Members:
    """The worker groups that one server knows, and whom it hears.

    Args:
        keys: worker groups, or (singly) workers, who live and die by themselves.
    """

    def __init__(self, keys: Iterable[Key], singly: bool = False) -> None:
        self._singly = singly
        self._groups = {key: _Group() for key in keys}
        self.changed = False
        """Some group is not of its first incarnation any more; until then everybody is heard."""

    def key(self, worker: Address) -> Key:
        """With whom a worker lives and dies."""
        return worker if self._singly else worker.group

    def hears(self, worker: Address) -> bool:
        """Whether a worker's words count, and whether it may be told anything."""
        group = self._groups.get(self.key(worker))
        return group is None or (group.asked == group.incarnation and self.counts(worker))

    def counts(self, worker: Address) -> bool:
        """Whether a worker is of the newest incarnation that was heard of."""
        group = self._groups[self.key(worker)]
        return not group.asked or worker in group.here

    def incarnation(self, key: Key) -> int:
        """Whose words count here; a group whose workers live by themselves is always the first."""
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
        """Nobody of an earlier incarnation is heard any more. False: that is so already."""
        known = self._groups[key]
        new = incarnation > known.asked
        if new:
            known.asked, known.here = incarnation, set()
            self.changed = True
        return new

    def restarted(self, key: Key, incarnation: int) -> list[Address]:
        """The change is carried out here; returns who waits for that."""
        self.expect(key, incarnation)
        known = self._groups[key]
        known.incarnation = max(known.incarnation, incarnation)
        return sorted(known.here) if known.asked == known.incarnation else []

    def deserted(self, group: int, incarnation: int) -> bool:
        """Whether nobody of this incarnation, or of a later one, has been heard of: those before it have left."""
        known = self._groups[group]
        return known.asked < incarnation or (known.asked == incarnation and not known.here)

    def undone(self) -> list[tuple[Key, int]]:
        """(who, incarnation) that was heard of, and is not carried out."""
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


class MembershipServer(Protocol):
    """What a change of members asks of the server."""

    def begun(self, group: int) -> bool:
        """Whether workers of the group have begun to train here."""
        ...

    def objection(self) -> str:
        """Why no group can be started again by itself, as far as only the server knows; empty: they can."""
        ...

    def ended(self, group: int) -> bool:
        """Whether all scripts of the group have come to their end."""
        ...

    def has_finished(self, worker: Address) -> bool:
        """Whether the script of one has."""
        ...

    def forget(self, group: int, ended: bool) -> None:
        """Forget what the group has said."""
        ...

    def forget_one(self, worker: Address) -> None:
        """Forget what one worker has said, whose group is still there."""
        ...

    def count(self, group: int, stream: int) -> int:
        """How many batches of a data stream of a group are applied."""
        ...

    def streams(self, group: int) -> Sequence[int]:
        """Data streams of a group of which `restarted` needs to know how many batches are applied."""
        ...

    def restarted(self, group: int, applied: Callable[[int], int], ended: bool) -> None:
        """The workers of a group are gone, and others come in their place."""
        ...

    def complete(self) -> bool:
        """Whether the values are known here."""
        ...

    def is_back(self, group: int) -> None:
        """Others may have to wait for the group again."""
        ...


class ElasticGroups:
    """How groups leave and come back, as one server sees it.

    Args:
        me, job, topology: the server's place.
        home: the server.
        log: of decisions, in a coordinator.
        send: says something; to `me`, too.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        home: MembershipServer,
        log: DecisionLog | None,
        send: Callable[[Address, Message], None],
    ) -> None:
        self._me, self._job, self._topology, self._home = me, job, topology, home
        self._log, self._send = log, send
        self._hands_out = me == (Role.SERVER, 0, 0)  # it hands out the batches of all groups
        self._ours = topology.worker_groups_of(me.group)
        known = range(topology.worker_groups) if self._hands_out else self._ours
        workers = (worker for group in known for worker in topology.workers(group))
        self.members = Members(workers, True) if singly(job) else Members(known)
        self._answers = CoordinatorAnswers()
        self._questions: list[tuple[Address, AppliedBatchesOfStreams]] = []

    def lost(self, worker: Address) -> None:
        """A worker's process is gone, and so is its group: the others are not to wait until it comes back."""
        group, home = worker.group, self._home
        if self._log is None or group not in self._ours or home.ended(group) or home.has_finished(worker):
            return
        if self.members.counts(worker) and not self._refusal(group):
            key = self.members.key(worker)
            self._expect(key, self.members.asked(key) + 1)

    def take(self, sender: Address, message: WorkerRejoined | RestartRequest | AppliedBatchesOfStreams) -> None:
        """One message about a group that comes back."""
        if isinstance(message, WorkerRejoined):
            self._returned(sender, message.incarnation)
        elif isinstance(message, RestartRequest):
            self._asked(message)
        elif message.group in self._ours:
            self._questions.append((sender, message))
            self._answer()
        elif message.incarnation == self.members.asked(message.group) > self.members.incarnation(message.group):
            counts = self._answers.take(message)
            if counts is not None:
                self._change(message.group, message.incarnation, lambda stream: counts.get(stream, 0), message.ended)

    def carry_out(self, group: int, incarnation: int) -> None:
        """The coordinator has decreed it, and all decisions before it are carried out."""
        self._change(group, incarnation, partial(self._home.count, group), self._home.ended(group))
        self._answer()

    def replace(self, worker: Address, incarnation: int) -> None:
        """The same of one worker."""
        self._home.forget_one(worker)
        for each in self.members.restarted(worker, incarnation):
            self._welcome(each)

    def leave(self, group: int, incarnation: int) -> None:
        """In the coordinator: all processes of the group before this incarnation have ended, and none is to follow."""
        assert self._log is not None
        if self.members.deserted(group, incarnation):
            self._asked(RestartRequest(group, incarnation))  # nothing of theirs is applied after this
            decision = self._log.decree(group, incarnation, AWAY)
            for server in self._topology.servers(self._me.group):
                self._send(server, decision)

    def again(self) -> None:
        """What was said to other servers may have been lost: say again what is not carried out."""
        for key, incarnation in self.members.undone():
            self._ask(key, incarnation)

    def _returned(self, worker: Address, incarnation: int) -> None:
        group, key = worker.group, self.members.key(worker)
        if incarnation > self.members.asked(key) and group in self._ours:
            why = self._refusal(group)
            if why and self._home.begun(group):
                for each in self._topology.workers(group):
                    self._send(each, Fail(f"worker group {group} was started again, but {why}"))
                return
            if why:  # the whole job was: these are the first that are heard here, and there is nothing to forget
                if self._log is not None:
                    self._log.adopt(group, incarnation)
                self._change(group, incarnation, partial(self._home.count, group), False)
        self._expect(key, incarnation)
        self.members.returned(worker, incarnation)
        if self.members.hears(worker):
            self._welcome(worker)

    def _refusal(self, group: int) -> str:
        return refusal(self._job, self._topology, group) or self._home.objection()

    def _expect(self, key: Key, incarnation: int) -> None:
        if self.members.expect(key, incarnation):
            self._ask(key, incarnation)

    def _ask(self, key: Key, incarnation: int) -> None:
        """Have the change decreed, or ask those who know when it is."""
        group, index = (key.group, key.index) if isinstance(key, Address) else (key, -1)
        coordinator = Address(Role.SERVER, self._topology.server_group_of(group), 0)
        if group in self._ours:
            self._send(coordinator, RestartRequest(group, incarnation, index))
        elif self._hands_out:
            for question in questions(group, incarnation, self._home.streams(group)):
                self._send(coordinator, question)

    def _asked(self, message: RestartRequest) -> None:
        group, incarnation = message.group, message.incarnation
        if group not in self._ours:
            self._expect(group, incarnation)
            return
        assert self._log is not None
        if message.index < 0:
            decision = self._log.restart(group, incarnation)
        else:
            decision = self._log.replace(group, message.index, incarnation)
        if decision is None:
            return
        for server in self._topology.servers(self._me.group):
            self._send(server, decision)
        if self._me.group:
            self._send(Address(Role.SERVER, 0, 0), message)

    def _change(self, group: int, incarnation: int, count: Callable[[int], int], ended: bool) -> None:
        self._home.forget(group, ended)
        welcome = self.members.restarted(group, incarnation)
        self._home.restarted(group, count, ended)
        for worker in welcome:
            self._welcome(worker)

    def _welcome(self, worker: Address) -> None:
        incarnation = self.members.incarnation(self.members.key(worker))
        self._send(worker, WorkerRejoined(incarnation, self._home.complete()))
        if worker.group in self._ours:
            self._home.is_back(worker.group)

    def _answer(self) -> None:
        waiting, self._questions = self._questions, []
        for desk, question in waiting:
            if self.members.incarnation(question.group) < question.incarnation:
                self._questions.append((desk, question))
            else:
                count = partial(self._home.count, question.group)
                self._send(desk, answer(question, count, self._home.ended(question.group)))

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {
            "members": self.members.state_dict(),
            "answers": self._answers.state_dict(),
            "questions": self._questions,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.members.load_state_dict(state["members"])
        self._answers.load_state_dict(state["answers"])
        self._questions = list(state["questions"])
