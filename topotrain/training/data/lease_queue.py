"""The queue of an epoch's batches, from which worker groups lease ranges.

* A batch is handed out once, unless the group that holds it gives it back.
* A lease belongs to a group. The first request of a worker decides it, and the group's other workers get the same.
* A worker that finds the queue empty may wait, because a group can leave the epoch early, and its batches must be read.
* An epoch is over when every batch has been handed out and every worker has passed every lease of its group.

Lengths follow guided self-scheduling (Polychronopoulos and Kuck, 1987): long ranges first, single batches at the end.
So a slow group takes fewer batches, and the wait for it at the end is short.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fail, Message, ProtocolError
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.server_extension import RegroupExtension
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest, Lease, LeaseRelease, LeaseRequest

LONGEST = 32  # batches in a lease: a group that dies or leaves gives back at most this many
_MOST_EPOCHS = 1 << 16  # open at a time: one that groups leave early stays so
_MOST_CHUNKS, _MOST_DRAWN = 1 << 16, 1 << 23  # draws that somebody has yet to fetch, and numbers in them
LEAVES = -2  # in the place of a lease: there is none, since the group leaves the job
UNKNOWN_TOTAL = 4  # batches in a lease of a stream whose end nobody has seen yet

Replies = list[tuple[Address, Message]]


@dataclass(frozen=True, slots=True)
class _Run:
    """Batches [first, last) of the epoch, as one lease.

    `lease` numbers the leases of an epoch over all groups.
    """

    lease: int
    first: int
    last: int
    rested: bool = False  # the group had to wait for it


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A group left an epoch after `position` batches.

    witness: the worker that said so first. table: the leases that the group had then.
    """

    position: int
    witness: Address
    table: tuple[_Run, ...]


@dataclass(slots=True)
class _Epoch:
    """One open epoch.

    `freed` is sorted. Batches from `frontier` on were never handed out.
    """

    total: int = -1
    digest: int = 0
    witness: Address | None = None  # who named the digest first
    frontier: int = 0
    leases: int = 0
    freed: list[tuple[int, int]] = field(default_factory=list)
    tables: dict[int, list[_Run]] = field(default_factory=dict)
    passed: dict[Address, int] = field(default_factory=dict)
    left: dict[int, "_Leaving"] = field(default_factory=dict)
    gone: set[Address] = field(default_factory=set)
    held: list[tuple[Address, LeaseRequest]] = field(default_factory=list)

    def table(self, group: int) -> list[_Run]:
        return self.tables.setdefault(group, [])

    def remaining(self) -> int:
        """Batches in the queue; -1: the end is not known."""
        if self.total < 0:
            return -1
        return max(0, self.total - self.frontier) + sum(last - first for first, last in self.freed)

    def take(self, length: int) -> _Run | None:
        """At most `length` consecutive batches, those that were given back first."""
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
        """The requests that have no reply yet; those that get none now are appended again."""
        held, self.held = self.held, []
        return held

    def name_digest(self, digest: int, witness: Address) -> None:
        """A worker is the first to name the hash of the epoch's list."""
        self.digest, self.witness = digest, witness

    def give_back(self, runs: list[tuple[int, int]]) -> None:
        """Put runs back into the queue; neighbors become one run again."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.freed, *runs]):
            last = last if self.total < 0 else min(last, self.total)
            if first >= last:
                continue
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self.freed = merged

    def restart(self, group: int, applied: Callable[[int], int]) -> None:
        """The group is gone, and the unread part of its leases is free.

        applied: batches that count, by lease.
        """
        rest = [(run.first + applied(run.lease), run.last) for run in self.tables.pop(group, [])]
        self.give_back(rest)
        self.left.pop(group, None)
        self.passed = {worker: passed for worker, passed in self.passed.items() if worker.group != group}
        self.gone = {worker for worker in self.gone if worker.group != group}
        self.held = [(worker, ask) for worker, ask in self.held if worker.group != group]

    def learn(self, total: int) -> None:
        """The number of batches is known now.

        A stream that differs from group to group counts as its longest.
        """
        if total > self.total:
            self.total = total
            self.give_back([])

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
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
        epoch = cls(**state)
        epoch.freed, epoch.held, epoch.gone = list(epoch.freed), list(epoch.held), set(epoch.gone)
        epoch.passed = dict(epoch.passed)
        epoch.tables = {group: [_Run(*run) for run in table] for group, table in state["tables"].items()}
        epoch.left = {
            group: _Leaving(position, witness, tuple(_Run(*run) for run in table))
            for group, (position, witness, table) in state["left"].items()
        }
        return epoch


class LeaseQueue(RegroupExtension):
    """The queue of every open epoch; lives in server (0,0).

    Args:
        groups: worker groups of the job.
        workers: workers in each group.
        warming: only group 0 leases for now, the others' questions are held until `warmed()`.
        singly: a worker may start again by itself, and ask anew for what was drawn.
    """

    messages = before_model = (LeaseRequest, LeaseRelease, DrawnBatches, DrawRequest)

    def __init__(self, groups: int, workers: int = 1, warming: bool = False, singly: bool = False) -> None:
        self._groups = groups
        self._workers = workers
        self._warming = warming
        self._finished: set[int] = set()
        self._parting: set[int] = set()
        self._floor = 0  # all epochs before it are over
        self._over: set[int] = set()  # of the others
        self._newest: dict[Address, int] = {}  # the last epoch that each worker asked for
        self._epochs: dict[int, _Epoch] = {}
        self._draws = DrawnChunks(groups * workers - 1, singly)

    def handle(self, sender: Address, message: Message) -> Replies:
        """Handle one message. Returns replies, also to earlier messages that were held.

        A contradiction between workers is replied to with Fail.

        Raises:
            ProtocolError: a message that no correct worker sends.
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
        raise ProtocolError(f"{type(message).__name__} is no question about batches")

    def group_over(self, group: int) -> Replies:
        """All scripts of the group have ended. It may be called twice."""
        self._finished.add(group)
        if group == 0:
            self._warming = False
        return self._settle_all()

    def group_leaves(self, group: int) -> Replies:
        """The group is to leave the job: it gets no more leases, and no longer waits."""
        self._parting.add(group)
        return self._settle_all()

    def group_returns(self, group: int) -> None:
        """The workers of a group that had left come back, and read on."""
        self._finished.discard(group)

    def refuses_leave(self) -> str:
        """Why a group cannot leave: others can get its batches only from leases."""
        if self._newest:
            return ""
        return "no batch is handed out by lease yet: no other group may read the batches of a group that leaves now"

    def streams(self, group: int) -> list[int]:
        """The data streams that a group has begun in open epochs, one for each lease."""
        return [
            (number << 32) | run.lease for number, epoch in self._epochs.items() for run in epoch.tables.get(group, ())
        ]

    def group_restarted(self, group: int, applied: Callable[[int], int], ended: bool) -> Replies:
        """The workers of a group are gone, and others will come in their place.

        applied: how many batches of a stream count; the rest of its leases is free again. ended: all its scripts had
        come to their end.
        """
        self._parting.discard(group)
        if not ended:
            self._finished.discard(group)
        if group == 0:  # only where it is alone do others read what it drew: all of them will ask again
            self._draws = DrawnChunks(self._groups * self._workers - 1)
        for number, epoch in self._epochs.items():
            epoch.restart(group, lambda lease, number=number: applied((number << 32) | lease))  # type: ignore[misc]
        return self._settle_all()

    def warmed(self) -> Replies:
        """Warm-up is over: every group leases."""
        self._warming = False
        return self._settle_all()

    @property
    def open_epochs(self) -> tuple[int, ...]:
        """Epochs with leases; several, if a group left one early and is ahead."""
        return tuple(self._epochs)

    @property
    def kept_chunks(self) -> int:
        """How many chunks of draws are still to be sent or fetched."""
        return len(self._draws)

    def _ask(self, sender: Address, ask: LeaseRequest) -> Replies:
        if ask.epoch < 0 or ask.total < -1 or not 0 <= ask.passed <= ask.ordinal:
            raise ProtocolError(f"{sender}: {ask} asks for nothing that exists")
        if self._is_closed(ask.epoch):
            return [(sender, _over(ask))]
        if ask.epoch not in self._epochs and len(self._epochs) >= _MOST_EPOCHS:
            raise ProtocolError(f"{sender} begins epoch {ask.epoch}, while {len(self._epochs)} others are not over")
        epoch = self._epochs.setdefault(ask.epoch, _Epoch())
        if ask.ordinal > len(epoch.table(sender.group)) and sender.group not in epoch.left:
            raise ProtocolError(f"{sender}: lease {ask.ordinal} before lease {len(epoch.table(sender.group))}")
        refusal = _contradiction(epoch, sender, ask)
        if refusal:
            return [(sender, Fail(refusal))]
        epoch.learn(ask.total)
        epoch.passed[sender] = max(ask.passed, epoch.passed.get(sender, 0))
        if (sender, ask) not in epoch.held:
            epoch.held.append((sender, ask))
        if ask.epoch > self._newest.get(sender, -1):
            self._newest[sender] = ask.epoch
            return self._settle(ask.epoch) + self._close()
        return self._settle(ask.epoch)

    def _is_closed(self, epoch: int) -> bool:
        return epoch < self._floor or epoch in self._over

    def _close(self) -> Replies:
        """End the epochs that every worker has left behind, read or not.

        The one before a worker's newest stays open: a fresh process in its place may begin there.
        """
        reading = [Address(Role.WORKER, g, i) for g in range(self._groups) for i in range(self._workers)]
        newest = [self._newest.get(worker, 0) for worker in reading if worker.group not in self._finished]
        self._floor = max(self._floor, min(newest, default=0) - 1)
        replies: Replies = []
        for number in [number for number in self._epochs if number < self._floor]:
            replies += [(sender, _over(ask)) for sender, ask in self._epochs.pop(number).held]
        self._over = {number for number in self._over if number >= self._floor}
        return replies

    def _free(self, sender: Address, free: LeaseRelease) -> Replies:
        if free.epoch not in self._epochs:
            return []
        epoch = self._epochs[free.epoch]
        left = epoch.left.get(sender.group)
        position = _position(left.table if left else epoch.table(sender.group), free)
        if position < 0:
            raise ProtocolError(f"{sender}: {free} lies in no lease of group {sender.group}")
        epoch.gone.add(sender)
        torn = _disagreement(epoch, sender, position)
        if torn:
            return [(sender, Fail(f"epoch {free.epoch}: {torn}; workers of one group must leave it at the same batch"))]
        if sender.group not in epoch.left:
            self._leave(epoch, sender, free, position)
        return self._settle(free.epoch)

    def _leave(self, epoch: _Epoch, sender: Address, free: LeaseRelease, position: int) -> None:
        table = epoch.table(sender.group)
        epoch.left[sender.group] = _Leaving(position, sender, tuple(table))
        rest = table[free.ordinal :]
        del table[free.ordinal :]
        if rest and rest[0].first < free.first:
            table.append(replace(rest[0], last=free.first))
        given_back = [(run.first, run.last) for run in rest[1:]]
        epoch.give_back(given_back + [(free.first, run.last) for run in rest[:1]])

    def _settle_all(self) -> Replies:
        return [reply for number in tuple(self._epochs) for reply in self._settle(number)]

    def _settle(self, number: int) -> Replies:
        """Answer every held question that has an answer now, the oldest first."""
        epoch, replies = self._epochs[number], []
        held = epoch.take_held()
        for sender, ask in held:
            answer = self._answer(epoch, sender, ask)
            if answer is None:
                epoch.held.append((sender, ask))
            else:
                replies.append((sender, answer))
        if self._is_over(epoch):
            replies += [(sender, _over(ask)) for sender, ask in epoch.held]
            self._over.add(number)
            del self._epochs[number]
        return replies

    def _answer(self, epoch: _Epoch, sender: Address, ask: LeaseRequest) -> Message | None:
        table = epoch.table(sender.group)
        if ask.ordinal < len(table):
            return _lease(ask, table[ask.ordinal])
        if sender.group in epoch.left or sender.group in self._finished or self._is_over(epoch):
            return _over(ask)
        if self._warming and sender.group != 0:
            return None
        if sender.group in self._parting and ask.wait:
            return Lease(ask.epoch, ask.ordinal, LEAVES, 0, -1)
        run = None if sender.group in self._parting else epoch.take(self._length(epoch))
        if run is None:
            return None if ask.wait else Lease(ask.epoch, ask.ordinal, -1, epoch.frontier, epoch.frontier)
        table.append(replace(run, rested=ask.wait))
        return _lease(ask, table[-1])

    def _length(self, epoch: _Epoch) -> int:
        remaining = epoch.remaining()
        if remaining < 0:
            return UNKNOWN_TOTAL
        return min(LONGEST, max(1, remaining // (2 * max(1, self._groups - len(self._finished)))))

    def _is_over(self, epoch: _Epoch) -> bool:
        return epoch.remaining() == 0 and all(self._is_done(epoch, group) for group in epoch.tables)

    def _is_done(self, epoch: _Epoch, group: int) -> bool:
        """Whether no worker of the group will read or give back a batch of its leases."""
        leases = len(epoch.table(group))
        if leases == 0 or group in self._finished:
            return True
        # Every worker counts, not only the fastest: a slow one still has to be told the leases of its group.
        return all(
            worker in epoch.gone or epoch.passed.get(worker, 0) >= leases
            for worker in (Address(Role.WORKER, group, i) for i in range(self._workers))
        )

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {
            "warming": self._warming,
            "finished": self._finished,
            "parting": self._parting,
            "floor": self._floor,
            "over": self._over,
            "newest": self._newest,
            "epochs": {number: epoch.state_dict() for number, epoch in self._epochs.items()},
            "draws": self._draws.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._warming, self._floor, self._over = state["warming"], state["floor"], set(state["over"])
        self._finished, self._parting = set(state["finished"]), set(state["parting"])
        self._newest = dict(state["newest"])
        self._epochs = {number: _Epoch.from_state(epoch) for number, epoch in state["epochs"].items()}
        self._draws.load_state_dict(state["draws"])


def _lease(ask: LeaseRequest, run: _Run) -> Lease:
    return Lease(ask.epoch, ask.ordinal, run.lease, run.first, run.last, run.rested)


def _over(ask: LeaseRequest) -> Lease:
    return Lease(ask.epoch, ask.ordinal, -1, 0, -1)


def _contradiction(epoch: _Epoch, sender: Address, ask: LeaseRequest) -> str:
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


def _position(table: Sequence[_Run], free: LeaseRelease) -> int:
    """How many batches the group read; -1: there is no such place in its leases."""
    before = sum(run.last - run.first for run in table[: free.ordinal])
    if 0 <= free.ordinal < len(table):
        run = table[free.ordinal]
        return before + free.first - run.first if run.first <= free.first <= run.last else -1
    return before if free.ordinal == len(table) else -1


def _disagreement(epoch: _Epoch, sender: Address, position: int) -> str:
    """Why a worker's exit from an epoch does not fit its group; empty: it does.

    Another worker left elsewhere, or has read beyond the place where the sender left.
    """
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


def _numbers(put: DrawnBatches) -> int:
    return len(put.sizes) + len(put.indices)


def _nothing_of(key: tuple[int, int]) -> DrawnBatches:
    """An epoch ends with this chunk, which is empty."""
    epoch, chunk = key
    return DrawnBatches(epoch, chunk, True, (), ())


@dataclass(slots=True)
class _Chunk:
    put: DrawnBatches | None = None
    fetched: set[Address] = field(default_factory=set)
    held: list[Address] = field(default_factory=list)


class DrawnChunks:
    """Chunks of worker (0,0)'s draws, for `askers` other workers.

    A chunk is kept until all have it. Worker (0,0) draws one epoch after the other. If its group has restarted, its
    first draw is for the epoch that it was in. Earlier epochs are over, and a request for one of them gets the reply
    that nothing of it is left.

    keeps: a worker may restart alone, in the epoch in which it had its last batch, and request that epoch once more. No
    worker requests an epoch that all have left by more than one.
    """

    def __init__(self, askers: int, keeps: bool = False) -> None:
        self._askers, self._keeps = askers, keeps
        self._newest: dict[Address, int] = {}  # the last epoch that each asked for
        self._first: int | None = None
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._drawn = 0

    def put(self, put: DrawnBatches) -> Replies:
        """Store a chunk and reply to waiting workers. Raises ProtocolError."""
        key = (put.epoch, put.chunk)
        chunk = self._chunk(key)
        if chunk.put not in (None, put):
            raise ProtocolError(f"chunk {put.chunk} of epoch {put.epoch} came twice")
        if chunk.put is None:
            self._drawn += _numbers(put)
        if self._drawn > _MOST_DRAWN * (1 + 2 * self._keeps):  # then of up to three epochs
            raise ProtocolError(f"{self._drawn} numbers were drawn that some worker has not fetched")
        chunk.put = put
        over: Replies = []
        if self._first is None:
            self._first = put.epoch
            for each in [each for each in self._chunks if each[0] < put.epoch]:
                over += [(who, _nothing_of(each)) for who in self._chunks.pop(each).held]
        return over + self._serve(key)

    def ask(self, sender: Address, ask: DrawRequest) -> Replies:
        """Answer with the chunk, at once or when it is there."""
        key = (ask.epoch, ask.chunk)
        if self._first is not None and ask.epoch < self._first:
            return [(sender, _nothing_of(key))]
        held = self._chunk(key).held
        if sender not in held:
            held.append(sender)
        self._newest[sender] = max(ask.epoch, self._newest.get(sender, 0))
        if self._keeps and len(self._newest) == self._askers:
            self._forget(min(self._newest.values()) - 1)
        return self._serve(key)

    def _forget(self, epoch: int) -> None:
        """No worker asks for chunks before this epoch."""
        for key in [key for key in self._chunks if key[0] < epoch]:
            put = self._chunks.pop(key).put
            self._drawn -= 0 if put is None else _numbers(put)

    def _chunk(self, key: tuple[int, int]) -> _Chunk:
        if key not in self._chunks and len(self._chunks) >= _MOST_CHUNKS:
            raise ProtocolError(f"chunk {key[1]} of epoch {key[0]}, while {len(self._chunks)} others wait")
        return self._chunks.setdefault(key, _Chunk())

    def __len__(self) -> int:
        return len(self._chunks)

    def _serve(self, key: tuple[int, int]) -> Replies:
        chunk = self._chunks[key]
        if chunk.put is None:
            return []
        replies: Replies = [(who, chunk.put) for who in chunk.held]
        chunk.fetched.update(chunk.held)
        chunk.held.clear()
        if len(chunk.fetched) >= self._askers and not self._keeps:
            self._drawn -= _numbers(chunk.put)
            del self._chunks[key]
        return replies

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {
            "keeps": self._keeps,
            "newest": self._newest,
            "first": self._first,
            "chunks": {key: field_values(chunk) for key, chunk in self._chunks.items()},
            "drawn": self._drawn,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._keeps, self._newest, self._first = state["keeps"], dict(state["newest"]), state["first"]
        self._chunks = {
            key: _Chunk(put, set(fetched), list(held)) for key, (put, fetched, held) in state["chunks"].items()
        }
        self._drawn = state["drawn"]
