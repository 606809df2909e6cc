"""The snapshots of one shard: announced, frozen, and written by its host."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Apply, Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.optim.state_table import StateError, from_rows, to_rows
from topotrain.core.protocol import ProtocolError
from topotrain.core.server.component_state import State
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.server_context import MessageQueue
from topotrain.extensions.checkpointing.data_position import DataPosition
from topotrain.extensions.checkpointing.group_cut import GroupCut
from topotrain.extensions.checkpointing.shard_snapshot import (
    FrozenShard,
    ShardFreezer,
    SnapshotParticipant,
    SnapshotSource,
    unread,
)
from topotrain.extensions.checkpointing.snapshot_coordinator import SnapshotCoordinator, SnapshotHost, WriteSnapshot
from topotrain.extensions.checkpointing.snapshot_messages import (
    CUT,
    FROZEN,
    LAYOUT,
    PUBLISHED,
    WRITTEN,
    SnapshotPart,
    TextParts,
    snapshot_parts,
)


def refusal(job: Job, topology: Topology) -> str:
    """Why no snapshot can be taken of a job. Empty: they can."""
    if topology.server_groups > 1 and not topology.synced:
        return "its groups go their own ways"
    if job.apply is Apply.kOnArrival and topology.worker_groups > 1:
        return "with apply: kOnArrival parts of other groups' steps are in the values at any moment"
    return ""


def takes_snapshots(job: Job, topology: Topology) -> bool:
    """Whether snapshots are taken: the user wants them, and the layout allows them."""
    return wants_snapshots(job) and not refusal(job, topology)


class ServerSnapshots:
    """The snapshots of one shard.

    Args:
        me, job, topology: the server.
        source: the snapshot that the job resumes from, if any.
        participants: extensions of the server that have a part of their own in every snapshot.
        cut: what other server groups add, where there are some.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        source: SnapshotSource | None,
        queue: MessageQueue,
        participants: Sequence[SnapshotParticipant] = (),
        cut: GroupCut | None = None,
    ) -> None:
        self._me, self._queue, self._participants, self._cut = me, queue, participants, cut
        self.refusal = refusal(job, topology)
        groups = topology.worker_groups_of(me.group)
        self._servers = topology.servers(me.group)
        together = range(topology.server_groups) if topology.synced else (me.group,)
        shards = tuple(server for group in together for server in topology.servers(group))
        # Shards send to the first one of their group, and these to the coordinator.
        self._receiver = shards[0] if me.index == 0 else self._servers[0]
        # Groups that go on by themselves have workers in different steps when the shard freezes.
        apart = len(groups) > 1 or topology.synced
        position = DataPosition.of(job, topology, source)
        late = job.cluster.outer is not None or job.cluster.n_push > 1
        self.coordinator = SnapshotCoordinator(shards, position, apart, late) if me == shards[0] else None
        """On the first shard of the job."""
        self.closed = position.closed
        """Snapshots do not list the batches of epochs before this one any more, since all of them are applied."""
        self.steps = {group: 0 if source is None else source.steps(group) for group in groups}
        # A group that has taken no step yet may have read everything before this epoch.
        self._reading = dict.fromkeys(groups, 0 if source is None else unread(source))
        self._host: SnapshotHost | None = None
        self._texts = TextParts()
        self._freezer: ShardFreezer | None = None
        self._frozen: dict[int, FrozenShard] = {}  # until its layout is known
        self._announced = self._due = self._last = self._laid_out = self._written = 0
        self._unsent: dict[int, int] = {}  # worker group -> the snapshot of which its workers are to be told

    def attach_host(self, host: SnapshotHost, first: int = 1) -> None:
        """From here on snapshots may be taken, from number `first` on."""
        self._host = host
        if self.coordinator is not None:
            self.coordinator.attach_host(host, first)

    @property
    def writing(self) -> bool:
        """Whether a snapshot is being written, which the end of the job waits for."""
        # The shards of several groups reply over the first ones of their groups, which may have ended.
        if self._cut is not None or self._host is None:
            return False
        return self._last > self._written or (self.coordinator is not None and self.coordinator.writing)

    def replace_host(self, host: SnapshotHost) -> None:
        self._host = host
        if self.coordinator is not None:
            self.coordinator.attach_host(host)

    def failed_replies(self) -> list[SnapshotPart]:
        """The replies in the place of a host that has died: its orders have failed."""
        error = {"error": f"the process of {self._me} has died"}
        # Without them the coordinator would wait for ever, and take no later snapshot.
        replies = snapshot_parts(self._laid_out, WRITTEN, error) if self._laid_out else []
        if self.coordinator is not None and self.coordinator.publishing:
            replies += snapshot_parts(self.coordinator.number, PUBLISHED, error)
        return replies

    @property
    def obstacle(self) -> str:
        """Why a participant cannot be in a snapshot now. Empty: all can."""
        return next((each.snapshot_obstacle for each in self._participants if each.snapshot_obstacle), "")

    # --- from the announcement to the frozen shard ---------------------------------------------------------------

    def announce(self, number: int) -> None:
        """The log of decisions has a snapshot behind the next step."""
        # An announcement may be repeated, and a freeze happens once.
        if number > max(self._last, self._due):
            self._announced = number

    def count_step(self, group: int, epoch: int = 0) -> int:
        """A step is done. Returns the snapshot at which its workers leave states, or 0."""
        self.steps[group] += 1
        # A step may have no batches of a loader, and then no epoch.
        self._reading[group] = max(epoch, self._reading[group])
        if self._announced:
            self._due, self._announced = self._announced, 0
            # Each worker group learns it with the reply to its own next step.
            self._unsent = dict.fromkeys(self.steps, self._due)
        return self._unsent.pop(group, 0)

    def end_steps(self) -> None:
        """No step will follow, so an announced snapshot is due."""
        # With one server group the job is at its end, which needs no snapshot.
        if self._cut is not None and self._announced:
            self._due, self._announced = self._announced, 0

    def waits_for_batch(self, several: bool) -> bool:
        """Whether a snapshot is due before the next step that has a batch of its own.

        several: the job has several optimizers, so the script makes several steps with a batch.
        """
        # Groups that go on by themselves are in the middle of different batches.
        return self._due > 0 and several and len(self.steps) == 1 and self._cut is None

    @property
    def due(self) -> int:
        """The snapshot for which this shard has to freeze now. 0: none."""
        return self._due

    def put_off(self) -> None:
        """The snapshot that is due comes behind the next step instead."""
        if self._due:
            self._announced, self._due = self._due, 0

    def freeze(self, model: ParameterShard, facts: Mapping[str, Any], counts: Mapping[int, int]) -> None:
        """Freeze the shard. facts: entries of the manifest. counts: of the data streams."""
        number, self._due = self._due, 0
        self._last = number
        if self._cut is not None:
            # Also if freezing fails below: the masters in other groups wait for these messages.
            self._cut.send_remainders(number)
        if self._host is None:
            # All shards reply, so that the coordinator can drop the snapshot.
            self._send(number, FROZEN, {"error": f"{self._me} writes no snapshots"})
            return
        facts = {**facts, "steps": sorted(self.steps.items()), "reading": sorted(self._reading.items())}
        for participant in self._participants:
            facts |= participant.facts()
        reply: dict[str, Any] = {}
        # Before the shard's own FROZEN, because the coordinator completes these facts with those of other groups.
        if self.coordinator is not None:
            self.coordinator.set_facts(number, facts, dict(counts))
        # The first shard of each other group sends its facts with FROZEN. Other shards know nothing more.
        elif self._me.index == 0:
            reply = {"facts": {**facts, "counts": sorted(counts.items())}}
        if self._freezer is None:
            self._freezer = ShardFreezer(model, self._me.index, self._me.group if self._cut is not None else None)
        try:
            frozen = self._freezer.freeze()
            for participant in self._participants:
                frozen = participant.freeze(frozen)
        except StateError as error:
            self._send(number, FROZEN, {"error": str(error)})
            return
        # An earlier frozen shard is forgotten: this one is in the same memory.
        self._frozen = {number: frozen}
        if self._cut is None:
            self._send(number, FROZEN, {"rows": to_rows(frozen.table)})
        else:
            report = snapshot_parts(number, FROZEN, {"rows": to_rows(frozen.table), **reply}, self._me.index)
            # FROZEN is sent when the changes under way are in the frozen values.
            self._cut.begin(frozen, [(self._receiver, part) for part in report])

    # --- texts of the other shards, and of the hosts -------------------------------------------------------------

    def _send(self, number: int, stage: int, data: Mapping[str, Any]) -> None:
        if stage == WRITTEN:
            self._written = number
        for part in snapshot_parts(number, stage, data, self._me.index):
            self._queue.send(self._receiver, part)

    def receive(self, sender: Address, message: SnapshotPart) -> None:
        """Handle a text of another server, or of the host in its server's name."""
        if sender == self._me:
            # A host does not set the shard, which the coordinator needs if the text is forwarded.
            message = replace(message, shard=self._me.index)
            if message.stage == WRITTEN and message.part == message.parts - 1:
                self._written = message.number
        down = message.stage in (LAYOUT, CUT)
        # Replies go up, from the shards of a group over its first shard to the coordinator.
        if not down and self.coordinator is None:
            self._queue.send(self._receiver, message)
            return
        if not down and sender.group != self._me.group:
            # Forwarded by the first shard of another group. The text names the shard that it is from.
            sender = self._shard_of(sender.group, message.shard)
        if message.stage == LAYOUT and self._me.index == 0 and self.coordinator is None:
            # The coordinator sends LAYOUT to the first shard of each other group, which passes it on.
            self._queue.send_each(self._servers[1:], message)
        data = self._texts.add(sender, message)
        if data is None:
            return
        if message.stage == LAYOUT:
            self._write(message.number, data)
        elif self.coordinator is not None:
            own = self._frozen.get(message.number)
            self._queue.send_all(self.coordinator.receive(sender, message.number, message.stage, data, own))

    def _shard_of(self, group: int, shard: int) -> Address:
        if not 0 <= shard < len(self._servers):
            raise ProtocolError(f"no shard {shard} of server group {group}")
        return Address(Role.SERVER, group, shard)

    def _write(self, number: int, layout: Mapping[str, Any]) -> None:
        """Have the host write the frozen shard: the place of each element is known."""
        if number <= self._laid_out:
            # Repeated by the transport, or by a standby. The frozen shard is given away, so this would report an error.
            return
        self._laid_out = number
        # All shards take this from the same layout, so they forget the counts of the same epochs.
        self.closed = max(self.closed, int(layout.get("closed", 0)))
        frozen = self._frozen.pop(number, None)
        if frozen is None or layout.get("error"):
            # A reply also after a failure: the coordinator waits for all shards before it drops the snapshot.
            self._send(number, WRITTEN, {"error": layout.get("error") or f"{self._me} had frozen nothing"})
            return
        try:
            table = from_rows(layout.get("rows"), frozen.parameters)
        except StateError as error:
            self._send(number, WRITTEN, {"error": str(error)})
            return
        if self._host is not None:
            self._host.execute(WriteSnapshot(number, self._me, frozen, table))

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State | None:
        """Return the state. None: a frozen shard waits for its layout."""
        if self._frozen:
            return None
        return {
            "last": self._last,
            "reading": self._reading,
            "closed": self.closed,
            "coordinator": None if self.coordinator is None else self.coordinator.state_dict(),
            "steps": self.steps,
            "texts": self._texts.state_dict(),
            "announced": self._announced,
            "due": self._due,
            "laid_out": self._laid_out,
            "unsent": self._unsent,
        }

    def load_state_dict(self, state: State) -> None:
        self._last, self.closed, self._laid_out = state["last"], state["closed"], state["laid_out"]
        self._reading, self.steps, self._unsent = dict(state["reading"]), dict(state["steps"]), dict(state["unsent"])
        self._texts.load_state_dict(state["texts"])
        if self.coordinator is not None:
            self.coordinator.load_state_dict(state["coordinator"])
        self._announced, self._due = state["announced"], state["due"]
