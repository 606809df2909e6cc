"""Snapshots as an extension of a server: when they are taken, and their manifests.

`server_snapshots` is the part of one shard, and `snapshot_coordinator` that of the coordinator. This module connects
both with the steps and the worker groups of a `Server`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from topotrain.config.intervals import StepInterval
from topotrain.config.job import Agreement, Job
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
    StepStartExtension,
    makes_partial_steps,
)
from topotrain.extensions.checkpointing.averaging_cut import AveragingCut
from topotrain.extensions.checkpointing.cross_group_cut import CrossGroupCut
from topotrain.extensions.checkpointing.freeze_moment import FreezeMoment
from topotrain.extensions.checkpointing.group_cut import GroupCut
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots, takes_snapshots
from topotrain.extensions.checkpointing.shard_snapshot import (
    SnapshotParticipant,
    SnapshotSource,
    ValueChanger,
    WorkerStateKeeper,
    restore,
    unread,
)
from topotrain.extensions.checkpointing.snapshot_coordinator import SnapshotSchedule, WorkerStates
from topotrain.extensions.checkpointing.snapshot_messages import CUT, SnapshotPart, SnapshotRequest
from topotrain.training.data.data_messages import Lease


class SnapshotStart(StartPoint):
    """A job that starts with a snapshot of an earlier run."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self.first_epoch = unread(source)
        self.samples, self.clocks, self.version = source.samples, source.clocks, source.version

    def restore(self, model: ParameterShard, shard: int) -> None:
        restore(model, self._source, shard)


class CheckpointExtension(ExchangeExtension, StepStartExtension):
    """The snapshots of one server.

    Args:
        server: the server.
        job, topology: its job.
        source: the snapshot that the job started with.
        others: the other extensions of the server. A `SnapshotParticipant` has a part of its own in each snapshot, and
            workers leave their states with a `WorkerStateKeeper`.
    """

    messages = (SnapshotRequest, SnapshotPart)
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
        # With backup workers each worker has data streams of its own, so epochs are counted by worker.
        self._apart = makes_partial_steps(job)
        self.cut = _cut(server, topology)
        """The extension for jobs with several server groups."""
        participants = [each for each in others if isinstance(each, SnapshotParticipant)]
        self._keepers = [each for each in others if isinstance(each, WorkerStateKeeper)]
        self.snapshots = ServerSnapshots(server.me, job, topology, source, server.queue, participants, self.cut)
        self._coordinator = coordinator = self.snapshots.coordinator
        self._listed = takes_snapshots(job, topology)
        self._schedule: SnapshotSchedule | None = None
        if coordinator is not None and not self.snapshots.refusal:
            steps = self.snapshots.steps[server.groups[0]]
            self._schedule = SnapshotSchedule(coordinator, StepInterval.of(job, "checkpoint"), steps)
        changers = [each for each in others if isinstance(each, ValueChanger)]
        self._moment = FreezeMoment(server, self.snapshots, changers, self._schedule, topology.synced)
        if self._listed:
            # A resumed job reads the rest of an epoch, so manifests list what is applied of it.
            server.steps.batches.keep_until_closed()

    # --- when ----------------------------------------------------------------------------------------------------

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        """The host requests a snapshot, or another server sends its part of one."""
        if isinstance(message, SnapshotPart):
            self._receive_part(sender, message)
        elif isinstance(message, SnapshotRequest) and message.last:
            self._request_last()
        # A request at an inconvenient moment is dropped: the host repeats it every `snapshot_s` seconds.
        elif self._schedule is not None and not self.snapshots.obstacle and self._has_start and not self._lacks_workers:
            self._announce(self._schedule.request(self._states()))
        return ()

    @property
    def _lacks_workers(self) -> bool:
        # A worker that comes back later has no state of the snapshot's step, by which its epoch could be drawn again.
        return any(extension.lacks_workers() for extension in self._server.hooks.lacks_workers)

    @property
    def _has_start(self) -> bool:
        state = self._server.state
        # Several groups have one model only after all of them took the values of group 0.
        return state.complete and (state.common or not self._synced)

    def _request_last(self) -> None:
        if self._coordinator is None:
            return
        if self.snapshots.obstacle:
            # The host waits for Saved or Unsaved, so a refusal needs a reply, too.
            self._coordinator.refuse(self.snapshots.obstacle)
        elif not self._server.state.common or not any(self.snapshots.steps.values()):
            self._coordinator.refuse("no step was taken yet")
        # Once all scripts have ended, the job ends by itself, with its final parameters.
        elif self._server.running and self._schedule is not None:
            self._schedule.request_last()

    def before_decision(self, group: int) -> None:
        """A snapshot may be due behind the step that is about to be decided."""
        schedule, coordinator = self._schedule, self._coordinator
        if schedule is None or coordinator is None:
            return
        # The schedule counts the steps of the first worker group.
        # The step that is about to be decided is not in `steps` yet.
        steps = self.snapshots.steps[group] + 1 if group == self._server.groups[0] else 0
        if not schedule.is_due(steps) or self.snapshots.obstacle or self._lacks_workers:
            return
        # A snapshot that waits for a worker alone ends now, so that the next one can begin.
        if schedule.is_late(steps):
            coordinator.stop_waiting(self._states())
        else:
            self._announce(schedule.begin(steps))

    def _announce(self, number: int) -> None:
        if number and self._coordinator is not None:
            # The number travels as the `step` of the decision, which the log delivers to all shards at the same place.
            self._server.decisions.decree(self._server.groups[0], number, SNAPSHOT)
            self._server.queue.send_all(self._coordinator.announce(number))

    def _receive_part(self, sender: Address, message: SnapshotPart) -> None:
        if sender.role is not Role.SERVER:
            raise m.ProtocolError(f"{sender} has no part in a snapshot")
        if message.stage == CUT:
            # Each group has a log of its own: its first shard repeats the announcement there.
            self._server.decisions.decree(self._server.groups[0], message.number, SNAPSHOT)
            return
        self.snapshots.receive(sender, message)
        self._proceed()

    def on_decree(self, decision: m.StepDecision) -> Outbox:
        """All shards take a snapshot behind their next step."""
        self.snapshots.announce(decision.step)
        # If no worker of this group trains any more, the next step never comes.
        self.on_drain()
        return ()

    # --- behind a step -------------------------------------------------------------------------------------------

    def amend_reply(self, group: int, applied: m.Applied, first: m.Commit) -> m.Applied:
        """The workers of a step learn of the snapshot behind it."""
        if not first.counts:
            return applied
        # `marks` are triples (stream, first, last). The upper half of a stream's number is its epoch.
        number = self.snapshots.count_step(group, max(first.marks[::3], default=0) >> 32)
        return replace(applied, snapshot=number) if number else applied

    def before_apply(self, group: int, first: m.Commit) -> None:
        # All shards have the same commit at the same place of the log, so they freeze at one moment.
        if self._moment.is_before(group, first):
            self._freeze()

    def step_over(self, result: StepResult) -> Outbox:
        """Freeze if a snapshot is due behind this step."""
        if result.counts:
            # All shards have `closed` from the same layout, so they forget the same epochs.
            self._server.steps.batches.close(self.snapshots.closed)
        # Before any later message is handled, so that all shards freeze the values of the same step.
        if self._moment.is_behind(result):
            self._freeze()
        return ()

    def on_drain(self) -> None:
        """Freeze if no worker trains here any more, so that no step follows."""
        # Other server groups still train, and their snapshot needs the buckets that this group masters.
        if self._server.state.model is not None and not self._server.worker_groups.any_runs:
            self.snapshots.end_steps()
            self._freeze()

    def _freeze(self) -> None:
        if not self.snapshots.due:
            return
        facts = _facts(self._server, self._synced, self._apart)
        self.snapshots.freeze(self._server.state.known, facts, self._server.steps.batches.counts())
        if self.cut is not None:
            # Changes from behind the other groups' freezes were held back. From here on they are not in this snapshot.
            self.cut.handle_early()

    # --- the states of the workers -------------------------------------------------------------------------------

    def on_sent(self, to: Address, message: m.Message) -> None:
        """A lease is sent to a worker."""
        if self._coordinator is None or not isinstance(message, Lease):
            return
        # Commits count batches from the lease's begin, and manifests list them by their place in the epoch.
        if self._listed and message.last > message.first:
            self._coordinator.position.add_lease(message.epoch, message.lease, message.first)

    def on_handled(self, extension: ServerExtension) -> None:
        """A worker may have left its state with another extension."""
        if extension in self._keepers:
            self._proceed()

    def on_finish(self, worker: Address, steps: int) -> None:
        """The worker leaves no state any more."""
        self._proceed()

    def group_over(self, group: int) -> Outbox:
        """The workers of the group leave no state any more."""
        self._proceed()
        return ()

    def _proceed(self) -> None:
        """Publish the snapshot if it waited only for the state of a worker."""
        if self._coordinator is None:
            return
        if self._coordinator.number:
            self._coordinator.proceed(self._states())
            return
        # No snapshot is under way, so states for past ones (dropped, or published without them) only take memory.
        for keeper in self._keepers:
            keeper.forget_snapshots(self._coordinator.next - 1)

    def reset_group(self, group: int, ended: bool) -> None:
        # The new processes do not know of a snapshot that has not been frozen yet.
        self.snapshots.put_off()
        # The new processes may not have the state that the snapshot waits for.
        if self._schedule is not None and self.requested_states():
            self._schedule.restart(group, self._states())

    def reset_worker(self, worker: Address) -> None:
        # With backup workers the new process leaves a state as good as that of the former one.
        if self._schedule is not None and self.requested_states() and not self._apart:
            self._schedule.restart(worker.group, self._states(), worker)

    def requested_states(self) -> int:
        """The snapshot that is under way."""
        return 0 if self._coordinator is None else self._coordinator.number

    def _states(self) -> WorkerStates:
        """The states of the workers that have arrived here."""
        server, groups, coordinator = self._server, self._server.worker_groups, self._coordinator
        older: dict[Address, Any] = {}
        present: dict[Address, Any] = {}
        for keeper in self._keepers:
            older.update(keeper.epoch_states())
            present.update(keeper.snapshot_states(0 if coordinator is None else coordinator.number))
        # The state at an epoch's begin announces that a worker will leave states at snapshots, too.
        here = [worker for worker in older if worker.group in groups.groups and not groups.is_away(worker)]
        # A finished worker sends nothing more: the snapshot must not wait for it.
        expected = {worker for worker in here if not server.has_finished(worker)}
        if self._synced and coordinator is not None:
            # Only the coordinators of the other groups know which of their workers had ended. Their facts say it.
            ended = coordinator.ended()
            others = (worker for worker in older if worker.group not in groups.groups)
            expected |= {worker for worker in others if (worker.group, worker.index) not in ended}
        return WorkerStates(expected, present, older, server.steps.batches.counts())

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State | None:
        snapshots = self.snapshots.state_dict()
        schedule = None if self._schedule is None else self._schedule.state_dict()
        if snapshots is None:
            return None
        return {"snapshots": snapshots, "schedule": schedule, "moment": self._moment.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.snapshots.load_state_dict(state["snapshots"])
        self._moment.load_state_dict(state["moment"])
        if self._schedule is not None:
            self._schedule.load_state_dict(state["schedule"])


def _cut(server: Server, topology: Topology) -> GroupCut | None:
    if not topology.synced:
        return None
    adds = topology.cluster.agreement is Agreement.kMaster
    return (CrossGroupCut if adds else AveragingCut)(server, topology.server_groups)


def snapshots_of(server: Server) -> ServerSnapshots:
    """A server's part of snapshots, or LookupError without `CheckpointExtension`."""
    return server.extension(CheckpointExtension).snapshots


def _facts(server: Server, synced: bool, apart: bool) -> dict[str, Any]:
    """Entries of the manifest. apart: each worker has data streams of its own."""
    groups = server.worker_groups
    clocks = {group: groups.clocks.clock(group) for group in groups.groups}
    facts: dict[str, Any] = {
        "version": server.state.version,
        "model": server.state.known.schema.text(),
        "reads": [[group, epoch] for group, epoch in _epochs(server, apart).items()],
        "samples": [[who.group, who.index, count] for who, count in sorted(server.steps.samples.items())],
    }
    if synced:
        facts["ended"] = [[g, index] for g in groups.groups for index in sorted(groups.finished(g))]
    hyper = {group: text.decode() for group, text in server.hyper.of_group.items()}
    return {**facts, "clocks": sorted(clocks.items()), "hyper": sorted(hyper.items())}


def _epochs(server: Server, apart: bool) -> Mapping[int, int]:
    """The epoch that each group reads, or the earliest one of its workers (`apart`)."""
    groups, reads = server.worker_groups, server.steps.batches.reads
    return {
        group: min(map(reads, range(len(workers)) if apart else (group,)))
        for group, workers in groups.workers.items()
        # A group that has left reads nothing, and must not keep its last epoch open for ever.
        if not groups.is_away(workers[0])
    }
