"""Every order in which things can happen, for a very small job: states are copied, searched depth first, seen once.

The rules are the product's (`DecisionLog`, `ApplyOrder`, `AppliedBatches`, `GroupRestarts`, `Members`); what a shard
does around them is told again here in a few lines, and a worker is an automaton. Connections keep the order of their
messages. A pause of a process needs no action of its own: everything else may happen before its next message.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MethodType

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core import protocol as m
from topotrain.core.server.consistency import RESTARTS, AppliedBatches, ApplyOrder, DecisionLog
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.extensions.elastic.membership import GroupRestarts

Way = tuple[object, Address]


@dataclass(frozen=True)
class Push:
    """A worker's whole step: one batch of its stream."""

    step: int
    seq: int


@dataclass(frozen=True)
class Scope:
    """How large the search is."""

    groups: int = 2
    pushes: int = 2
    crashes: int = 1
    duplicates: int = 0


@dataclass(eq=False)
class Shard:
    """What `Server` does with a step and with a change of members."""

    me: Address
    job: Job
    topology: Topology
    net: "JobState"
    order: ApplyOrder = field(default_factory=ApplyOrder)
    applied: AppliedBatches = field(default_factory=AppliedBatches)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    staged: dict[int, Push] = field(default_factory=dict)
    inside: list[m.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decisions = ShardDecisions(self, None if self.me.index else DecisionLog(self.topology.shards))
        self.regroup = GroupRestarts(self, self.job, self.topology)

    @property
    def log(self) -> DecisionLog | None:
        return self.decisions.log

    def send(self, to: Address, message: object) -> None:
        if to.role is Role.WORKER and not self.regroup.members.is_current(to):
            return
        if to == self.me:
            self.inside.append(message)
        else:
            self.net.say(self.me, to, message)

    def take(self, sender: Address, message: object) -> None:
        self._take(sender, message)
        while self.inside:
            self._take(self.me, self.inside.pop(0))

    def lost(self, worker: Address) -> None:
        self.regroup.on_lost(worker)
        while self.inside:
            self._take(self.me, self.inside.pop(0))

    def _take(self, sender: Address, message: object) -> None:
        if (
            sender.role is Role.WORKER
            and not isinstance(message, m.WorkerRejoined)
            and not self.regroup.members.is_current(sender)
        ):
            return
        match message:
            case Push():
                assert message.step <= self.made.get(sender.group, 0), f"{sender}: {message} is ahead"
                if message.step == self.made.get(sender.group, 0):
                    self.staged[sender.group] = message
                    incarnation = self.regroup.members.incarnation(sender.group)
                    vote = m.StepVote(sender.group, message.step, True, 0.0, False, self.order.next, incarnation)
                    self.send(Address(Role.SERVER, 0, 0), vote)
            case m.StepVote():
                self.log.staged(sender.index, message)
                self._decide()
            case m.StepDecision():
                for decision in self.order.arrive(message):
                    self._carry_out(decision)
                self._decide()
            case m.AppliedBatchesRequest():
                self.send(sender, m.AppliedBatchesReply(message.stream, self.applied.count(message.stream)))
            case _:
                self.regroup.handle(sender, message)

    def _decide(self) -> None:
        for group, step in self.log.ready() if self.log else ():
            self.decisions.send(self.log.decide(group, step))

    def _carry_out(self, decision: m.StepDecision) -> None:
        group = decision.group
        if decision.change == RESTARTS:
            self.regroup.on_decree(decision)
            return
        push = self.staged.pop(group, None)
        assert push is not None and push.step == decision.step, f"{self.me}: {decision} is not staged"
        if self.applied.verdict((group, push.seq, push.seq)) == "new":
            self.applied.record((group, push.seq, push.seq))
            self.cells[group, push.seq] = self.cells.get((group, push.seq), 0) + 1
        self.made[group] = push.step + 1
        self.send(Address(Role.WORKER, group, 0), m.Applied(push.step, 0, 0, False, 0.0))

    # what `GroupRestarts` asks of its server

    hooks = ExtensionHooks(())

    @property
    def queue(self) -> "Shard":
        return self

    worker_groups = steps = batches = replies = state = queue

    @property
    def groups(self) -> range:
        return range(self.topology.worker_groups)

    @property
    def asked(self) -> range:
        return self.groups

    def ended(self, group: int) -> bool:
        return False

    def has_finished(self, worker: Address) -> bool:
        return False

    def reset_group(self, group: int, ended: bool) -> None:
        self.made[group] = 0
        self.staged.pop(group, None)

    def count(self, stream: int, group: int) -> int:
        return self.applied.count(stream)

    complete = True

    def come_back(self, group: int) -> bool:
        return False


class ShardDecisions:
    """What `GroupRestarts` asks of a shard's `Decisions`."""

    def __init__(self, shard: Shard, log: DecisionLog | None) -> None:
        self.log, self._shard = log, shard

    def send(self, decision: m.StepDecision) -> None:
        for server in self._shard.topology.servers(0):
            self._shard.send(server, decision)

    def rejoin(self, group: int) -> None:
        pass


@dataclass(eq=False)
class WorkerIncarnation:
    """One process of a worker: announces itself, asks how far its stream is, pushes the rest."""

    me: Address
    incarnation: int
    shards: tuple[Address, ...]
    pushes: int
    net: "JobState"
    unheard: set[Address] = field(default_factory=set)
    applied: set[Address] = field(default_factory=set)
    seq: int = 0
    step: int = 0
    over: bool = False

    def begin(self) -> None:
        if not self.incarnation:
            self._push()
            return
        self.unheard = set(self.shards)
        for shard in self.shards:
            self.net.say_as(self, shard, m.WorkerRejoined(self.incarnation))

    def take(self, shard: Address, message: object) -> None:
        if self.over:
            return
        if shard in self.unheard:
            if isinstance(message, m.WorkerRejoined) and message.incarnation == self.incarnation:
                self.unheard.discard(shard)
                if not self.unheard:
                    self.net.say_as(self, self.shards[0], m.AppliedBatchesRequest(self.me.group))
        elif isinstance(message, m.AppliedBatchesReply):
            self.seq = message.count
            self._push()
        elif isinstance(message, m.Applied) and message.step == self.step:
            self.applied.add(shard)
            if self.applied == set(self.shards):
                self.applied = set()
                self.seq, self.step = self.seq + 1, self.step + 1
                self._push()

    def _push(self) -> None:
        self.over = self.seq >= self.pushes
        for shard in () if self.over else self.shards:
            self.net.say_as(self, shard, Push(self.step, self.seq))


class JobState:
    """One state of the job: what each process knows, and what is under way."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        block = Cluster(nworker_groups=scope.groups, nservers_per_group=2, server_worker_separate=True)
        self.job = Job(cluster=block)
        self.topology = layout(block)
        self.crashes, self.duplicates = scope.crashes, scope.duplicates
        self.ways: dict[tuple[object, object], list[object]] = {}
        self.shards = {me: Shard(me, self.job, self.topology, self) for me in self.topology.servers(0)}
        self.incarnations: dict[int, list[WorkerIncarnation]] = {}
        self.connected: dict[
            tuple[Address, int], int
        ] = {}  # (shard, group) -> which incarnation of it is connected there
        for group in range(scope.groups):
            self._bear(group)

    def _bear(self, group: int) -> None:
        incarnations = self.incarnations.setdefault(group, [])
        servers = self.topology.servers(0)
        incarnations.append(
            WorkerIncarnation(Address(Role.WORKER, group, 0), len(incarnations), servers, self.scope.pushes, self)
        )
        for shard in servers if len(incarnations) == 1 else ():
            self.connected[shard, group] = 0
        incarnations[-1].begin()

    def say(self, me: Address, to: Address, message: object) -> None:
        if to.role is Role.SERVER:
            self.ways.setdefault((me, to), []).append(message)
            return
        number = self.connected[me, to.group]
        if number == len(self.incarnations[to.group]) - 1:
            self.ways.setdefault((me, (to.group, number)), []).append(message)

    def say_as(self, worker: WorkerIncarnation, shard: Address, message: object) -> None:
        self.ways.setdefault(((worker.me.group, worker.incarnation), shard), []).append(message)

    # --- what can happen -----------------------------------------------------------------------------------------

    def actions(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = []
        for way, messages in self.ways.items():
            if messages and self._open(way):
                found.append(("deliver", way))
                if self.duplicates:
                    found.append(("double", way))
        for (shard, group), number in self.connected.items():
            if number < len(self.incarnations[group]) - 1:
                found.append(("end", (shard, group)))
        if self.crashes:
            found += [
                ("crash", group) for group, incarnations in self.incarnations.items() if not incarnations[-1].over
            ]
        return found

    def _open(self, way: tuple[object, object]) -> bool:
        """An incarnation sends to a shard once the connection of the one before has ended there."""
        worker, shard = way
        return isinstance(worker, Address) or self.connected[shard, worker[0]] == worker[1]

    def act(self, kind: str, what: object) -> None:
        if kind == "crash":
            self.crashes -= 1
            group, incarnations = what, self.incarnations[what]
            incarnations[-1].over = True
            for way in [way for way in self.ways if way[1] == (group, len(incarnations) - 1)]:
                del self.ways[way]
            self._bear(group)
        elif kind == "end":
            shard, group = what
            number = self.connected[what]
            self.connected[what] = number + 1
            self.ways.pop(((group, number), shard), None)
            self.shards[shard].lost(Address(Role.WORKER, group, 0))
        else:
            if kind == "double":
                self.duplicates -= 1
                message = self.ways[what][0]
            else:
                message = self.ways[what].pop(0)
            self._deliver(*what, message)
        for shard in self.shards.values():
            wrong = [cell for cell, count in shard.cells.items() if count > 1]
            assert not wrong, f"{shard.me} counted {wrong} more than once"

    def _deliver(self, sender: object, to: object, message: object) -> None:
        if isinstance(to, Address):
            who = sender if isinstance(sender, Address) else Address(Role.WORKER, sender[0], 0)
            self.shards[to].take(who, message)
        else:
            self.incarnations[to[0]][to[1]].take(sender, message)

    def check_end(self) -> None:
        """Nothing can happen any more."""
        waiting = [incarnations[-1].me for incarnations in self.incarnations.values() if not incarnations[-1].over]
        assert not waiting, f"{waiting} wait for ever"
        wanted = {(group, seq): 1 for group in self.incarnations for seq in range(self.scope.pushes)}
        for shard in self.shards.values():
            assert shard.cells == wanted, f"{shard.me} has {shard.cells}"

    def copy(self) -> "JobState":
        return clone(self, {id(each): each for each in (self.job, self.topology, self.scope)})

    def key(self) -> object:
        return frozen([self.crashes, self.duplicates, self.connected, self.ways, self.shards, self.incarnations])


# What is the same in all states, and what follows from the rest.
_SKIPPED = frozenset({"job", "topology", "net", "_job", "_topology", "_server", "_live"})


def clone(value, known):
    """As `copy.deepcopy`, which takes four times as long; messages and addresses are never changed, and are shared."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, m.Message | Enum) or _is_frozen(kind):
        return value
    found = known.get(id(value))
    if found is not None:
        return found
    if kind is tuple:
        return tuple([clone(each, known) for each in value])
    if kind is list:
        found = known[id(value)] = []
        found.extend([clone(each, known) for each in value])
    elif kind is set:
        found = known[id(value)] = set(value)
    elif kind is dict:
        found = known[id(value)] = {}
        for key, each in value.items():
            found[key] = clone(each, known)
    elif kind is MethodType:
        found = known[id(value)] = MethodType(value.__func__, clone(value.__self__, known))
    else:
        found = known[id(value)] = object.__new__(kind)
        names = vars(value) if hasattr(value, "__dict__") else kind.__slots__
        for name in names:
            setattr(found, name, clone(getattr(value, name), known))
    return found


_PLAIN = frozenset({int, str, float, bool, bytes, range, type(None), Address})


@cache
def _is_frozen(kind: type) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen


def frozen(value: object) -> object:
    """Anything here as something that can be a key: equal for equal states."""
    if isinstance(value, int | str | float | bytes | range | Enum | Address | None):
        return value
    if isinstance(value, dict):
        return frozenset((frozen(k), frozen(v)) for k, v in value.items() if v or not isinstance(v, list))
    if isinstance(value, set | frozenset):
        return frozenset(map(frozen, value))
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, MethodType):
        return None
    if is_dataclass(value):
        names = [f.name for f in fields(value) if f.name not in _SKIPPED]
        extra = () if not isinstance(value, Shard) else (frozen(value.log), frozen(value.regroup))
        return (type(value).__name__, *(frozen(getattr(value, name)) for name in names), *extra)
    return (type(value).__name__, *(frozen(v) for k, v in sorted(vars(value).items()) if k not in _SKIPPED))


def search(scope: Scope, most: int) -> tuple[int, int]:
    """(states, ends) of all that can happen. Raises AssertionError for a wrong one, or where there are too many."""
    start = JobState(scope)
    seen, stack, ends = {hash(start.key())}, [start], 0
    while stack:
        state = stack.pop()
        actions = state.actions()
        if not actions:
            state.check_end()
            ends += 1
        for action in actions:
            then = state.copy()
            then.act(*action)
            key = hash(then.key())
            if key not in seen:
                seen.add(key)
                stack.append(then)
                assert len(seen) <= most, f"more than {most} states"
    return len(seen), ends
