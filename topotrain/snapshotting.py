"""Snapshots as one server sees them: announced in the log of decisions, frozen behind a step, handed to its host.

The server tells what happens (a step is decided, a worker's state has come), and carries what is to be sent; the clock,
the files and the thread that writes them are the host's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from topotrain.job import Apply, Job
from topotrain.message import Message, SnapshotPart
from topotrain.model import Model
from topotrain.position import Position
from topotrain.snapshot import Freezer, Frozen, Source
from topotrain.snapshotbook import FROZEN, LAYOUT, PUBLISHED, WRITTEN, Book, Drop, Publish, Texts, Work, Write, texts
from topotrain.statetable import StateError, from_rows, to_rows
from topotrain.topology import Address, Topology

Send = Callable[[Address, Message], None]


def refusal(job: Job, topology: Topology) -> str:
    """Why no snapshot can be taken of a job; empty: they can."""
    if topology.server_groups > 1:
        return "its server groups hold different values, which no one decision orders"
    if job.apply is Apply.kOnArrival and topology.worker_groups > 1:
        return "with apply: kOnArrival parts of other groups' steps are in the values at any moment"
    return ""


@dataclass(frozen=True, slots=True)
class Workers:
    """What the coordinator knows of the workers' states.

    expected: those who leave theirs here, and go on. taken: whose state at this snapshot has come. older: what else
    there is of theirs. counts: batches that are applied, by data stream.
    """

    expected: set[Address]
    taken: Mapping[Address, torch.Tensor]
    older: Mapping[Address, torch.Tensor]
    counts: Mapping[int, int]


class Snapshots:
    """One server's part in all snapshots of a job.

    Args:
        me, job, topology: the server.
        source: what the job started from, if it goes on from a snapshot.
        send: how the server sends.
    """

    def __init__(self, me: Address, job: Job, topology: Topology, source: Source | None, send: Send) -> None:
        self._me, self._send = me, send
        self._groups = topology.worker_groups_of(me.group)
        self._servers = topology.servers(me.group)
        self._work: Work | None = None
        self.refusal = refusal(job, topology)
        unit = topology.workers_per_group if job.per_worker_batch else 1
        before = {} if source is None else {epoch: source.runs(epoch) for epoch in source.epochs}
        self.position = Position(topology.worker_groups, unit, {e: tuple(runs) for e, runs in before.items()})
        self.book = Book(self._servers, self.position, self._do) if me.index == 0 else None
        self.steps = {group: 0 if source is None else source.steps(group) for group in self._groups}
        self._texts = Texts()
        self._freezer: Freezer | None = None
        self._frozen: dict[int, Frozen] = {}
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

    def _do(self, work: Write | Publish | Drop) -> None:
        if self._work is not None:
            self._work(work)

    # --- on the coordinator: when --------------------------------------------------------------------------------

    def begin(self, workers: Workers) -> int:
        """It is time: the number of the snapshot that is to be announced; 0: none is."""
        if self.book is None or self._work is None or self.refusal:
            return 0
        if self.book.number:
            self._hurry(self.book, workers)
        return self.book.begin()

    def _hurry(self, book: Book, workers: Workers) -> None:
        """A snapshot has waited for workers until the next is due.

        Where groups go their own ways an older state of one does as well; in one group the states of all belong to
        the same step.
        """
        missing = book.missing(workers.expected, workers.taken)
        if missing and len(self._groups) > 1 and missing <= workers.older.keys():
            kept = {worker: workers.older[worker] for worker in missing}
            book.publish({**workers.taken, **kept}, workers.counts, exact=False)
        elif missing:
            book.give_up("the state of " + ", ".join(map(str, sorted(missing))) + " never came")

    def go_on(self, workers: Workers) -> None:
        """Something has come that a snapshot may have waited for."""
        if self.book is not None and not self.book.missing(workers.expected, workers.taken):
            self.book.publish(workers.taken, workers.counts, exact=True)

    # --- on every shard: what ------------------------------------------------------------------------------------

    def announce(self, number: int) -> None:
        """The log of decisions says that a snapshot is taken behind the next step."""
        self._announced = number

    def step(self, group: int) -> int:
        """A step of a group is being carried out: which snapshot its workers are to be told of, 0: none."""
        self.steps[group] += 1
        if self._announced:
            self._due, self._announced = self._announced, 0
            self._untold = dict.fromkeys(self._groups, self._due)
        return self._untold.pop(group, 0)

    def freeze(
        self, model: Model, facts: Callable[[], Mapping[str, Any]], counts: Callable[[], Mapping[int, int]]
    ) -> None:
        """The step is carried out: if a snapshot is due, this is the moment."""
        if not self._due:
            return
        number, self._due = self._due, 0
        if self._work is None:  # a shard whose host writes nothing; the coordinator is told, and drops the snapshot
            self._say(number, FROZEN, {"error": f"{self._me} writes no snapshots"})
            return
        if self.book is not None:
            self.book.frozen(number, {**facts(), "steps": sorted(self.steps.items())}, dict(counts()))
        if self._freezer is None:
            self._freezer = Freezer(model, self._me.index)
        try:
            self._frozen = {number: self._freezer.freeze()}
        except StateError as error:
            self._say(number, FROZEN, {"error": str(error)})
            return
        self._say(number, FROZEN, {"rows": to_rows(self._frozen[number].table)})

    def take(self, sender: Address, message: SnapshotPart) -> None:
        """What another shard says of a snapshot, or this server's own host (`sender` is then the server itself)."""
        if message.stage != LAYOUT and self.book is None:
            self._send(self._servers[0], message)  # the host speaks through its server
            return
        data = self._texts.take(sender, message)
        if data is None:
            return
        if message.stage == LAYOUT:
            self._laid_out(message.number, data)
        elif self.book is not None:
            own = self._frozen.get(message.number)
            for to, said in self.book.take(sender.index, message.number, message.stage, data, own):
                self._send(to, said)

    def _laid_out(self, number: int, data: Mapping[str, Any]) -> None:
        if number <= self._laid:
            return  # a road that says things twice
        self._laid = number
        frozen = self._frozen.pop(number, None)
        if frozen is None or data.get("error"):
            self._say(number, WRITTEN, {"error": data.get("error") or f"{self._me} had frozen nothing"})
            return
        try:
            table = from_rows(data.get("rows"), frozen.parameters)
        except StateError as error:
            self._say(number, WRITTEN, {"error": str(error)})
            return
        self._do(Write(number, self._me.index, frozen, table))

    def _say(self, number: int, stage: int, data: Mapping[str, Any]) -> None:
        for part in texts(number, stage, data):
            self._send(self._servers[0], part)
