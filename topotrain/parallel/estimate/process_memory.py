"""Upper bound of the memory of every process of a job that splits a model.

The numbers come from the schema and a cost report. Each byte is counted once, in the process to which it belongs, so
the processes of a host can be added up. Only requested memory is counted: memory that the allocator keeps after it was
freed depends on the timing of threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from topotrain.config.job import Compression, Job, Schedule
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address, Role, Topology, Unit
from topotrain.core.model.schema import slice_map_for
from topotrain.core.model.shared_windows import VALUES, buffer_of
from topotrain.extensions.checkpointing.server_snapshots import takes_snapshots
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
        exchange: data in flight: pushed gradients and sums on servers, sums of micro-batches, the memory of a codec,
            copies for other workers.
        state: optimizer state.
        activations: memory kept for the backward, and live memory beside it.
        snapshot: a server's copy of values and state, which a thread writes while the job continues. It is allocated at
            the first snapshot and kept.
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
        return self.values + self.gradients + self.exchange + self.state + self.activations + self.snapshot

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
        for residents in processes(topology, unit)
    ]
    return tuple(_seeing(need, found) for need in found)


def processes(topology: Topology, unit: Unit) -> Iterator[tuple[Address, ...]]:
    """Return the workers and servers in each process of a unit."""
    if topology.inline:
        yield from zip(unit.workers, unit.servers, strict=True)
        return
    if unit.servers:
        yield unit.servers
    for worker in unit.workers:
        yield (worker,)


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
