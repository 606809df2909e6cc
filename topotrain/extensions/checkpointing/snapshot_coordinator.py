"""The coordinator of snapshots: their schedule, and their exchange with shards.

    host          SnapshotRequest      -> coordinator   it is time
    coordinator   StepDecision(change) -> shards        after the next step that is decided, freeze
    shard         FROZEN               -> coordinator   the optimizer state that the shard holds
    coordinator   LAYOUT               -> shards        the state of all shards, so the place of each element is known
    shard's host  WRITTEN              -> coordinator   the shard's elements are on disk, with these checksums
    coordinator's host PUBLISHED                        the manifest is written, so the snapshot counts

Several server groups take a snapshot together (`cross_group_cut`). The first coordinator sends CUT to the others. They
announce the snapshot to their shards, and forward the messages in both directions.

A failure ends one snapshot and nothing else: its files are dropped, and the snapshot before it stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from topotrain.config.intervals import StepInterval
from topotrain.config.topology import Address
from topotrain.core.optim.state_table import StateError, Table, from_rows, merge, to_rows
from topotrain.core.protocol import Message
from topotrain.core.server.component_state import DeclaredState, State, field_values
from topotrain.core.server.consistency import STATIC
from topotrain.extensions.checkpointing.data_position import DataPosition
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import CUT, LAYOUT, PUBLISHED, WRITTEN, snapshot_parts

TIME, STEP, END = "time", "step", "end"
"""Why a snapshot is taken: seconds have passed, or steps, or the job is to end."""

Out = list[tuple[Address, Message]]


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """Order to a host: write this server's elements. The host replies with WRITTEN."""

    number: int
    server: Address
    frozen: FrozenShard
    table: Table


@dataclass(frozen=True, slots=True)
class PublishSnapshot:
    """Order to the coordinator's host: every element is on disk, write the manifest.

    The host replies with PUBLISHED.

    Attributes:
        facts: entries of the manifest.
        written: the WRITTEN of each shard's host.
        states: the states of the workers.
    """

    number: int
    # TIME, STEP or END.
    why: str
    facts: Mapping[str, Any]
    written: tuple[Mapping[str, Any], ...]
    states: Mapping[Address, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Order to the coordinator's host: the snapshot has failed (0: none was begun)."""

    number: int
    why: str


SnapshotOrder = WriteSnapshot | PublishSnapshot | DropSnapshot


class SnapshotHost(Protocol):
    """The process of a server, which has its files."""

    def execute(self, order: SnapshotOrder) -> None:
        """Start to carry out an order. The reply is a message from the server to itself."""
        ...


class NoFiles:
    """The host of a standby. It writes nothing, since the host of the primary does."""

    def execute(self, order: SnapshotOrder) -> None:
        """Ignore the order."""


@dataclass(frozen=True, slots=True)
class WorkerStates:
    """The states of the workers, as the coordinator has them.

    Attributes:
        expected: the workers that leave their states here, and continue.
        present: the states at this snapshot that have arrived.
        older: the states at the begin of the workers' last epochs.
        counts: the number of applied batches, by data stream.
    """

    expected: set[Address]
    present: Mapping[Address, torch.Tensor]
    older: Mapping[Address, torch.Tensor]
    counts: Mapping[int, int]


@dataclass(slots=True)
class _UnderWay:
    """A snapshot that has been announced. `counts`: of the data streams at the freeze."""

    number: int
    reason: str = TIME
    facts: dict[str, Any] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    frozen: dict[Address, Mapping[str, Any]] = field(default_factory=dict)
    written: dict[Address, Mapping[str, Any]] = field(default_factory=dict)
    laid_out: bool = False
    publishing: bool = False
    why: str = ""

    def set_facts(self, facts: Mapping[str, Any], counts: Mapping[int, int]) -> None:
        self.facts, self.counts = dict(facts), counts

    def add_facts(self, facts: Any) -> None:
        """Add the facts of another server group's coordinator."""
        # Only the first shard of each group sends facts.
        if not facts:
            return
        for name in ("steps", "clocks", "reading", "reads", "samples", "ended"):
            # JSON makes lists of tuples, so both sides are lists before they are compared.
            self.facts[name] = sorted([*map(list, self.facts.get(name, ())), *facts[name]])
        # The values of the one model have the updates of all groups.
        self.facts["version"] += facts["version"]
        # Streams belong to worker groups, so those of two server groups are different ones.
        self.counts = {**self.counts, **dict(facts["counts"])}

    def fail(self, why: str) -> None:
        # Later failures are mostly consequences of the first one.
        self.why = self.why or why

    def lay_out(self) -> None:
        self.laid_out = True

    def publish(self) -> None:
        self.publishing = True


class SnapshotCoordinator:
    """The exchange with the shards of a job, for one snapshot after the other.

    Args:
        servers: the shards, in order, of all groups that take snapshots together.
        position: the batches that are in the values.
        apart: several worker groups go on by themselves, so that a snapshot may have an older state of a worker.
        late: workers make several steps before a commit, so batches may count when their epoch has been read.
    """

    def __init__(self, servers: tuple[Address, ...], position: DataPosition, apart: bool, late: bool = False) -> None:
        self._servers, self._apart, self._late = servers, apart, late
        group = servers[0].group
        # Only these are sent to directly. The first shard of another group forwards to the rest of its group.
        self._near = [server for server in servers if server.group == group or server.index == 0]
        self._others = [server for server in self._near if server.group != group]
        self._host: SnapshotHost = NoFiles()
        self.has_host = False
        """Whether snapshots can be written."""
        self.position = position
        self.next = 1
        self._now: _UnderWay | None = None

    @property
    def number(self) -> int:
        """The snapshot that is under way. 0: there is none."""
        return 0 if self._now is None else self._now.number

    @property
    def publishing(self) -> bool:
        """Whether the coordinator's host is about to write the manifest."""
        return self._now is not None and self._now.publishing

    @property
    def writing(self) -> bool:
        """Whether hosts write files of the frozen shards, or the manifest."""
        now = self._now
        return now is not None and bool(now.facts) and (now.publishing or len(now.written) < len(self._servers))

    def attach_host(self, host: SnapshotHost, first: int | None = None) -> None:
        """Send orders to this host. first: the number of the next snapshot."""
        self._host, self.has_host = host, True
        if first is not None:
            self.next = first

    def begin(self, why: str = TIME) -> int:
        """Begin a snapshot. Returns its number, or 0 while another is under way."""
        # There is memory for one frozen shard.
        if self._now is not None:
            return 0
        self._now = _UnderWay(self.next, why)
        # A failed snapshot keeps its number, so late replies about it are never taken for those of another one.
        self.next += 1
        return self._now.number

    def announce(self, number: int) -> Out:
        """The messages that let the other server groups freeze, too."""
        return [(other, part) for other in self._others for part in snapshot_parts(number, CUT, {})]

    def set_facts(self, number: int, facts: Mapping[str, Any], counts: Mapping[int, int]) -> None:
        """The coordinator's own shard is about to freeze, at the decision of all shards."""
        if self._now is not None and self._now.number == number:
            self._now.set_facts(facts, counts)

    def receive(self, shard: Address, number: int, stage: int, data: Mapping[str, Any], own: FrozenShard | None) -> Out:
        """Handle a reply of a shard, or of a host. own: the coordinator's frozen shard."""
        now = self._now
        if now is None or now.number != number:
            return []
        if stage == PUBLISHED:
            # With or without an error: the host has removed the files of a manifest that could not be written.
            self._now = None
            return []
        if now.publishing:
            # Repeated by the standby of a shard, after the shard's host has written it.
            return []
        if data.get("error"):
            now.fail(str(data["error"]))
        if stage == WRITTEN:
            now.written[shard] = data
            self._end_if_failed(now)
            return []
        return self._lay_out(now, shard, data, own)

    def _lay_out(self, now: _UnderWay, shard: Address, data: Mapping[str, Any], own: FrozenShard | None) -> Out:
        now.frozen[shard] = data
        # A repeated reply must not lead to a second layout.
        if len(now.frozen) < len(self._servers) or now.laid_out:
            return []
        # The coordinator's own shard has replied as well, so it is frozen and its facts are set.
        now.lay_out()
        merged: Table = {}
        # After a failure the layout is sent all the same, so that every shard replies and drops its frozen state.
        if own is not None and not now.why:
            known = own.parameters
            try:
                merged = merge((from_rows(reply.get("rows"), known) for reply in now.frozen.values()), known)
            except StateError as error:
                now.fail(str(error))
        rows = to_rows(merged)
        now.facts["optimizer"] = rows
        for reply in now.frozen.values() if self._others else ():
            now.add_facts(reply.get("facts"))
        # An epoch that every group has left is read to its end, and manifests stop listing it.
        self.position.close(min((epoch for _, epoch in now.facts.get("reads", ())), default=0))
        now.facts["closed"] = self.position.closed
        layout = {"rows": rows, "error": now.why, "closed": self.position.closed}
        return [(server, part) for server in self._near for part in snapshot_parts(now.number, LAYOUT, layout)]

    def _end_if_failed(self, now: _UnderWay) -> None:
        # A host that still writes would leave files behind, so all hosts reply before the snapshot is dropped.
        if now.why and len(now.written) == len(self._servers):
            self._drop(now, now.why)

    def _drop(self, now: _UnderWay, why: str) -> None:
        self._now = None
        self._host.execute(DropSnapshot(now.number, why))

    def refuse(self, why: str) -> None:
        """Tell the host why no snapshot can be taken now."""
        self._host.execute(DropSnapshot(0, why))

    # --- the states of the workers -------------------------------------------------------------------------------

    def ended(self) -> set[tuple[int, int]]:
        """Workers of other server groups that had ended their scripts, as (group, index)."""
        return set() if self._now is None else {tuple(each) for each in self._now.facts.get("ended", ())}

    @property
    def _waiting(self) -> _UnderWay | None:
        """The snapshot that waits for nothing but states of workers."""
        now = self._now
        written = now is not None and not now.publishing and len(now.written) == len(self._servers)
        return now if written else None

    def proceed(self, workers: WorkerStates) -> None:
        """Publish the snapshot if it waits for workers, and all their states are here."""
        now = self._waiting
        if now is not None and workers.expected <= workers.present.keys():
            self._publish(now, workers.present, workers.counts, exact=True)

    def stop_waiting(self, workers: WorkerStates) -> None:
        """The next snapshot is due: publish this one with older states, or drop it."""
        now = self._waiting
        missing = set() if now is None else workers.expected - workers.present.keys()
        if now is None or not missing:
            return
        # Where groups go on by themselves, a state from the begin of an epoch is as good.
        if self._apart and missing <= workers.older.keys():
            older = {worker: workers.older[worker] for worker in missing}
            self._publish(now, {**workers.present, **older}, workers.counts, exact=False)
        else:
            # Within a synchronous group all states belong to one step, and an older one would not fit.
            self._drop(now, "the state of " + ", ".join(map(str, sorted(missing))) + " never came")

    def abandon(self, group: int, workers: WorkerStates, worker: Address | None = None) -> str:
        """Drop a snapshot that waits for a restarted worker. Returns its reason, or "".

        worker: the only one that restarts. Its group goes on.
        """
        now = self._now
        # Several groups have older states. Before the shard is frozen, the new workers leave the state themselves,
        # unless their group goes on without them.
        if now is None or self._apart or not (now.facts or worker):
            return ""
        lost = [w for w in workers.expected - workers.present.keys() if w.group == group]
        missing = sorted(w for w in lost if worker in (None, w))
        if not missing:
            return ""
        return self.fail(f"{', '.join(map(str, missing))} had to start again")

    def fail(self, why: str) -> str:
        """Drop the snapshot that is under way. Returns its reason, or "" if there is none."""
        now = self._now
        # The manifest may be ordered already, with the states that it needs.
        if now is None or now.publishing:
            return ""
        now.fail(why)
        self._end_if_failed(now)
        return now.reason

    def _publish(
        self, now: _UnderWay, states: Mapping[Address, torch.Tensor], counts: Mapping[int, int], exact: bool
    ) -> None:
        """Order the manifest. counts: of the streams now. exact: no state is older."""
        now.publish()
        # Epochs of which something was applied after the freeze: workers read there now.
        since = [stream >> 32 for stream, count in counts.items() if count > now.counts.get(stream, 0)]
        # The epoch that each group read at the freeze, or an earlier one.
        reading = dict(now.facts.get("reading", ())).values()
        # The batches that other server groups have applied since are not known here.
        if self._others:
            since, exact = list(reading), False
        elif len(reading) > 1 and (self.position.late or any(stream & STATIC for stream in counts)):
            # No group waits at the end of an epoch for one that still reads its part of it, has batches of it that do
            # not count yet, or has died.
            since += reading
        first = min(since, default=None)
        applied = self.position.applied(now.counts)
        if first is not None and exact and not self._late:
            # A worker with an older state reads its epoch again, and needs the list of its batches.
            self.position.close(first)
        facts = {**now.facts, "first_epoch": first, "epochs": [[e, list(map(list, r))] for e, r in applied.items()]}
        written = tuple(now.written[server] for server in self._servers)
        self._host.execute(PublishSnapshot(now.number, now.reason, facts, written, dict(states)))

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        now = None if self._now is None else field_values(self._now)
        return {"next": self.next, "now": now, "position": self.position.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.next, now = state["next"], state["now"]
        self._now = None if now is None else _UnderWay(*now)
        self.position.load_state_dict(state["position"])


class SnapshotSchedule(DeclaredState):
    """When a snapshot is taken: after seconds, after steps, or before the end.

    Args:
        coordinator: takes the snapshots.
        interval, steps: of the first worker group: the steps to take one behind, and the steps done.
    """

    STATE = ("_begun", "_due", "_timed", "_ends")

    def __init__(self, coordinator: SnapshotCoordinator, interval: StepInterval, steps: int) -> None:
        self._coordinator, self._interval = coordinator, interval
        # Of the snapshots by steps: how many were begun, and were due. A resumed job has had those before its step.
        self._begun = self._due = interval.passed(steps)
        self._timed = 0  # the snapshot that was under way when the last one by time was requested
        self._ends = False

    def request(self, workers: WorkerStates) -> int:
        """Seconds have passed. Returns the number of the snapshot that begins, or 0."""
        coordinator = self._coordinator
        if not coordinator.has_host:
            return 0
        # It was under way at the last request already, so it has had a whole interval.
        if coordinator.number and coordinator.number == self._timed:
            coordinator.stop_waiting(workers)
        number = coordinator.begin()
        self._timed = coordinator.number
        return number

    def request_last(self) -> None:
        """The job is to end: take one more snapshot, behind the next step."""
        self._ends = True

    def _count(self, steps: int) -> int:
        """The snapshots due by this step of the first worker group (0: another group's)."""
        return self._interval.passed(steps) if steps else self._begun

    def is_due(self, steps: int) -> bool:
        """Whether a snapshot is due behind the step that is decided next (see `_count`)."""
        return self._coordinator.has_host and (self._ends or self._count(steps) > self._begun)

    def is_late(self, steps: int) -> bool:
        """Whether another snapshot is under way, and two more are due (once for each)."""
        late = self._coordinator.number > 0 and self._count(steps) > self._due + 1
        if late:
            # Once per interval: a snapshot that waits for a disk is not given up, and asking again changes nothing.
            self._due = self._count(steps)
        return late

    def begin(self, steps: int) -> int:
        """Begin the due snapshot. Returns its number, or 0 while another is under way."""
        # `_begun` stays, so this one is still due behind the next step.
        if self._coordinator.number:
            return 0
        why, self._ends = END if self._ends else STEP, False
        # Several intervals that passed meanwhile make one snapshot.
        self._begun = self._due = self._count(steps)
        return self._coordinator.begin(why)

    def restart(self, group: int, workers: WorkerStates, worker: Address | None = None) -> None:
        """The workers of a group have restarted, or only this one."""
        # The launcher still waits for the last snapshot: it is taken again, behind their first step.
        self._ends = self._coordinator.abandon(group, workers, worker) == END or self._ends

    def take_again(self, why: str) -> None:
        """The snapshot that is under way is not the moment that it should be."""
        reason = self._coordinator.fail(why)
        self._ends = reason == END or self._ends
        if reason == STEP:
            self._begun -= 1
