"""Snapshots as one server sees them: announced in the log of decisions, frozen behind a step, handed to its host.

The server tells what happens (a step is decided, a worker's state has come), and carries what is to be sent; the clock,
the files and the thread that writes them are the host's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from topotrain.config.intervals import Rhythm, wants_snapshots
from topotrain.config.job import Agreement, Apply, Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.optim.state_table import StateError, from_rows, to_rows
from topotrain.core.protocol import Delta, Message, ProtocolError
from topotrain.core.server.component_state import State
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.extensions.checkpointing.cross_group_cut import CrossGroupCut
from topotrain.extensions.checkpointing.data_position import DataPosition
from topotrain.extensions.checkpointing.shard_snapshot import (
    FrozenShard,
    ShardFreezer,
    SnapshotParticipant,
    SnapshotSource,
)
from topotrain.extensions.checkpointing.snapshot_coordinator import (
    CUT,
    END,
    FROZEN,
    LAYOUT,
    PUBLISHED,
    STEP,
    WRITTEN,
    DropSnapshot,
    PublishSnapshot,
    SnapshotCoordinator,
    TextParts,
    Work,
    WriteSnapshot,
    texts,
)
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart
from topotrain.training.data.data_messages import Lease

Send = Callable[[Address, Message], None]


def refusal(job: Job, topology: Topology) -> str:
    """Why no snapshot can be taken of a job; empty: they can."""
    if topology.server_groups > 1 and not topology.synced:
        return "its groups go their own ways"
    if topology.synced and job.cluster.agreement is Agreement.kRingAverage:
        return "with agreement: kRingAverage no one model has all updates in it before the end"
    if job.apply is Apply.kOnArrival and topology.worker_groups > 1:
        return "with apply: kOnArrival parts of other groups' steps are in the values at any moment"
    return ""


def takes_snapshots(job: Job, topology: Topology) -> bool:
    """Whether any are taken: the user wants them, and the layout has them."""
    return wants_snapshots(job) and not refusal(job, topology)


@dataclass(frozen=True, slots=True)
class WorkerStates:
    """What the coordinator knows of the workers' states.

    expected: those who leave theirs here, and go on. taken: whose state at this snapshot has come. older: what else
    there is of theirs. counts: batches that are applied, by data stream.
    """

    expected: set[Address]
    taken: Mapping[Address, torch.Tensor]
    older: Mapping[Address, torch.Tensor]
    counts: Mapping[int, int]


class ServerSnapshots:
    """One server's part in all snapshots of a job.

    Args:
        me, job, topology: the server.
        source: what the job started from, if it goes on from a snapshot.
        send: how the server sends.
        participants: what else of the server is in every snapshot.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        source: SnapshotSource | None,
        send: Send,
        participants: Sequence[SnapshotParticipant] = (),
    ) -> None:
        self._me, self._send, self._participants = me, send, participants
        self._keepers = tuple(each for each in participants if type(each).taken is not SnapshotParticipant.taken)
        self._groups = topology.worker_groups_of(me.group)
        self._servers = topology.servers(me.group)
        self._across = topology.server_groups if topology.synced else 0
        together = range(topology.server_groups) if topology.synced else (me.group,)
        everybody = tuple(server for group in together for server in topology.servers(group))
        self._leader = everybody[0]
        self._several = len(self._groups) > 1 or self._across > 0
        self.cut = 0
        """The last snapshot for which this shard has frozen."""
        self._crosscut: CrossGroupCut | None = None
        self._due_rows: list[Any] | None = None
        self._facts: dict[str, Any] = {}
        # A group that has taken no step yet may have all of what was left to read before it.
        self._reading = dict.fromkeys(self._groups, 0 if source is None else unread(source))
        self._work: Work | None = None
        self.refusal = refusal(job, topology)
        unit = topology.workers_per_group if job.per_worker_batch else 1
        before = {} if source is None else {epoch: source.runs(epoch) for epoch in source.epochs}
        closed = 0 if source is None else source.closed
        groups = topology.worker_groups
        if job.cluster.backup:  # each worker has a stream of its own, and deals with batches instead of rounds of them
            groups, unit = groups * topology.workers_per_group, 1
        self.position = DataPosition(groups, unit, {e: tuple(runs) for e, runs in before.items()}, closed)
        self._listed = takes_snapshots(job, topology)
        self.closed = closed
        """What is applied of epochs before this one is in no snapshot's list any more: all of it is."""
        self.book = SnapshotCoordinator(everybody, self.position, self._do) if me == self._leader else None
        self.steps = {group: 0 if source is None else source.steps(group) for group in self._groups}
        self._texts = TextParts()
        self._freezer: ShardFreezer | None = None
        self._frozen: dict[int, FrozenShard] = {}
        self._rhythm = Rhythm.of(job, "checkpoint")
        self._passed = self._pressed = self._rhythm.passed(self.steps[self._groups[0]])
        self._timed = 0  # the number of the one that was under way when the last one by time was asked for
        self._ends = False
        self._announced = self._due = self._laid = 0
        self._untold: dict[int, int] = {}

    @property
    def under_way(self) -> int:
        """On the coordinator: the number of the snapshot that is not over yet; 0: there is none."""
        return 0 if self.book is None else self.book.number

    @property
    def last(self) -> int:
        """On the coordinator: the number of the newest one that was begun; 0: none was."""
        return 0 if self.book is None else self.book.next - 1

    @property
    def unkept(self) -> str:
        """Why a participant cannot be in a snapshot now; empty: all can."""
        return next((each.unkept for each in self._participants if each.unkept), "")

    def has_states_from(self, extension: object) -> bool:
        """Whether workers leave their states with this extension."""
        return extension in self._keepers

    @property
    def due(self) -> bool:
        """Whether this shard has to freeze now."""
        return self._due > 0

    def states(self) -> tuple[dict[Address, torch.Tensor], dict[Address, torch.Tensor]]:
        """Of workers that leave their states here: those of their last epoch's begin, and those at this snapshot."""
        begun: dict[Address, torch.Tensor] = {}
        taken: dict[Address, torch.Tensor] = {}
        for keeper in self._keepers:
            begun.update(keeper.begun())
            taken.update(keeper.taken(self.under_way))
        return begun, taken

    def forget_states(self) -> None:
        """No snapshot is under way: none needs the states that workers have left for it."""
        for keeper in self._keepers:
            keeper.forget(self.last)

    def leased(self, lease: Lease) -> None:
        """A worker is given these batches."""
        if self._listed and lease.last > lease.first:
            self.position.leased(lease.epoch, lease.lease, lease.first)

    def follow(self, work: Work, first: int = 1) -> None:
        """From now on snapshots may be taken, numbered from `first` on; `work` is told what to do with files."""
        self._work = work
        if self.book is not None:
            self.book.next = first

    def succeed(self, work: Work) -> None:
        """Another host is told what to do with files from now on."""
        self._work = work

    def orphaned(self) -> list[SnapshotPart]:
        """What the host would say that had this server before, and is gone: whatever it was writing came to nothing."""
        lost = {"error": f"the process of {self._me} has died"}
        said = texts(self._laid, WRITTEN, lost) if self._laid else []
        if self.book is not None and self.book.publishing:
            said += texts(self.book.number, PUBLISHED, lost)
        return said

    def _do(self, work: WriteSnapshot | PublishSnapshot | DropSnapshot) -> None:
        if self._work is not None:
            self._work(work)

    # --- on the coordinator: when --------------------------------------------------------------------------------

    def begin(self, workers: WorkerStates) -> int:
        """It is time: the number of the snapshot that is to be announced; 0: none is."""
        if self.book is None or self._work is None or self.refusal:
            return 0
        if self.book.number and self.book.number == self._timed:
            self._hurry(self.book, workers)
        number = self.book.begin()
        self._timed = self.book.number
        return number

    def end(self) -> None:
        """The job is to end: one more, behind the very next step."""
        self._ends = True

    def cannot(self, why: str) -> None:
        """None can be taken now, which the host should know."""
        self._do(DropSnapshot(0, why))

    def wanted(self, group: int) -> bool:
        """On the coordinator: whether one is to be taken behind the step of this group that is decided next."""
        if self.book is None or self._work is None or self.refusal:
            return False
        return self._ends or self._times(group) > self._passed

    def _times(self, group: int) -> int:
        """How many `checkpoint_freq` will have asked for; steps are those of the first worker group."""
        return self._rhythm.passed(self.steps[group] + 1) if group == self._groups[0] else self._passed

    def before(self, group: int, workers: Callable[[], WorkerStates]) -> int:
        """A step is about to be decided behind which one is wanted: its number; 0: another is under way yet.

        Then it is taken behind the first step that finds it over; if two more were due by then, nobody waits longer.
        """
        assert self.book is not None
        due = self._times(group)
        if self.book.number:
            if due > self._pressed + 1:
                self._pressed = due
                self._hurry(self.book, workers())
            return 0
        why, self._ends = END if self._ends else STEP, False
        self._passed = self._pressed = due
        return self.book.begin(why)

    def _hurry(self, book: SnapshotCoordinator, workers: WorkerStates) -> None:
        """A snapshot has waited for workers until the next is due.

        Where groups go their own ways an older state of one does as well; in one group the states of all belong to
        the same step.
        """
        missing = book.missing(workers.expected, workers.taken)
        if missing and self._several and missing <= workers.older.keys():
            kept = {worker: workers.older[worker] for worker in missing}
            book.publish({**workers.taken, **kept}, workers.counts, exact=False)
        elif missing:
            book.give_up("the state of " + ", ".join(map(str, sorted(missing))) + " never came")

    def bereft(self, group: int, workers: WorkerStates) -> None:
        """The workers of a group are others now: of those before nobody leaves the state that a snapshot waits for.

        One that the job is to end with is taken again, behind their first step. Several groups have older states.
        """
        if self.book is None or self._several or not 0 < self.book.number <= self.cut:
            return
        missing = sorted(w for w in workers.expected - workers.taken.keys() if w.group == group)
        if missing:
            why = self.book.abandon(f"{', '.join(map(str, missing))} had to start again")
            self._ends = self._ends or why == END

    def go_on(self, workers: WorkerStates) -> None:
        """Something has come that a snapshot may have waited for."""
        if self.book is not None and not self.book.missing(workers.expected, workers.taken):
            self.book.publish(workers.taken, workers.counts, exact=True)

    # --- on every shard: what ------------------------------------------------------------------------------------

    def announce(self, number: int) -> None:
        """The log of decisions says that a snapshot is taken behind the next step; once, if it says so twice."""
        if number > max(self.cut, self._due):
            self._announced = number

    def step(self, group: int, epoch: int = 0) -> int:
        """A step of a group is being carried out: which snapshot its workers are to be told of, 0: none.

        epoch: of the batches that are in it.
        """
        self.steps[group] += 1
        self._reading[group] = max(epoch, self._reading[group])
        if self._announced:
            self._due, self._announced = self._announced, 0
            self._untold = dict.fromkeys(self._groups, self._due)
        return self._untold.pop(group, 0)

    def rest(self) -> None:
        """No step will come any more: what is announced is due."""
        if self._across and self._announced:
            self._due, self._announced = self._announced, 0

    def freeze(self, model: ParameterShard, facts: Mapping[str, Any], counts: Mapping[int, int]) -> None:
        """A snapshot is `due`, and the step before it is carried out. facts: for the manifest; counts: of streams."""
        number, self._due = self._due, 0
        self.cut = number
        if self._across and self._crosscut is None:
            self._crosscut = CrossGroupCut(model, self._me.group, self._across)
        for master, message in self._crosscut.remainders(number) if self._crosscut is not None else ():
            self._send(Address(Role.SERVER, master, self._me.index), message)
        if self._work is None:  # a shard whose host writes nothing; the coordinator is told, and drops the snapshot
            self._say(number, FROZEN, {"error": f"{self._me} writes no snapshots"})
            return
        now = {**facts, "steps": sorted(self.steps.items()), "reading": sorted(self._reading.items())}
        self._facts = {}
        if self.book is not None:
            self.book.frozen(number, now, dict(counts))
        elif self._me.index == 0:
            self._facts = {"facts": {**now, "counts": sorted(counts.items())}}
        if self._freezer is None:
            self._freezer = ShardFreezer(model, self._me.index, self._me.group if self._across else None)
        try:
            frozen = self._freezer.freeze()
            for participant in self._participants:
                frozen = participant.freeze(frozen)
        except StateError as error:
            self._say(number, FROZEN, {"error": str(error)})
            return
        self._frozen = {number: frozen}
        if self._crosscut is None:
            self._say(number, FROZEN, {"rows": to_rows(frozen.table)})
            return
        self._due_rows = to_rows(frozen.table)
        self._crosscut.begin(frozen)
        self._look()

    # --- across several server groups (`cross_group_cut`)
    # ---------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Something of what other groups had added may not have come yet."""
        return self._due_rows is not None

    def early(self, message: Message) -> bool:
        """Whether this was sent behind a cut that is still to come here."""
        mark = message.cut if isinstance(message, Delta) else message.number if isinstance(message, Remainder) else 0
        return mark > self.cut

    def late(self, message: Delta, body: torch.Tensor) -> None:
        """A Delta that was just taken, while this shard `gathers`."""
        if self._crosscut is not None and message.cut < self.cut:
            self._crosscut.late(message, body)
            self._look()

    def remainder(self, group: int, message: Remainder, body: torch.Tensor) -> None:
        """What another group had not sent at the snapshot."""
        if self.gathers and self._crosscut is not None and message.number == self.cut:
            self._crosscut.take(group, message, body)
            self._look()

    def _look(self) -> None:
        if self._due_rows is not None and self._crosscut is not None and self._crosscut.complete:
            rows, self._due_rows = self._due_rows, None
            self._say(self.cut, FROZEN, {"rows": rows, **self._facts})

    def take(self, sender: Address, message: SnapshotPart) -> None:
        """What another shard says of a snapshot, or this server's own host (`sender` is then the server itself)."""
        if sender == self._me:  # the host speaks through its server
            message = replace(message, shard=self._me.index)
        down = message.stage in (LAYOUT, CUT)
        if not down and self.book is None:
            self._send(self._leader if self._me.index == 0 else self._servers[0], message)
            return
        if not down and sender.group != self._me.group:
            sender = self._of(sender.group, message.shard)
        if message.stage == LAYOUT and self._me.index == 0 and self.book is None:
            for server in self._servers[1:]:
                self._send(server, message)
        data = self._texts.take(sender, message)
        if data is None:
            return
        if message.stage == LAYOUT:
            self._laid_out(message.number, data)
        elif self.book is not None:
            own = self._frozen.get(message.number)
            for to, said in self.book.take(sender, message.number, message.stage, data, own):
                self._send(to, said)

    def _of(self, group: int, shard: int) -> Address:
        if not 0 <= shard < len(self._servers):
            raise ProtocolError(f"no shard {shard} of server group {group}")
        return Address(Role.SERVER, group, shard)

    def _laid_out(self, number: int, data: Mapping[str, Any]) -> None:
        if number <= self._laid:
            return  # a road that says things twice
        self._laid = number
        self.closed = max(self.closed, int(data.get("closed", 0)))
        frozen = self._frozen.pop(number, None)
        if frozen is None or data.get("error"):
            self._say(number, WRITTEN, {"error": data.get("error") or f"{self._me} had frozen nothing"})
            return
        try:
            table = from_rows(data.get("rows"), frozen.parameters)
        except StateError as error:
            self._say(number, WRITTEN, {"error": str(error)})
            return
        self._do(WriteSnapshot(number, self._me, frozen, table))

    def _say(self, number: int, stage: int, data: Mapping[str, Any]) -> None:
        for part in texts(number, stage, data):
            part = replace(part, shard=self._me.index)
            self._send(self._leader if self._me.index == 0 else self._servers[0], part)

    def state_dict(self) -> State | None:
        """Return the state, see `component_state`. None: not possible while a frozen shard waits for its layout."""
        if self._frozen:
            return None
        return {
            "cut": self.cut,
            "facts": self._facts,
            "reading": self._reading,
            "position": self.position.state_dict(),
            "closed": self.closed,
            "coordinator": None if self.book is None else self.book.state_dict(),
            "steps": self.steps,
            "texts": self._texts.state_dict(),
            "passed": self._passed,
            "pressed": self._pressed,
            "timed": self._timed,
            "ends": self._ends,
            "announced": self._announced,
            "due": self._due,
            "laid": self._laid,
            "untold": self._untold,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.cut, self.closed, self._facts = state["cut"], state["closed"], dict(state["facts"])
        self._reading, self.steps, self._untold = dict(state["reading"]), dict(state["steps"]), dict(state["untold"])
        self.position.load_state_dict(state["position"])
        self._texts.load_state_dict(state["texts"])
        if self.book is not None:
            self.book.load_state_dict(state["coordinator"])
        self._passed, self._pressed, self._timed = state["passed"], state["pressed"], state["timed"]
        self._ends, self._announced = state["ends"], state["announced"]
        self._due, self._laid = state["due"], state["laid"]


def unread(source: SnapshotSource) -> int:
    """The epoch before which a job had read everything when the snapshot was taken."""
    return min(source.epochs, default=source.closed) if source.first_epoch is None else source.first_epoch
