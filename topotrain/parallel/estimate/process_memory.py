"""The memory of the processes of a job.

Where workers split a model, it is an upper bound for every process, from the schema and a cost report. Each byte is
counted once, in the process to which it belongs, so the processes of a host can be added up. Only requested memory is
counted: memory that the allocator keeps after it was freed depends on the timing of threads. Where each worker has the
whole model, it is the training state of each worker and server. Its activations are not known.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from topotrain.config.job import Algorithm, Compression, Grads, Job, Keep, Schedule, Updater, UpdaterType
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address, Role, Topology, Unit
from topotrain.core.model.schema import slice_map_for
from topotrain.core.model.shared_windows import VALUES, buffer_of
from topotrain.extensions.checkpointing.server_snapshots import takes_snapshots
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domains
from topotrain.parallel.estimate.cost_report import CostReport
from topotrain.parallel.runtime.one_f_one_b import in_flight


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Bytes that a worker holds besides its parameters.

    Attributes:
        buffers: buffers of the model.
        activations: their maximum.
        messages: copies of values that wait in sockets.
        passed: all values that it sends in a step, for which shared memory has space.
    """

    buffers: int = 0
    activations: int = 0
    messages: int = 0
    passed: int = 0


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """Maximum memory of one process in bytes, without Python and torch themselves.

    Attributes:
        residents: the workers and servers in the process.
        values: parameters and the model's buffers.
        gradients: gradients of a step.
        exchange: data in flight: pushed gradients, sums, and copies for other server groups on servers; on a worker its
            local gradient, the group's mean that its script sees, sums of micro-batches, copies for other workers;
            the memory of a codec.
        state: optimizer state.
        activations: memory kept for the backward, and live memory beside it.
        snapshot: a server's copy of values and state, which a thread writes while the job continues. It is allocated at
            the first snapshot and kept.
        second: the replica of another server. On the host of its server it needs less, because it reads the
            contributions of workers in the server's memory. While a new replica is filled, both ends hold values and
            state of that server once more.
        shared: bytes of the above in memory that processes of the host share.
        passed: bytes of `shared` with values for other workers, which no server maps.
        seen: shared memory of other processes that this process maps.
        views: values that a worker maps once more, where no other process sees writes of its script.
        peers: connections, each with threads that read and write.
    """

    residents: tuple[Address, ...]
    unit: int = 0
    host: int = 0
    values: int = 0
    gradients: int = 0
    exchange: int = 0
    state: int = 0
    activations: int = 0
    snapshot: int = 0
    second: int = 0
    shared: int = 0
    passed: int = 0
    seen: int = 0
    views: int = 0
    peers: int = 0

    @property
    def who(self) -> str:
        """The residents in words."""
        first, last = self.residents[0], self.residents[-1]
        return " + ".join(map(str, self.residents)) if len(self.residents) < 3 else f"{first} … {last}"

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of its workers in their group."""
        return tuple(one.index for one in self.residents if one.role is Role.WORKER)

    @property
    def total(self) -> int:
        """All bytes that belong to the process."""
        parts = (self.values, self.gradients, self.exchange, self.state, self.activations, self.snapshot, self.second)
        return sum(parts)

    @property
    def private(self) -> int:
        """Bytes that RLIMIT_DATA counts: private memory, and the views of shared memory."""
        return self.total - self.shared + min(self.views, self.shared)

    @property
    def resident(self) -> int:
        """All bytes that the process maps."""
        return self.total + self.seen + self.views


def loads(costs: CostReport, schedule: Schedule) -> tuple[WorkerLoad, ...]:
    """Return the loads of all workers from a cost report."""
    return tuple(_load(costs, worker, schedule) for worker in range(costs.program.workers))


def _load(costs: CostReport, worker: int, schedule: Schedule) -> WorkerLoad:
    one, parts = costs.workers[worker], costs.microbatches
    # k1F1B keeps the activations of the micro-batches in flight, kGPipe those of all.
    flying = min(parts, in_flight(costs.program, worker)) if schedule is Schedule.k1F1B else parts
    largest = max((cost.made for cost in costs.steps[worker].values()), default=0)
    beside = max(one.peak - one.kept, 2 * largest)  # a backward has a gradient of its result and one of its input
    # The costs are those of a whole batch, so each micro-batch has its share of them.
    ahead, back = costs.sent(worker)
    waiting, passed = (_parts(size, parts) for size in (max(flying * ahead, back), flying * (ahead + back)))
    return WorkerLoad(one.buffers, _parts(flying * one.kept + beside, parts), waiting, passed)


def _parts(size: int, parts: int) -> int:
    return -(-size // parts)


def needs(
    job: Job, topology: Topology, parameters: Sequence[Parameter], state_factor: float, loaded: Sequence[WorkerLoad]
) -> tuple[ProcessNeed, ...]:
    """Return the memory that each process of the job will hold.

    Args:
        job: a job that splits its model, so gradients are hidden from the script.
        topology: with the hosts of its units, where they are known.
        parameters: the schema, with one entry per share of a parameter and its owners.
        state_factor: elements of optimizer state per element of a trained parameter.
        loaded: the load of each worker of a group.
    """
    slices = slice_map_for(parameters, topology)
    found = [
        _together(residents, unit, topology, [_need(job, topology, slices, state_factor, loaded, a) for a in residents])
        for unit in topology.units
        for residents in topology.processes(unit)
    ]
    return tuple(_seeing(need, found) for need in found)


def _together(
    residents: tuple[Address, ...], unit: Unit, topology: Topology, parts: Sequence[ProcessNeed]
) -> ProcessNeed:
    host = topology.hosts[unit.rank] if topology.hosts else 0
    sizes = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(ProcessNeed) if f.name not in _PLACE}
    return ProcessNeed(residents, unit.rank, host, **sizes)


_PLACE = ("residents", "unit", "host")


def _seeing(need: ProcessNeed, everybody: Iterable[ProcessNeed]) -> ProcessNeed:
    """Add the shared memory of other processes that a process maps."""
    # The limits of a process count it, and the total of a host must not: so it is in a field of its own. A server maps
    # the memory that its workers share. A worker maps values that other workers pass to it.
    if not need.shared:
        return need
    others = [one for one in everybody if one is not need and one.host == need.host]
    shown = sum(one.shared - one.passed for one in others) if len(need.workers) < len(need.residents) else need.seen
    passed = sum(one.passed for one in others) if need.workers else 0
    return replace(need, seen=shown + passed)


def _need(
    job: Job, topology: Topology, slices: SliceMap, state_factor: float, loaded: Sequence[WorkerLoad], who: Address
) -> ProcessNeed:
    if who.role is Role.WORKER:
        return _worker(job, topology, slices.parameters, loaded[who.index], who)
    return _server(job, topology, slices, state_factor, who)


def _worker(
    job: Job, topology: Topology, parameters: Sequence[Parameter], load: WorkerLoad, who: Address
) -> ProcessNeed:
    mine = [parameter for parameter in parameters if not parameter.owners or who.index in parameter.owners]
    held = sum(parameter.nbytes for parameter in mine)
    trained = [parameter.nbytes for parameter in mine if parameter.trainable]
    seeing = topology.sees_memory(who.group)
    moving = 2 * max(trained, default=0)  # autograd makes a gradient before it is put with the others
    moving += load.passed if seeing else load.messages
    if job.schedule is Schedule.k1F1B:
        moving += 2 * sum(trained)  # the sums so far, and those of the micro-batch that comes back
    elif job.microbatches > 1:
        moving += sum(trained)  # gradients of all micro-batches are added up before a push
    peers = topology.shards + topology.workers_per_group - 1
    made = ProcessNeed(
        (who,), values=load.buffers, gradients=held, activations=load.activations, views=held, peers=peers
    )
    if not seeing:
        coded = 0 if job.cluster.compression is Compression.kNone else 2 * held
        return replace(made, values=made.values + held, exchange=moving + coded)
    own = 0 if buffer_of(topology, who.group) == VALUES else held
    making = max(0, held - load.activations - moving)  # parameters of the script are copied into shared memory
    exchange = moving + making
    shared = held + own + load.passed
    # Each parameter of the script is free when its view is mapped.
    made = replace(made, values=made.values + own, exchange=exchange, views=held - making)
    return replace(made, shared=shared, passed=load.passed, seen=held - own)


def _server(job: Job, topology: Topology, slices: SliceMap, state_factor: float, who: Address) -> ProcessNeed:
    owned = [
        (slices.parameters[s.parameter], (s.hi - s.lo) * slices.spaces[s.space].itemsize)
        for s in slices.segments_of(who.index)
    ]
    values = sum(size for _, size in owned)
    groups = topology.worker_groups_of(who.group)
    workers = topology.workers_per_group
    # A parameter with owners is pushed by them only, any other by every worker of the group.
    pushed = sum(size * (len(parameter.owners) or workers) for parameter, size in owned)
    apart = sum(not topology.sees_memory(group) for group in groups)
    # Pushes of workers that share memory with the server lie in the workers' memory.
    exchange = apart * pushed + (2 * values if topology.synced else 0)
    if job.cluster.compression is not Compression.kNone:
        exchange += 2 * values
    state = round(state_factor * sum(size for parameter, size in owned if parameter.trainable))
    shared = values if apart < len(groups) else 0
    copied = values + state if takes_snapshots(job, topology) else 0
    made = ProcessNeed((who,), values=values, exchange=exchange, state=state, snapshot=copied)
    return replace(made, shared=shared, peers=len(groups) * workers)


# --- whole models ------------------------------------------------------------------------------------------------


def whole_model_needs(job: Job, topology: Topology, slices: SliceMap, state_factor: float) -> tuple[ProcessNeed, ...]:
    """Return what each worker and server holds where no model is split.

    A worker's copy counts in full, also where the workers of a group share one buffer on a host.
    """
    workers = [me for group in range(topology.worker_groups) for me in topology.workers(group)]
    servers = [me for group in range(topology.server_groups) for me in topology.servers(group)]
    held = [_whole_worker(job, topology, slices, state_factor, me) for me in workers]
    kept = [_whole_server(job, topology, slices, state_factor, me) for me in servers]
    if topology.cluster.replicas > 1:
        placed, second = ReplicaPlacement(domains(topology)).servers, Counter[int]()
        for me, one in zip(servers, kept, strict=True):
            second[placed[me.index].standby] += one.total
        kept = [replace(one, second=second[me.index]) for me, one in zip(servers, kept, strict=True)]
    return (*held, *kept)


def _whole_worker(job: Job, topology: Topology, slices: SliceMap, state_factor: float, me: Address) -> ProcessNeed:
    values = sum(parameter.nbytes for parameter in slices.parameters)
    trained = sum(parameter.nbytes for parameter in slices.parameters if parameter.trainable)
    held = ProcessNeed((me,), topology.unit_of(me), values=values, gradients=trained)
    if job.cluster.outer is None:
        # The local gradient, and the group's mean that the script sees.
        return replace(held, exchange=(2 if job.grads is Grads.kVisible else 1) * trained)
    # Received values, what it pushes, and its own values at the time of a push. The optimizer is here.
    copies = 3 if job.cluster.trains_in_exchange and job.cluster.keep is Keep.kAdd else 2
    workers = topology.workers_per_group
    # Its gradient, the group's mean, and the gradients of the others that it adds up.
    inside = (2 * workers + workers - 1) * trained // workers if workers > 1 else 0
    return replace(held, exchange=copies * values + inside, state=round(state_factor * trained))


def _whole_server(job: Job, topology: Topology, slices: SliceMap, state_factor: float, me: Address) -> ProcessNeed:
    values, groups, outer = slices.shard_bytes[me.index], len(topology.worker_groups_of(me.group)), job.cluster.outer
    if outer is not None:
        # Of each bucket one worker of a group pushes what the group has learned.
        copies = groups
    elif topology.collective:
        # The workers add up among themselves, so a server gets one sum.
        copies = 1 + _passing_on(topology, me.index)
    else:
        # A buffer per contributing worker, because sums are made in rank order, one per mean that workers see, and two
        # copies where server groups synchronize.
        means = groups if job.grads is Grads.kVisible and topology.workers_per_group > 1 else 0
        copies = topology.workers_per_group * groups + means + (2 if topology.synced else 0)
    state = round((state_factor if outer is None else _state_entries(outer)) * values)
    return ProcessNeed((me,), topology.unit_of(me), values=values, exchange=copies * values, state=state)


def _passing_on(topology: Topology, rank: int) -> int:
    """Return how many parts, of one server's size, a server holds in a collective."""
    # For every server's part it holds its worker's push and the mean. Besides it holds data from its children in the
    # tree of each part, and new values.
    n = topology.shards
    if not topology.server_collective:
        return 0
    if topology.cluster.algorithm is Algorithm.kNaive:
        return n * (n + 1) if rank == 0 else 2 * n
    return 2 * n + 2 * (n - 1)


def _state_entries(updater: Updater) -> int:
    """Return the number of values that an updater keeps for each element."""
    match updater.type:
        case UpdaterType.kSGD | UpdaterType.kNesterov:
            return 1 if updater.momentum else 0
        case UpdaterType.kDelayedNesterov:
            return 2 if updater.delay > 1 else 1
        case UpdaterType.kAdaGrad | UpdaterType.kRMSProp:
            return 1
    return 2
