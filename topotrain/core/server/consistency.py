"""Clocks, decisions and applied batches: the consistency of a server group.

`max_staleness` bounds how far a worker group's clock may lead that of the slowest live group when it starts a step.
With 0 a job is bulk-synchronous: a barrier, and the groups' updates one after another in group order. With k it is
stale synchronous parallel (Ho et al., 2013). Without a bound it is fully asynchronous (Downpour: Dean et al., 2012).

A step is applied on all shards of a server group or on none. Shards vote that a step is staged. Shard 0 decides and
numbers its decisions, and every shard applies them in the order of their numbers. A shard that missed a decision asks
for it by number and never guesses. This is two-phase commit (Gray, 1978). To apply one log in order everywhere is
state-machine replication (Schneider, 1990).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from topotrain.core.protocol import ProtocolError, StepDecision, StepVote, refused_pairs
from topotrain.core.server.component_state import DeclaredState, State, field_values
from topotrain.core.server.gradients.gradient_source import StepError
from topotrain.core.server.server_extension import ALL_WORKERS, StepPolicy


class Clocks:
    """The clock of each worker group: the number of steps that it has committed.

    Args:
        groups: the worker groups.
        max_staleness: largest lead at the start of a step, or None for no bound.
    """

    def __init__(self, groups: Iterable[int], max_staleness: int | None) -> None:
        self._clock = dict.fromkeys(groups, 0)
        self._bound = max_staleness
        self._away: set[int] = set()
        self._live: list[int] | None = None  # the result of `live`, until a group leaves or joins
        self._least: int | None = None  # the clock of the slowest of them, until it may be another one

    def tick(self, group: int) -> None:
        """The group committed a step."""
        # A group that is ahead of the slowest one changes nothing.
        if self._clock[group] == self._least:
            self._least = None
        self._clock[group] += 1

    def set_all(self, clock: int) -> None:
        """All groups stand at the same point (after warm-up)."""
        self._clock, self._least = dict.fromkeys(self._clock, clock), None

    def go_on(self, clocks: Mapping[int, int]) -> None:
        """Continue the clocks of an earlier start of the job."""
        # With other groups than then, all start at the slowest clock.
        least = min(clocks.values(), default=0)
        same = clocks.keys() == self._clock.keys()
        self._clock, self._least = dict(clocks) if same else dict.fromkeys(self._clock, least), None

    def leave(self, group: int) -> None:
        """The group ended, or does not run yet. No group waits for it."""
        self._away.add(group)
        self._live = self._least = None

    def join(self, group: int, clock: int | None = None) -> None:
        """The group runs (again): it is live, at its entry or at the given clock."""
        if group in self._away:
            self._clock[group] = self.entry(group) if clock is None else clock
            self._away.discard(group)
            self._live = self._least = None

    def entry(self, group: int) -> int:
        """The clock at which a group that was away comes back: at least the slowest one."""
        # Lower, it would hold up all others. Its own clock is kept, because clocks never fall.
        others = [self._clock[g] for g in self.live() if g != group]
        return max([self._clock[group], *([min(others)] if others else [])])

    def clock(self, group: int) -> int:
        """Committed steps of a group."""
        return self._clock[group]

    def live(self) -> Sequence[int]:
        """The groups that others may have to wait for."""
        # Asked at every step of a job that may have thousands of groups.
        if self._live is None:
            self._live = [g for g in self._clock if g not in self._away]
        return self._live

    def lead(self, group: int) -> int:
        """How far the group is ahead of the slowest live one (0 when it is the slowest)."""
        # Asked for each group that waits, at every step of a job that may have thousands of groups.
        if self._least is None:
            self._least = min((self._clock[g] for g in self.live()), default=self._clock[group])
        return max(0, self._clock[group] - self._least) if self.live() else 0

    def may_start(self, group: int) -> bool:
        """Whether the group may start its next step now."""
        return self._bound is None or self.lead(group) <= self._bound

    def may_decide(self, group: int) -> bool:
        """Whether a step of the group may be decided now, with respect to other groups."""
        if self._bound != 0:
            return True
        # Updates of one clock in group order, so that a bulk-synchronous job has the same bits in every run.
        return all(self._clock[g] > self._clock[group] for g in self.live() if g < group)

    def state_dict(self) -> State:
        return {"clock": self._clock, "away": self._away}

    def load_state_dict(self, state: State) -> None:
        self._clock, self._away = dict(state["clock"]), set(state["away"])
        self._live = self._least = None


RESTS, IS_BACK, RESTARTS, SNAPSHOT, AWAY, SHOWS, REPLACED, JOINS = 1, 2, 3, 4, 5, 6, 7, 8  # StepDecision.change

MOST_DECISIONS = 1 << 16  # that some shard has not reported as applied; each group has at most one step under way
_MOST_EXITS = 1 << 14  # of one worker, that others of its group have not made: a faulty worker must not fill the memory


@dataclass(slots=True)
class _Vote:
    shards: set[int]
    finite: bool = True
    infinity: bool = False  # the norm is the largest of the parts, and not the sum of their powers
    powers: dict[int, float] = field(default_factory=dict)  # by shard
    refused: dict[int, int] = field(default_factory=dict)  # worker -> parameter
    members: dict[int, frozenset[int]] = field(default_factory=dict)  # shard -> workers complete there
    measured: dict[int, bytes] = field(default_factory=dict)  # by shard

    def add_norm(self, shard: int, message: StepVote) -> None:
        """Note a shard's part of the gradient's norm."""
        self.finite = self.finite and message.finite
        self.infinity, self.powers[shard] = message.infinity, message.power

    @property
    def power(self) -> float:
        """The largest part of the norm, or the sum of the powers of all parts."""
        # In the order of the shards, and not of arrival: the last bit of a sum depends on it.
        parts = [self.powers[shard] for shard in sorted(self.powers)]
        return max(parts, default=0.0) if self.infinity else sum(parts, 0.0)

    def remove(self, worker: int) -> None:
        """Drop the contributions of a worker."""
        self.members = {shard: members - {worker} for shard, members in self.members.items()}
        self.refused.pop(worker, None)

    @property
    def common(self) -> frozenset[int]:
        """The workers with contributions that are complete on all shards of the vote."""
        return frozenset.intersection(*self.members.values()) if self.members else frozenset()


class DecisionLog:
    """Shard 0's record of the decisions of its server group, in order.

    Args:
        shards: number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._votes: dict[tuple[int, int], _Vote] = {}
        self._log: dict[int, StepDecision] = {}
        self._decided: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}
        self._replaced: dict[tuple[int, int], tuple[int, int]] = {}  # (group, worker) -> incarnation, decision
        self._applied = [0] * shards
        self._next = 0

    def staged(self, shard: int, message: StepVote) -> None:
        """A shard has everything for a step. A repeated vote changes nothing."""
        # Every vote reports the progress of its shard, also one that does not count.
        self._applied[shard] = max(self._applied[shard], message.applied)
        self._trim()
        if message.incarnation != self._incarnations.get(message.group, 0):
            return  # sent before the shard carried out the restart: its gradients are forgotten by now
        if message.step < self._decided.get(message.group, 0):
            return  # sent again over a new connection: the step is decided, and the shard asks for the decision
        vote = self._votes.setdefault((message.group, message.step), _Vote(set()))
        # With backup workers a shard votes again when more contributions have come.
        if shard in vote.shards and not message.members:
            return
        vote.shards.add(shard)
        if message.members:
            members = frozenset(worker for worker in message.members if self._holds(message, worker))
            # United, because a vote with fewer workers may arrive after one with more.
            vote.members[shard] = vote.members.get(shard, frozenset()).union(members)
        vote.add_norm(shard, message)
        if message.measured:
            vote.measured[shard] = message.measured
        for worker, parameter in refused_pairs(message.refused):
            if self._holds(message, worker):
                vote.refused[worker] = max(parameter, vote.refused.get(worker, -1))

    def _holds(self, message: StepVote, worker: int) -> bool:
        """Whether the shard sent this vote after it forgot the worker's former process."""
        _, decision = self._replaced.get((message.group, worker), (0, -1))
        return message.applied > decision

    @property
    def undecided(self) -> int:
        """Steps that a shard has staged, and that are not decided."""
        return len(self._votes)

    def ready(self, policy: StepPolicy = ALL_WORKERS) -> list[tuple[int, int]]:
        """The (group, step) pairs that all shards have staged, in group order.

        policy: which contributions make a step.
        """
        # Sorted, and not in the order of arrival, so that runs and simulations decide alike.
        staged = {key: vote for key, vote in self._votes.items() if len(vote.shards) == self._shards}
        return sorted(key for key, vote in staged.items() if not vote.members or policy.enough(vote.common))

    def decide(self, group: int, step: int, joined: bool = False) -> StepDecision:
        """Record the decision to apply a ready step. It is final.

        joined: as in `StepDecision`.
        """
        vote = self._votes.pop((group, step))
        members = tuple(sorted(vote.common))
        counts = {worker: at for worker, at in vote.refused.items() if not members or worker in members}
        refused = tuple(number for pair in sorted(counts.items()) for number in pair)
        found_inf, measured = not vote.finite, b"".join(vote.measured[shard] for shard in sorted(vote.measured))
        apply = StepDecision(
            self._next, group, step, found_inf, vote.power, 0, refused, members, joined=joined, measured=measured
        )
        # Kept until every shard has applied it: a shard that missed it asks for it by its number.
        self._log[self._next] = apply
        self._next += 1
        self._decided[group] = step + 1
        return apply

    def decree(self, group: int, step: int, change: int, members: tuple[int, ...] = ()) -> StepDecision:
        """Record a decision that is not a step (see `StepDecision.change`).

        Raises:
            ProtocolError: so much has been decreed that no step can have been decided in between.
        """
        if len(self._log) >= MOST_DECISIONS:
            raise ProtocolError(f"{len(self._log)} changes of group {group} and others without a step")
        apply = StepDecision(self._next, group, step, False, 0.0, change, members=members)
        self._log[self._next] = apply
        self._next += 1
        return apply

    def since(self, index: int) -> list[StepDecision]:
        """All decisions from a number on."""
        return [self._log[i] for i in range(max(index, 0), self._next) if i in self._log]

    def restart(self, group: int, incarnation: int) -> StepDecision | None:
        """Record that a group is started again. None: this is recorded already."""
        if not self.adopt(group, incarnation):
            return None
        # No shard may apply what is undecided now: the new processes compute these steps again.
        self._votes = {key: vote for key, vote in self._votes.items() if key[0] != group}
        # The new processes count their steps from 0.
        self._decided.pop(group, None)
        return self.decree(group, incarnation, RESTARTS)

    def replace(self, group: int, worker: int, incarnation: int) -> StepDecision | None:
        """Record that one worker has another process. None: this is recorded already."""
        if incarnation <= max(self._replaced.get((group, worker), (0, -1))[0], self._incarnations.get(group, 0)):
            return None
        # The number of the decision tells apart votes from before and after it, see `_holds`.
        self._replaced[group, worker] = incarnation, self._next
        for vote in (vote for key, vote in self._votes.items() if key[0] == group):
            vote.remove(worker)
        return self.decree(group, incarnation, REPLACED, (worker,))

    def abort(self, group: int) -> None:
        """Drop the group's undecided step: its number is that of no decision."""
        step = self._decided.get(group, 0)
        self._votes.pop((group, step), None)
        self._decided[group] = step + 1

    def adopt(self, group: int, incarnation: int) -> bool:
        """Accept only votes of this incarnation of a group. False: this is so already."""
        new = incarnation > self._incarnations.get(group, 0)
        if new:
            self._incarnations[group] = incarnation
        return new

    def _trim(self) -> None:
        """Forget decisions that every shard has applied."""
        least = min(self._applied)
        for index in [i for i in self._log if i < least]:
            del self._log[index]

    def state_dict(self) -> State:
        return {
            "votes": {key: field_values(vote) for key, vote in self._votes.items()},
            "log": self._log,
            "decided": self._decided,
            "incarnations": self._incarnations,
            "replaced": self._replaced,
            "applied": self._applied,
            "next": self._next,
        }

    def load_state_dict(self, state: State) -> None:
        self._votes = {
            key: _Vote(set(shards), finite, infinity, dict(powers), dict(refused), dict(members), dict(measured))
            for key, (shards, finite, infinity, powers, refused, members, measured) in state["votes"].items()
        }
        self._log, self._decided = dict(state["log"]), dict(state["decided"])
        self._incarnations, self._replaced = dict(state["incarnations"]), dict(state["replaced"])
        self._applied, self._next = list(state["applied"]), state["next"]


class ApplyOrder(DeclaredState):
    """One shard's position in the list of decisions. Early decisions are held."""

    STATE = ("next", "_early")

    def __init__(self) -> None:
        self.next = 0
        self._early: dict[int, StepDecision] = {}

    def arrive(self, apply: StepDecision) -> list[StepDecision]:
        """A decision came; returns those that may be applied now, in order."""
        if apply.index < self.next:
            return []  # sent twice: it is applied already
        self._early[apply.index] = apply
        now = []
        # Decisions may overtake each other where connections were made anew.
        while self.next in self._early:
            now.append(self._early.pop(self.next))
            self.next += 1
        return now


class LoopExits(DeclaredState):
    """A check that the workers of a synchronous group leave loops at the same step.

    A worker that leaves alone would go on with another epoch while the others wait for it. A place is (step, backward).
    """

    STATE = ("_made", "_works")

    def __init__(self, workers: int) -> None:
        """`workers`: how many the group has."""
        self._workers = workers
        self._made: dict[int, dict[int, tuple[int, float]]] = {}
        self._works: dict[int, tuple[int, tuple[int, float]]] = {}

    def left(self, worker: int, exits: int, place: tuple[int, float]) -> None:
        """Note an exit, and its number. Raises StepError if another worker went on there."""
        made = self._made.setdefault(worker, {})
        if len(made) >= _MOST_EXITS:
            raise StepError(f"worker {worker} left {len(made)} loops that others of its group have not left")
        made[exits] = place
        for other in self._works:
            self._compare(worker, other)

    def works(self, worker: int, exits: int, place: tuple[int, float]) -> None:
        """A worker works here. Raises StepError if another had left before."""
        before = self._works.get(worker, (exits, place))
        # Messages of a worker may arrive twice, and then in another order.
        self._works[worker] = max(before, (exits, place))
        if exits > before[0] and len(self._works) == self._workers:
            self._forget(min(made for made, _ in self._works.values()))
        for other in self._made:
            self._compare(other, worker)

    def _forget(self, exits: int) -> None:
        """Forget exits that all workers have made."""
        # Only the next exit of a worker is ever compared, and scripts may leave a loop in every epoch.
        for worker, made in self._made.items():
            self._made[worker] = {number: place for number, place in made.items() if number > exits}

    def _compare(self, leaver: int, other: int) -> None:
        exits, place = self._works[other]
        # The other worker is at, or past, the place of an exit that it has not made, so it was left alone.
        exit_place = self._made[leaver].get(exits + 1)
        if exit_place is not None and place >= exit_place:
            raise StepError(
                f"worker {leaver} of the group left the loop over its data early, after {exit_place[0]} steps, while "
                f"worker {other} goes on; all workers of a synchronous group must leave together, or none"
            )


STATIC = 0x8000_0000  # marks a data stream that is no lease
EVERYTHING = 1 << 62  # of a stream that is forgotten


class AppliedBatches(DeclaredState):
    """Exactly-once identity of pushes: one counter per data stream.

    A step carries the batches it consumed as (stream, first, last). It counts if each range continues its stream. A
    lease is a stream of one worker group, any other stream is that of the reader with its number.

    Args:
        first: all epochs before this one are read already.
    """

    STATE = ("_last", "_first", "_reads", "_forgotten", "_closed")

    def __init__(self, first: int = 0) -> None:
        self._last: dict[int, dict[int, int]] = {}
        self._first = first
        self._reads: dict[int, int] = {}  # reader -> the last epoch of which something of it is applied
        self._forgotten: dict[int, int] = {}  # reader -> of epochs before this one nothing is kept
        self._closed = EVERYTHING

    def keep_until_closed(self) -> None:
        """Keep the counts of all epochs (`counts`) until `close`, and not only the last."""
        self._closed = 0

    def verdict(self, marks: tuple[int, ...], group: int = 0) -> str:
        """ "new" to apply, "known" if all of it has been applied before.

        Raises ValueError for a gap, or for marks of which only a part is known.
        """
        states = set()
        for stream, first, last in _triples(marks):
            done = self.count(stream, group) - 1
            if first == done + 1 and last >= first:
                states.add("new")
            elif last <= done:
                states.add("known")
            else:
                raise ValueError(
                    f"batches {first} to {last} of stream {stream:#x} do not continue it: {done} was the last"
                )
        # A sum of gradients cannot be taken apart, so it can neither be applied nor left out.
        if len(states) > 1:
            raise ValueError("a push of which a part was applied before")
        return states.pop() if states else "new"

    def record(self, marks: tuple[int, ...], group: int = 0) -> None:
        """These batches are applied."""
        for stream, _, last in _triples(marks):
            reader = _reader(stream, group)
            self._last.setdefault(reader, {})[stream] = last
            self._reads[reader] = max(stream >> 32, self._reads.get(reader, 0))
        for reader in {_reader(stream, group) for stream in marks[::3]}:
            self._forget(reader)

    def close(self, epoch: int) -> None:
        """Counts of epochs before this one are not wanted any more."""
        if epoch > self._closed:
            self._closed = epoch
            for reader in self._reads:
                self._forget(reader)

    def _forget(self, reader: int) -> None:
        # Two epochs stay: a new process of the reader begins in the epoch of the former one, or in the one before. A
        # snapshot that is under way may need earlier ones, until `close`.
        before = min(self._reads[reader] - 1, self._closed)
        if before > self._forgotten.get(reader, 0):
            self._forgotten[reader] = before
            self._last[reader] = {s: last for s, last in self._last[reader].items() if s >> 32 >= before}

    def count(self, stream: int, group: int = 0) -> int:
        """The number of applied batches of a stream. EVERYTHING: the stream is forgotten."""
        reader = _reader(stream, group)
        if stream >> 32 < self._forgotten.get(reader, 0):
            return EVERYTHING
        last = self._last.get(reader, {}).get(stream)
        if last is None and not stream & STATIC:
            # No lease is given to two groups. Were it read by another one all the same, it would not count twice.
            last = next((known[stream] for known in self._last.values() if stream in known), None)
        return 0 if last is None else last + 1

    def counts(self) -> dict[int, int]:
        """The same of every stream that has any, and is not forgotten."""
        return {stream: last + 1 for known in self._last.values() for stream, last in known.items()}

    def reads(self, reader: int) -> int:
        """The last epoch of which a reader's batches are applied."""
        return max(self._first, self._reads.get(reader, 0))


def _reader(stream: int, group: int) -> int:
    # The epoch is in the upper 32 bits of a stream, so that the reader is the same in all epochs.
    return stream & ~STATIC & 0xFFFF_FFFF if stream & STATIC else group


def _triples(marks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [(marks[i], marks[i + 1], marks[i + 2]) for i in range(0, len(marks), 3)]
