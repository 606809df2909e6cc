"""Snapshots as an extension of a server: when one is due, what the server freezes, and what a manifest says of it.

`server_snapshots` is the server's part of the protocol between shards and hosts; this module connects it with the
steps, the worker groups and the other server groups of a `Server`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import SNAPSHOT
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import StartPoint
from topotrain.core.server.server_extension import (
    ExchangeExtension,
    Outbox,
    ServerExtension,
    StepResult,
    makes_partial_steps,
)
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots, WorkerStates, takes_snapshots, unread
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotParticipant, SnapshotSource, restore
from topotrain.extensions.checkpointing.snapshot_coordinator import CUT
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart, SnapshotRequest
from topotrain.training.data.data_messages import Lease

_MAX_HELD = 1 << 14


class SnapshotStart(StartPoint):
    """A job that starts with a snapshot of an earlier run."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self.first_epoch = unread(source)
        self.samples, self.clocks, self.version = source.samples, source.clocks, source.version

    def restore(self, model: ParameterShard, shard: int) -> None:
        """As `StartPoint.restore`."""
        restore(model, self._source, shard)


class CheckpointExtension(ExchangeExtension):
    """The snapshots of one server.

    Args:
        server: the server.
        job, topology: its job.
        source: the snapshot that the job started with.
        others: the other extensions of the server; a `SnapshotParticipant` has a part of its own in each snapshot.
    """

    messages = (SnapshotRequest, SnapshotPart, Remainder)
    observes = (Lease,)
    decrees = (SNAPSHOT,)

    def __init__(
        self,
        server: Server,
        job: Job,
        topology: Topology,
        source: SnapshotSource | None = None,
        others: Sequence[ServerExtension] = (),
    ) -> None:
        self._server = server
        self._synced = topology.synced
        self._apart = makes_partial_steps(job)
        participants = [each for each in others if isinstance(each, SnapshotParticipant)]
        self.snapshots = ServerSnapshots(server.me, job, topology, source, server.queue.send, participants)
        self._ahead: list[tuple[Address, m.Message]] = []  # of other groups, which have frozen before this one
        if takes_snapshots(job, topology):
            server.steps.batches.keep_until_closed()

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Memory for the body of a Remainder."""
        model = self._server.state.model
        if not isinstance(message, Remainder):
            return super().place(sender, message, viewable)
        if model is None or viewable:
            return None
        return model.flats.view(f"from {sender.group}", model.bucket(message.bucket))

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        """The host asks for a snapshot, or a server sends its part of one."""
        if isinstance(message, Remainder):
            body = self._server.state.known.body(message)
            if not self.take_exchange(sender, message, body):
                self.snapshots.remainder(sender.group, message, body)
        elif isinstance(message, SnapshotPart):
            self._receive_part(sender, message)
        elif isinstance(message, SnapshotRequest) and message.last:
            self._end()
        elif (
            not self.snapshots.unkept
            and self._server.state.complete
            and (self._server.state.common or not self._synced)
        ):
            self._announce(self.snapshots.begin(self._states()))
        return ()

    def _end(self) -> None:
        """The job is to end, behind one more snapshot. A job whose scripts have ended does so by itself."""
        snapshots = self.snapshots
        if snapshots.unkept:
            snapshots.cannot(snapshots.unkept)
        elif not self._server.state.common or not any(snapshots.steps.values()):
            snapshots.cannot("no step was taken yet")
        elif self._server.running:
            snapshots.end()

    def _receive_part(self, sender: Address, message: SnapshotPart) -> None:
        if sender.role is not Role.SERVER:
            raise m.ProtocolError(f"{sender} has no part in a snapshot")
        if message.stage == CUT:
            self._server.decisions.decree(self._server.groups[0], message.number, SNAPSHOT)
            return
        self.snapshots.take(sender, message)
        self._proceed()

    def on_sent(self, to: Address, message: m.Message) -> None:
        """A worker is given batches."""
        if isinstance(message, Lease):
            self.snapshots.leased(message)

    def on_handled(self, extension: ServerExtension) -> None:
        """A worker may have left its state with another extension."""
        if self.snapshots.has_states_from(extension):
            self._proceed()

    # --- when ----------------------------------------------------------------------------------------------------

    def before_decision(self, group: int) -> None:
        """A snapshot may be wanted behind the step that is about to be decided."""
        if self.snapshots.wanted(group) and not self.snapshots.unkept:
            self._announce(self.snapshots.before(group, self._states))

    def _announce(self, number: int) -> None:
        if not number:
            return
        self._server.decisions.decree(self._server.groups[0], number, SNAPSHOT)
        if self.snapshots.book is not None:
            self._server.queue.send_all(self.snapshots.book.cut(number))

    def on_decree(self, decision: m.StepDecision) -> Outbox:
        """All shards take a snapshot behind their next step."""
        self.snapshots.announce(decision.step)
        self._freeze_without_steps()
        return ()

    def _proceed(self) -> None:
        """Something has come that a snapshot may have waited for."""
        if self.snapshots.under_way:
            self.snapshots.go_on(self._states())
        else:
            self.snapshots.forget_states()

    def on_finish(self, worker: Address) -> None:
        """A worker whose script has ended leaves no state any more."""
        self._proceed()

    def group_over(self, group: int) -> Outbox:
        """The workers of the group leave no state any more."""
        self._proceed()
        return ()

    def reset_group(self, group: int, ended: bool) -> None:
        """As `ServerExtension.reset_group`."""
        if self.snapshots.under_way:
            self.snapshots.bereft(group, self._states())

    def snapshot_under_way(self) -> int:
        """As `ServerExtension.snapshot_under_way`."""
        return self.snapshots.under_way

    # --- behind a step -------------------------------------------------------------------------------------------

    def amend_reply(self, group: int, applied: m.Applied, first: m.Commit) -> m.Applied:
        """The workers of a step learn of the snapshot behind it."""
        number = self.snapshots.step(group, max(first.marks[::3], default=0) >> 32)
        return replace(applied, snapshot=number) if number else applied

    def step_over(self, result: StepResult) -> Outbox:
        """If a snapshot is due, this is the moment."""
        self._server.steps.batches.close(self.snapshots.closed)
        self._freeze()
        return ()

    def on_drain(self) -> None:
        """As `ExchangeExtension.on_drain`."""
        self._freeze_without_steps()

    def _freeze(self) -> None:
        if not self.snapshots.due:
            return
        self.snapshots.freeze(self._server.state.known, self._facts(), self._server.steps.batches.counts())
        # What other groups have sent behind their snapshots was waiting for this one.
        self._server.queue.handle_later(self._ahead)
        self._ahead = []

    def _freeze_without_steps(self) -> None:
        """A group of several in which no worker trains any more takes no step behind which it could freeze."""
        if self._server.state.model is not None and not self._server.worker_groups.any_runs:
            self.snapshots.rest()
            self._freeze()

    # --- several server groups -----------------------------------------------------------------------------------

    def take_exchange(self, sender: Address, message: m.Message, body: torch.Tensor) -> bool:
        """Keep what was sent behind a snapshot that is still to come here."""
        early = self.snapshots.early(message)
        if early:
            if len(self._ahead) >= _MAX_HELD:
                raise m.ProtocolError(f"{sender} is far ahead of a snapshot that {self._server.me} does not know")
            self._ahead.append((sender, replace(message, body=body.clone())))
        return early

    def exchanged(self, message: m.Message, body: torch.Tensor) -> None:
        """As `ExchangeExtension.exchanged`."""
        if self.snapshots.gathers and isinstance(message, m.Delta):
            self.snapshots.late(message, body)

    def amend_exchange(self, message: m.Message) -> m.Message:
        """What is added to a master says behind which snapshot."""
        return replace(message, cut=self.snapshots.cut) if isinstance(message, m.Delta) else message

    # --- what the server knows -----------------------------------------------------------------------------------

    def _states(self) -> WorkerStates:
        """What is known here of the workers' states."""
        server, groups = self._server, self._server.worker_groups
        begun, taken = self.snapshots.states()
        here = [worker for worker in begun if worker.group in groups.groups and not groups.is_away(worker)]
        expected = {worker for worker in here if not server.has_finished(worker)}
        if self._synced and self.snapshots.book is not None:
            ended = self.snapshots.book.ended()
            others = (worker for worker in begun if worker.group not in groups.groups)
            expected |= {worker for worker in others if (worker.group, worker.index) not in ended}
        return WorkerStates(expected, taken, begun, server.steps.batches.counts())

    def _facts(self) -> dict[str, Any]:
        """What a manifest says of this moment."""
        server, groups = self._server, self._server.worker_groups
        clocks = {group: groups.clocks.clock(group) for group in groups.groups}
        facts: dict[str, Any] = {
            "version": server.state.version,
            "model": server.state.known.schema.text(),
            "reads": [[group, epoch] for group, epoch in self._reads().items()],
            "samples": [[who.group, who.index, count] for who, count in sorted(server.samples.items())],
        }
        if self._synced:
            facts["ended"] = [[g, index] for g in groups.groups for index in sorted(groups.finished(g))]
        hyper = {group: text.decode() for group, text in server.steps.hyper.items()}
        return {**facts, "clocks": sorted(clocks.items()), "hyper": sorted(hyper.items())}

    def _reads(self) -> Mapping[int, int]:
        """The epoch that each group reads; where workers read apart, the first of its workers'."""
        groups, reads = self._server.worker_groups, self._server.steps.batches.reads
        found = {}
        for group, workers in groups.workers.items():
            if not groups.is_away(workers[0]):
                found[group] = min(map(reads, range(len(workers)) if self._apart else (group,)))
        return found

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State | None:
        """As `ServerExtension.state_dict`."""
        snapshots = self.snapshots.state_dict()
        return None if snapshots is None else {"snapshots": snapshots, "ahead": self._ahead}

    def load_state_dict(self, state: State) -> None:
        """As `ServerExtension.load_state_dict`."""
        self.snapshots.load_state_dict(state["snapshots"])
        self._ahead = list(state["ahead"])


def snapshots_of(server: Server) -> ServerSnapshots:
    """A server's part of snapshots. Raises LookupError if it has no `CheckpointExtension`."""
    return server.extension(CheckpointExtension).snapshots
