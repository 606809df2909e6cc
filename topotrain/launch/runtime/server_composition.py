"""The extensions of a server: the only place that names them.

The core knows none of them (see `core.server.server_extension`). Their order here is the order in which a server asks
them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from topotrain.config.job import Agreement, Compression, Job, Merge
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.model.schema import BufferMemory
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ServerExtension, makes_partial_steps
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
from topotrain.extensions.elastic.eligibility import absent_groups, in_place_refusal, singly

if TYPE_CHECKING:
    from topotrain.extensions.decision_record.server_order import ServerOrder


def make_server(
    me: Address,
    job: Job,
    topology: Topology,
    memory: BufferMemory,
    shared: bool = False,
    sender: MessageSender | None = None,
    resumed: SnapshotSource | None = None,
    order: "ServerOrder | None" = None,
) -> Server:
    """Return the server at an address with all extensions that the job asks for.

    The arguments are those of `Server`; resumed: the snapshot that the job starts with. order: records the order of its
    decisions, or has it. None: neither.
    """
    start = None
    if resumed is not None:
        from topotrain.extensions.checkpointing.checkpoint_extension import SnapshotStart

        start = SnapshotStart(resumed)
    make = Server if order is None else order.make
    server = make(me, job, topology, memory, shared, sender, start)
    server.attach(server_extensions(server, job, topology, memory, resumed))
    return server


def server_extensions(
    server: Server, job: Job, topology: Topology, memory: BufferMemory, resumed: SnapshotSource | None = None
) -> tuple[ServerExtension, ...]:
    """Return the extensions of a server, in order."""
    found = list(_extensions(server, job, topology, memory, resumed))
    in_place = [group for group in server.groups if not in_place_refusal(job, topology, group)]
    if in_place:
        from topotrain.extensions.in_place_recovery.group_members import GroupMembers

        found.append(GroupMembers(server, topology, in_place, server.shared))
    from topotrain.extensions.checkpointing.checkpoint_extension import CheckpointExtension
    from topotrain.extensions.elastic.group_departure import GroupDeparture
    from topotrain.extensions.elastic.membership import GroupRestarts

    restarts = GroupRestarts(server, job, topology)
    found += [restarts, GroupDeparture(server, restarts)]
    # The last one, so that it freezes what the others have of a step.
    checkpoints = CheckpointExtension(server, job, topology, resumed, found)
    found += [checkpoints] if checkpoints.cut is None else [checkpoints, checkpoints.cut]
    return tuple(found)


def _extensions(
    server: Server, job: Job, topology: Topology, memory: BufferMemory, resumed: SnapshotSource | None
) -> Iterator[ServerExtension]:
    me = server.me
    if makes_partial_steps(job):
        from topotrain.extensions.backup_workers.quorum import BackupWorkers

        yield BackupWorkers(server, job, topology)
    if job.cluster.outer is not None:
        from topotrain.extensions.outer_optimizer.grace.grace_window import has_windows
        from topotrain.extensions.outer_optimizer.grace.round_windows import RoundWindows
        from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds
        from topotrain.extensions.outer_optimizer.radial.radial_rounds import RadialRounds

        windows = RoundWindows(server, job.cluster) if has_windows(job.cluster) else None
        rounds = OuterRounds if job.cluster.merge is Merge.kMean else RadialRounds
        yield rounds(server, job, windows, () if resumed is None else resumed.rounds)
        if windows is not None:
            yield windows
        if me.index == 0:
            from topotrain.extensions.inner_state.inner_state_transfers import InnerStateTransfers
            from topotrain.extensions.outer_optimizer.round_turns import RoundTurns

            yield RoundTurns(server, job)
            yield InnerStateTransfers(server)
    if topology.synced and job.cluster.agreement in (Agreement.kElastic, Agreement.kGossip):
        from topotrain.extensions.group_averaging.group_averaging import GroupAveraging

        yield GroupAveraging(server, job, topology)
    if topology.server_collective:
        from topotrain.extensions.collectives.collective_server import CollectiveServer

        yield CollectiveServer(server, job, topology, memory)
    elif topology.torch_collective:
        from topotrain.extensions.collectives.collective_server import TorchCollectiveServer

        yield TorchCollectiveServer()
    else:
        from topotrain.extensions.host_sums.host_sum_server import HostSumServer
        from topotrain.extensions.host_sums.host_units import used_units
        from topotrain.extensions.host_sums.sum_writer import HostSumSettings

        units = [unit for group in server.groups for unit in used_units(job, topology, group)]
        away = [unit for unit in units if me.index in unit.shards]
        if away:
            yield HostSumServer(server, away, HostSumSettings.of(job).replaces)
    if job.cluster.compression is not Compression.kNone:
        from topotrain.extensions.compression.compression_server import CompressionServer

        yield CompressionServer(job.cluster)
    from topotrain.extensions.assignment.assignment_server import AssignmentServer
    from topotrain.extensions.drift.drift_server import DriftServer
    from topotrain.extensions.tables.table_server import TableServer

    yield TableServer(me, job, topology, resumed)
    yield AssignmentServer(server)
    yield DriftServer(server)
    if me == (Role.SERVER, 0, 0):
        from topotrain.extensions.resume.worker_state_store import WorkerStateStore
        from topotrain.extensions.worker_values.value_server import ValueServer
        from topotrain.training.data.lease_queue import LeaseQueue

        # One queue for the whole job: a batch must not be handed out twice.
        yield LeaseQueue(topology.worker_groups, topology.workers_per_group, singly=singly(job))
        yield WorkerStateStore()
        yield ValueServer(server, topology, absent_groups(job, topology))
