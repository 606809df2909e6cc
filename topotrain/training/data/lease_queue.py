"""Queue of batch leases: worker groups lease runs of consecutive batches.

There is one queue per epoch.

* A batch is leased once, unless the group that holds it gives it back.
* A lease belongs to a group. The first worker of the group that asks gets a new lease, and all others get the same one.
* A worker may wait at an empty queue, because another group can leave the epoch early and give batches back.
* An epoch is over when every batch is leased and every worker has passed every lease of its group.
* A worker may make several steps before a commit, so batches may count only behind the end of their epoch. Until then
  the epoch is kept. If their group restarts, it is given them again, and all other groups find the epoch over.

The lengths of leases follow guided self-scheduling (Polychronopoulos and Kuck, 1987): long runs first, and single
batches at the end. So a slow group takes fewer batches, and no group waits long for it.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fail, Message, ProtocolError
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.server_extension import RegroupExtension
from topotrain.training.data.data_messages import (
    DrawnBatches,
    DrawRequest,
    Lease,
    LeaseRelease,
    LeaseRequest,
    PassBegun,
)
from topotrain.training.data.drawn_chunks import DrawnChunks, Replies

# Batches in a lease: a group that dies or leaves gives back at most this many.
LONGEST = 32
# Open epochs: one that groups leave early stays open. These limits bound the memory that peers can take.
_MOST_EPOCHS = 1 << 16
_MOST_TOLD = 1 << 12
# In the place of a lease: there is none, since the group leaves the job.
LEAVES = -2
# Batches in a lease of a stream with an unknown end, where no rest can be divided.
UNKNOWN_TOTAL = 4


@dataclass(frozen=True, slots=True)
class _Run:
    """A lease of batches [first, last); `lease` numbers those of all groups."""

    lease: int
    first: int
    last: int
    rested: bool = False  # the group had to wait for it
    done_by_others: int = 0  # batches of the epoch, when the lease was given


def _stream(epoch: int, run: _Run) -> int:
    """The data stream of a lease."""
    return (epoch << 32) | run.lease


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A group that has left an epoch after `position` batches.

    witness: its first worker that left. table: its leases at that time.
    """

    position: int
    witness: Address
    table: tuple[_Run, ...]


@dataclass(slots=True)
class _Epoch:
    """One open epoch."""

    total: int = -1
    digest: int = 0
    witness: Address | None = None  # the worker that named the digest first
    frontier: int = 0  # no batch from here on was leased yet
    leases: int = 0
    freed: list[tuple[int, int]] = field(default_factory=list)  # sorted
    tables: dict[int, list[_Run]] = field(default_factory=dict)  # by group; a lease's position is its `ordinal`
    passed: dict[Address, int] = field(default_factory=dict)  # leases that a worker has finished
    done: int = 0  # batches of finished leases, and those that groups had read when they left or died
    finished: dict[int, tuple[int, int]] = field(default_factory=dict)  # by group: leases, and batches, in `done`
    left: dict[int, "_Leaving"] = field(default_factory=dict)
    gone: set[Address] = field(default_factory=set)  # workers that have left the epoch
    held: list[tuple[Address, LeaseRequest]] = field(default_factory=list)  # requests without a reply
    most: dict[int, int] = field(default_factory=dict)  # batches that a group may have
    taken: dict[int, int] = field(default_factory=dict)  # batches that it has, those of its earlier processes counted
    past: set[int] = field(default_factory=set)  # groups for which it is over, also if others read a part again

    def table(self, group: int) -> list[_Run]:
        return self.tables.setdefault(group, [])

    def remaining(self) -> int:
        """Return the number of batches in the queue, or -1 if the end is not known."""
        if self.total < 0:
            return -1
        return max(0, self.total - self.frontier) + sum(last - first for first, last in self.freed)

    def room(self, group: int) -> int:
        """Return how many more batches a group may have."""
        return self.most.get(group, LONGEST + self.taken.get(group, 0)) - self.taken.get(group, 0)

    def bound(self, group: int, most: int) -> None:
        """Give a group no more than so many batches. -1: any number."""
        if most >= 0:
            self.most[group] = most

    def take(self, group: int, length: int) -> _Run | None:
        """Lease at most `length` consecutive batches to a group. Returned ones come first."""
        length = min(length, self.room(group))
        if length <= 0:
            return None
        run = self._take(length)
        if run is not None:
            self.taken[group] = self.taken.get(group, 0) + run.last - run.first
        return run

    def _take(self, length: int) -> _Run | None:
        if self.freed:
            first, last = self.freed.pop(0)
            if last - first > length:
                insort(self.freed, (first + length, last))
        elif self.total < 0 or self.frontier < self.total:
            first = self.frontier
            last = self.frontier + length if self.total < 0 else min(self.total, self.frontier + length)
            self.frontier = last
        else:
            return None
        self.leases += 1
        return _Run(self.leases - 1, first, min(last, first + length))

    def take_held(self) -> list[tuple[Address, LeaseRequest]]:
        """Take the requests without a reply; those that get none now are appended again."""
        held, self.held = self.held, []
        return held

    def name_digest(self, digest: int, witness: Address) -> None:
        """Record the hash of the epoch's list, and the worker that named it first."""
        self.digest, self.witness = digest, witness

    def finish(self, group: int, leases: int) -> None:
        """Count the batches of the leases that a group has finished."""
        before, batches = self.finished.get(group, (0, 0))
        if leases > before:
            more = sum(run.last - run.first for run in self.table(group)[before:leases])
            self.finished[group] = leases, batches + more
            self.done += more

    def leave(self, group: int, batches: int) -> None:
        """Count the batches that a group has read, which leaves."""
        self.done += batches - self.finished.get(group, (0, 0))[1]
        self.finished[group] = len(self.table(group)), batches

    def done_by_others(self, group: int) -> int:
        """Return the number of batches in `done` that are in no lease of this group."""
        return self.done - self.finished.get(group, (0, 0))[1]

    def give_back(self, runs: list[tuple[int, int]]) -> None:
        """Return runs to the queue. Adjacent runs are joined."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.freed, *runs]):
            # The end of a stream may be known only now, and leases of it may go beyond.
            last = last if self.total < 0 else min(last, self.total)
            if first >= last:
                continue
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self.freed = merged

    def restart(self, group: int, number: int, applied: Mapping[int, int]) -> None:
        """Free the unfinished part of the leases of a group that is gone.

        number: that of the epoch. applied: as for `group_restarted`.
        """
        runs = [
            (run, min(applied.get(_stream(number, run), 0), run.last - run.first)) for run in self.tables.pop(group, [])
        ]
        rest = [(run.first + count, run.last) for run, count in runs if run.first + count < run.last]
        self.give_back(rest)
        self.taken[group] = self.taken.get(group, 0) - sum(last - first for first, last in rest)
        # A group without such a rest has nothing to read here: to it the batches of others are no new ones.
        if rest:
            self.past.discard(group)
        self.done += sum(count for _, count in runs) - self.finished.pop(group, (0, 0))[1]
        self.left.pop(group, None)
        self.passed = {worker: passed for worker, passed in self.passed.items() if worker.group != group}
        self.gone = {worker for worker in self.gone if worker.group != group}
        self.held = [(worker, ask) for worker, ask in self.held if worker.group != group]

    def close(self, groups: int) -> list[tuple[Address, LeaseRequest]]:
        """Note that the epoch is over for so many groups; return requests that waited."""
        self.past = set(range(groups))
        return self.take_held()

    def forget(self, worker: Address) -> None:
        """Forget one worker of a group that goes on."""
        self.passed.pop(worker, None)
        self.held = [(sender, ask) for sender, ask in self.held if sender != worker]

    def learn(self, total: int) -> None:
        """Record the number of batches, of streams the longest."""
        if total > self.total:
            self.total = total
            # Cuts the freed runs at the new end.
            self.give_back([])

    def state_dict(self) -> State:
        state = dict(zip(_Epoch.__slots__, field_values(self), strict=True))
        state["tables"] = {group: list(map(field_values, table)) for group, table in self.tables.items()}
        state["left"] = {
            group: (left.position, left.witness, list(map(field_values, left.table)))
            for group, left in self.left.items()
        }
        return state

    @classmethod
    def from_state(cls, state: State) -> "_Epoch":
        """Return the epoch of a `state_dict`."""
        own: State = {"freed": list(state["freed"]), "held": list(state["held"]), "gone": set(state["gone"])}
        own |= {name: dict(state[name]) for name in ("finished", "most", "taken")} | {"past": set(state["past"])}
        tables = {group: [_Run(*run) for run in table] for group, table in state["tables"].items()}
        left = {
            group: _Leaving(position, witness, tuple(_Run(*run) for run in table))
            for group, (position, witness, table) in state["left"].items()
        }
        return cls(**{**state, **own, "passed": dict(state["passed"]), "tables": tables, "left": left})


class LeaseQueue(RegroupExtension):
    """The queues of all open epochs, on server (0,0).

    Args:
        groups: worker groups of the job.
        workers: workers in each group.
        singly: a worker may restart by itself, and request drawn batches again.
    """

    messages = before_model = (LeaseRequest, LeaseRelease, DrawnBatches, DrawRequest, PassBegun)

    def __init__(self, groups: int, workers: int = 1, singly: bool = False) -> None:
        self._groups = groups
        self._workers = workers
        self._singly = singly
        self._finished: set[int] = set()
        self._parting: set[int] = set()
        self._floor = 0  # all epochs before it are over
        self._newest: dict[Address, int] = {}  # the first epoch of which each worker has batches that may not count
        self._absent: set[Address] = set()  # their groups go on without them
        self._epochs: dict[int, _Epoch] = {}
        self._draws = DrawnChunks(groups * workers - 1, singly)
        # What the first worker told of each pass that it has begun: by epoch and field, with `dice` and the worker.
        self._told: dict[tuple[int, str], tuple[int, int, Address]] = {}

    def handle(self, sender: Address, message: Message) -> Replies:
        """Handle a message, and return the replies, also to earlier requests that waited.

        Raises ProtocolError for a message that no correct worker sends.
        """
        match message:
            case LeaseRequest():
                return self._ask(sender, message)
            case LeaseRelease():
                return self._free(sender, message)
            case DrawnBatches():
                return self._draws.put(message)
            case DrawRequest():
                return self._draws.ask(sender, message)
            case PassBegun():
                refusal = self._compare(sender, message)
                begun = self._draws.begin(message.epoch) if sender == (Role.WORKER, 0, 0) else []
                return begun + ([(sender, Fail(refusal, config=True))] if refusal else [])
        raise ProtocolError(f"{type(message).__name__} is not a message about batches")

    def draw_awaited(self) -> Mapping[Address, Message]:
        return self._draws.awaited()

    def _compare(self, sender: Address, begun: PassBegun) -> str:
        """Return why a worker reads something else than an earlier one, or ""."""
        while len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]
        for name, unknown in (("loader", -1), ("samples", -1), ("indices", 0), ("content", 0)):
            value = getattr(begun, name)
            if value == unknown:
                continue
            first, dice, witness = self._told.setdefault((begun.epoch, name), (value, begun.dice, sender))
            # Other random numbers may give other indices. -1: they would not.
            if value == first or (name == "indices" and begun.dice != dice and -1 not in (begun.dice, dice)):
                continue
            if name == "loader":
                return _other_loader(begun, sender, first, witness)
            what = f"{value} samples on {sender}, {first} on {witness}"
            return _other_data(what if name == "samples" else f"other {name} on {sender} than on {witness}")
        return ""

    def on_finish(self, worker: Address, steps: int) -> None:
        """Draws come from worker (0,0). Raises StepError if another worker waits for one."""
        if worker == (Role.WORKER, 0, 0):
            self._draws.end(steps)

    def group_over(self, group: int) -> Replies:
        """Stop waiting for a group with scripts that have ended. May be called twice."""
        self._finished.add(group)
        return self._reply_to_all()

    def group_leaves(self, group: int) -> Replies:
        """Lease nothing more to a group that leaves; its waiting workers get `LEAVES`."""
        self._parting.add(group)
        return self._reply_to_all()

    def group_returns(self, group: int) -> None:
        """Lease to a group again that had left the job."""
        self._finished.discard(group)

    def refuses_leave(self) -> str:
        """Return why no group can leave, or ""."""
        # Without leases other groups could not read its batches.
        if self._epochs or self._floor:
            return ""
        return "no batch is leased yet: a group that leaves now may leave batches that no other group reads"

    def streams(self, group: int) -> list[int]:
        """Return the data streams of a group in open epochs, one for each of its leases."""
        return [_stream(number, run) for number, epoch in self._epochs.items() for run in epoch.tables.get(group, ())]

    def group_restarted(self, group: int, applied: Mapping[int, int], ended: bool) -> Replies:
        """Free the leases of a group with new workers, except for its applied batches.

        applied: the number of batches of each stream that count. ended: all scripts of the group had ended.
        """
        self._parting.discard(group)
        self._absent = {worker for worker in self._absent if worker.group != group}
        # The new workers may begin in an earlier epoch.
        self._newest = {worker: epoch for worker, epoch in self._newest.items() if worker.group != group}
        if not ended:
            self._finished.discard(group)
        # Other workers read what group 0 drew only if it is the only group. All of them will request it again.
        if group == 0:
            self._draws = DrawnChunks(self._groups * self._workers - 1, self._singly)
        for number, epoch in self._epochs.items():
            epoch.restart(group, number, applied)
        return self._reply_to_all()

    def reset_worker(self, worker: Address) -> None:
        """Wait for a worker no more, until its new process asks for a lease."""
        # With backup workers the others wait for it at the end of the epoch.
        if self._singly:
            return
        self._absent.add(worker)
        self._newest.pop(worker, None)
        if worker != (Role.WORKER, 0, 0):  # which draws
            self._draws.forget(worker)
        for epoch in self._epochs.values():
            epoch.forget(worker)

    @property
    def open_epochs(self) -> tuple[int, ...]:
        """The epochs that are not over: several, if a group has left one early."""
        return tuple(number for number, epoch in self._epochs.items() if not self._is_over(epoch))

    @property
    def kept_chunks(self) -> int:
        """Number of chunks of drawn batches that are still to be fetched or put."""
        return len(self._draws)

    def _ask(self, sender: Address, ask: LeaseRequest) -> Replies:
        if ask.epoch < 0 or ask.total < -1 or not 0 <= ask.passed <= ask.ordinal:
            raise ProtocolError(f"{sender}: {ask} does not name an existing lease")
        if self._is_closed(ask.epoch, sender.group):
            return [(sender, _over(ask))]
        if ask.epoch not in self._epochs and len(self._epochs) >= _MOST_EPOCHS:
            raise ProtocolError(f"{sender} begins epoch {ask.epoch}, while {len(self._epochs)} others are not over")
        epoch = self._epochs.setdefault(ask.epoch, _Epoch())
        if ask.ordinal > len(epoch.table(sender.group)) and sender.group not in epoch.left:
            raise ProtocolError(f"{sender}: lease {ask.ordinal} before lease {len(epoch.table(sender.group))}")
        # Workers that would read different batches get a Fail.
        refusal = _contradiction(epoch, sender, ask)
        if refusal:
            return [(sender, Fail(refusal))]
        self._absent.discard(sender)
        epoch.learn(ask.total)
        epoch.bound(sender.group, ask.most)
        epoch.passed[sender] = max(ask.passed, epoch.passed.get(sender, 0))
        epoch.finish(sender.group, ask.passed)
        # After a reconnection a worker sends its request again, and needs one reply.
        if (sender, ask) not in epoch.held:
            epoch.held.append((sender, ask))
        # Only a newer epoch can close earlier ones.
        if ask.first_uncounted > self._newest.get(sender, -1):
            self._newest[sender] = ask.first_uncounted
            return self._reply_ready(ask.epoch) + self._close()
        return self._reply_ready(ask.epoch)

    def _is_closed(self, epoch: int, group: int) -> bool:
        return epoch < self._floor or (epoch in self._epochs and group in self._epochs[epoch].past)

    def _close(self) -> Replies:
        """End the epochs that every worker has left behind, also with unread batches."""
        reading = [Address(Role.WORKER, g, i) for g in range(self._groups) for i in range(self._workers)]
        there = [worker for worker in reading if worker.group not in self._finished and worker not in self._absent]
        newest = [self._newest.get(worker, 0) for worker in there]
        # The epoch before a worker's newest stays: a fresh process in its place may begin there.
        self._floor = max(self._floor, min(newest, default=0) - 1)
        replies: Replies = []
        for number in [number for number in self._epochs if number < self._floor]:
            replies += [(sender, _over(ask)) for sender, ask in self._epochs.pop(number).held]
        return replies

    def _free(self, sender: Address, free: LeaseRelease) -> Replies:
        if free.epoch not in self._epochs or self._is_closed(free.epoch, sender.group):
            return []
        epoch = self._epochs[free.epoch]
        left = epoch.left.get(sender.group)
        position = _position(left.table if left else epoch.table(sender.group), free)
        if position < 0:
            raise ProtocolError(f"{sender}: {free} lies in no lease of group {sender.group}")
        epoch.gone.add(sender)
        # All workers of a group must have trained on the same batches, or their shares do not make up the batches.
        torn = _disagreement(epoch, sender, position)
        if torn:
            return [(sender, Fail(f"epoch {free.epoch}: {torn}; workers of one group must leave it at the same batch"))]
        # The first worker that leaves gives the group's batches back, the others confirm the same batch.
        if sender.group not in epoch.left:
            self._leave(epoch, sender, free, position)
        return self._reply_ready(free.epoch)

    def _leave(self, epoch: _Epoch, sender: Address, free: LeaseRelease, position: int) -> None:
        table = epoch.table(sender.group)
        epoch.left[sender.group] = _Leaving(position, sender, tuple(table))
        rest = table[free.ordinal :]
        del table[free.ordinal :]
        # The part that was read stays with the group, whose other workers still ask for it.
        if rest and rest[0].first < free.first:
            table.append(replace(rest[0], last=free.first))
        given_back = [(run.first, run.last) for run in rest[1:]]
        epoch.give_back(given_back + [(free.first, run.last) for run in rest[:1]])
        epoch.leave(sender.group, position)

    def _reply_to_all(self) -> Replies:
        return [reply for number in tuple(self._epochs) for reply in self._reply_ready(number)]

    def _reply_ready(self, number: int) -> Replies:
        """Reply to every waiting request that has a reply now, the oldest first."""
        epoch, replies = self._epochs[number], []
        held = epoch.take_held()
        for sender, ask in held:
            answer = self._reply_to(epoch, sender, ask)
            if answer is None:
                epoch.held.append((sender, ask))
            else:
                replies.append((sender, answer))
        if self._is_over(epoch):
            replies += [(sender, _over(ask)) for sender, ask in epoch.close(self._groups)]
        return replies

    def _reply_to(self, epoch: _Epoch, sender: Address, ask: LeaseRequest) -> Message | None:
        table = epoch.table(sender.group)
        # First of all: a lease that the group has is repeated to each of its workers, whatever happens meanwhile.
        if ask.ordinal < len(table):
            return _lease(ask, table[ask.ordinal])
        if sender.group in epoch.left or sender.group in self._finished or self._is_over(epoch):
            return _over(ask)
        # Without `wait` the worker still has batches to read, and asks again.
        if sender.group in self._parting and ask.wait:
            return Lease(ask.epoch, ask.ordinal, LEAVES, 0, -1)
        # Then other groups have to read what those leave.
        if self._finished or self._parting:
            epoch.most.clear()
        run = None if sender.group in self._parting else epoch.take(sender.group, self._length(epoch))
        if run is None and epoch.room(sender.group) <= 0:
            return _over(ask)
        if run is None:
            return None if ask.wait else Lease(ask.epoch, ask.ordinal, -1, epoch.frontier, epoch.frontier)
        table.append(replace(run, rested=ask.wait, done_by_others=epoch.done_by_others(sender.group)))
        return _lease(ask, table[-1])

    def _length(self, epoch: _Epoch) -> int:
        remaining = epoch.remaining()
        if remaining < 0:
            return UNKNOWN_TOTAL
        # Half of an equal part: the other half evens out groups that turn out to be slow.
        return min(LONGEST, max(1, remaining // (2 * max(1, self._groups - len(self._finished)))))

    def _is_over(self, epoch: _Epoch) -> bool:
        return epoch.remaining() == 0 and all(self._is_done(epoch, group) for group in epoch.tables)

    def _is_done(self, epoch: _Epoch, group: int) -> bool:
        """Whether no worker of the group will read or return a batch of its leases."""
        leases = len(epoch.table(group))
        if leases == 0 or group in self._finished:
            return True
        # Every worker counts, not only the fastest: a slow one still has to get the leases of its group.
        return all(
            worker in epoch.gone or worker in self._absent or epoch.passed.get(worker, 0) >= leases
            for worker in (Address(Role.WORKER, group, i) for i in range(self._workers))
        )

    def state_dict(self) -> State:
        return {
            "finished": self._finished,
            "parting": self._parting,
            "floor": self._floor,
            "newest": self._newest,
            "absent": self._absent,
            "epochs": {number: epoch.state_dict() for number, epoch in self._epochs.items()},
            "draws": self._draws.state_dict(),
            "told": self._told,
        }

    def load_state_dict(self, state: State) -> None:
        self._floor = state["floor"]
        self._finished, self._parting = set(state["finished"]), set(state["parting"])
        self._newest, self._absent = dict(state["newest"]), set(state["absent"])
        self._epochs = {number: _Epoch.from_state(epoch) for number, epoch in state["epochs"].items()}
        self._draws.load_state_dict(state["draws"])
        self._told = dict(state["told"])


def _lease(ask: LeaseRequest, run: _Run) -> Lease:
    return Lease(ask.epoch, ask.ordinal, run.lease, run.first, run.last, run.rested, run.done_by_others)


def _over(ask: LeaseRequest) -> Lease:
    return Lease(ask.epoch, ask.ordinal, -1, 0, -1)


def _contradiction(epoch: _Epoch, sender: Address, ask: LeaseRequest) -> str:
    # 0: indices that are no integers, or a stream. They cannot be compared.
    if not ask.digest:
        return ""
    if not epoch.digest:
        epoch.name_digest(ask.digest, sender)
        return ""
    if ask.digest == epoch.digest:
        return ""
    return (
        f"{sender} and {epoch.witness} would read different batches in epoch {ask.epoch}: the sampler must depend on "
        "nothing but the job's seed and the epoch (its generator, torch's, numpy's and Python's are seeded for it)"
    )


def _other_loader(begun: PassBegun, sender: Address, first: int, witness: Address) -> str:
    return (
        f"pass {begun.epoch} over the loaders of tt.prepare is one over loader {begun.loader} on {sender}, and over "
        f"loader {first} on {witness}: all workers must read them in the same order. A loader that one worker reads "
        f"alone, to evaluate, stays out of tt.prepare"
    )


def _other_data(what: str) -> str:
    return (
        f"the loader of tt.prepare has other data on each worker ({what}). Each batch is divided among the workers: of "
        f"data that is divided already a part would never be read. Give all workers all of the data, in the same order "
        f"(and seed what is drawn), or say that each reads its own: tt.as_is(loader)"
    )


def _position(table: Sequence[_Run], free: LeaseRelease) -> int:
    """Return the batches that a group read before it left; -1: not in its leases."""
    before = sum(run.last - run.first for run in table[: free.ordinal])
    if 0 <= free.ordinal < len(table):
        run = table[free.ordinal]
        return before + free.first - run.first if run.first <= free.first <= run.last else -1
    # A group may leave after its last lease, before it asks for another one.
    return before if free.ordinal == len(table) else -1


def _disagreement(epoch: _Epoch, sender: Address, position: int) -> str:
    """Return an error if another worker of the group left elsewhere or read on, or ""."""
    left = epoch.left.get(sender.group)
    if left:
        same = position == left.position
        return "" if same else f"{left.witness} left after {left.position} batches, {sender} after {position}"
    table = epoch.table(sender.group)
    for worker, passed in epoch.passed.items():
        read = sum(run.last - run.first for run in table[:passed])
        if worker.group == sender.group and read > position:
            return f"{sender} left after {position} batches, {worker} has read {read}"
    return ""
