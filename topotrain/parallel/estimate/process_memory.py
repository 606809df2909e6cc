"""What every process of a job that splits a model will hold at most: counted from the schema and a bill of shapes.

A byte is counted once, with the resident that it belongs to, so that the processes of a host can be added up. What a
process maps of others' shared memory stands beside it: it counts as its own for the system, and not for the host.

What is counted is what is asked of the allocator. What it keeps of what was given back to it is not: that depends on
which thread asked when, and is another number in every run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from topotrain.config.job import Compression, Job, Schedule
from topotrain.config.sharding import ITEM_BYTES, Parameter, SliceMap
from topotrain.config.topology import Address, Role, Topology, Unit
from topotrain.core.model.schema import slice_map_for
from topotrain.core.model.shared_windows import VALUES, buffer_of
from topotrain.extensions.checkpointing.server_snapshots import takes_snapshots
from topotrain.parallel.estimate.cost_report import CostReport
from topotrain.parallel.runtime.one_f_one_b import in_flight


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker holds besides its parameters, in bytes: the model's buffers, activations at their most, copies of
    values that wait in sockets, and all that it sends in a step, which shared memory has room for."""

    buffers: int = 0
    activations: int = 0
    messages: int = 0
    passed: int = 0


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """What a process will hold at most, in bytes; Python and torch themselves are not in it.

    values: parameters and the model's buffers. gradients: of a step. exchange: what is on its way: pushed gradients and
    sums on servers, sums of micro-batches, what a codec remembers, copies for other workers. state: the optimizer's.
    activations: kept for the backward, and what lives beside it. snapshot: a server's copy of values and state, which
    a thread writes while the job goes on; made at the first and kept. shared: of all these, in memory that processes of
    the host share. passed: of that, values for the other workers, which no server maps. seen: what it maps of others'
    shared memory. peers: connections over which it is read and written.
    """

    who: str
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
    peers: int = 0

    @property
    def total(self) -> int:
        """All that is its own."""
        return self.values + self.gradients + self.exchange + self.state + self.activations + self.snapshot

    @property
    def private(self) -> int:
        """What RLIMIT_DATA counts: nothing that is shared."""
        return self.total - self.shared

    @property
    def resident(self) -> int:
        """All that it maps."""
        return self.total + self.seen


def loads(costs: CostReport, schedule: Schedule) -> tuple[WorkerLoad, ...]:
    """The workers' loads by a bill; of k1F1B only the micro-batches that are under way at once are kept."""
    return tuple(_load(costs, worker, schedule) for worker in range(costs.program.workers))


def _load(costs: CostReport, worker: int, schedule: Schedule) -> WorkerLoad:
    one, parts = costs.workers[worker], costs.microbatches
    flying = min(parts, in_flight(costs.program, worker)) if schedule is Schedule.k1F1B else parts
    largest = max((cost.made for cost in costs.steps[worker].values()), default=0)
    beside = max(one.peak - one.kept, 2 * largest)  # a backward has a gradient of its result and one of its input
    ahead, back = costs.sent(worker)
    waiting, passed = (_parts(size, parts) for size in (max(flying * ahead, back), flying * (ahead + back)))
    return WorkerLoad(one.buffers, _parts(flying * one.kept + beside, parts), waiting, passed)


def _parts(size: int, parts: int) -> int:
    return -(-size // parts)


def needs(
    job: Job, topology: Topology, parameters: Sequence[Parameter], state_factor: float, loaded: Sequence[WorkerLoad]
) -> tuple[ProcessNeed, ...]:
    """What each process of the job will hold.

    Args:
        job: whose workers share a model, so that gradients are hidden.
        topology: with the hosts of its units, where they are known.
        parameters: the schema: of each share of a parameter one entry, with its owners.
        state_factor: elements of optimizer state per element of a trained parameter.
        loaded: of each worker of a group.
    """
    slices = slice_map_for(parameters, topology)
    found = [
        _together(residents, unit, topology, [_need(job, topology, slices, state_factor, loaded, a) for a in residents])
        for unit in topology.units
        for residents in processes(topology, unit)
    ]
    return tuple(_seeing(need, found) for need in found)


def processes(topology: Topology, unit: Unit) -> Iterator[tuple[Address, ...]]:
    """The residents of each process of a unit: its servers live in one, or each beside its worker."""
    if topology.inline:
        yield from zip(unit.workers, unit.servers, strict=True)
        return
    if unit.servers:
        yield unit.servers
    for worker in unit.workers:
        yield (worker,)


def _together(
    residents: Sequence[Address], unit: Unit, topology: Topology, parts: Sequence[ProcessNeed]
) -> ProcessNeed:
    who = " + ".join(map(str, residents)) if len(residents) < 3 else f"{residents[0]} … {residents[-1]}"
    host = topology.hosts[unit.rank] if topology.hosts else 0
    sizes = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(ProcessNeed) if f.name not in _PLACE}
    return ProcessNeed(who, unit.rank, host, **sizes)


_PLACE = ("who", "unit", "host")


def _seeing(need: ProcessNeed, everybody: Iterable[ProcessNeed]) -> ProcessNeed:
    """A server maps all that its workers show it, and a worker what the others pass to it."""
    if not need.shared:
        return need
    others = [one for one in everybody if one is not need and one.host == need.host]
    shown = sum(one.shared - one.passed for one in others) if "server" in need.who else need.seen
    passed = sum(one.passed for one in others) if "worker" in need.who else 0
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
    held = sum(map(_bytes, mine))
    trained = [_bytes(parameter) for parameter in mine if parameter.trainable]
    seeing = topology.sees_memory(who.group)
    moving = 2 * max(trained, default=0)  # autograd makes a gradient before it is put with the others
    moving += load.passed if seeing else load.messages
    if job.schedule is Schedule.k1F1B:
        moving += 2 * sum(trained)  # the sums so far, and those of the micro-batch that comes back
    elif job.microbatches > 1:
        moving += sum(trained)  # all micro-batches' are added up before any is done
    peers = topology.shards + topology.workers_per_group - 1
    made = ProcessNeed("", values=load.buffers, gradients=held, activations=load.activations, peers=peers)
    if not seeing:
        coded = 0 if job.cluster.compression is Compression.kNone else 2 * held
        return replace(made, values=made.values + held, exchange=moving + coded)
    own = 0 if buffer_of(topology, who.group) == VALUES else held
    making = max(0, held - load.activations - moving)  # what the script has made moves into shared memory
    exchange = held + moving + making  # a window for what the servers say stands beside the gradients
    shared = 2 * held + own + load.passed
    return replace(
        made, values=made.values + own, exchange=exchange, shared=shared, passed=load.passed, seen=held - own
    )


def _server(job: Job, topology: Topology, slices: SliceMap, state_factor: float, who: Address) -> ProcessNeed:
    owned = [
        (slices.parameters[s.parameter], (s.hi - s.lo) * slices.spaces[s.space].itemsize)
        for s in slices.segments_of(who.index)
    ]
    values = sum(size for _, size in owned)
    groups = topology.worker_groups_of(who.group)
    workers = topology.workers_per_group
    pushed = sum(size * (len(parameter.owners) or workers) for parameter, size in owned)
    apart = sum(not topology.sees_memory(group) for group in groups)
    exchange = apart * pushed + (2 * values if topology.synced else 0)
    if job.cluster.compression is not Compression.kNone:
        exchange += 2 * values
    state = round(state_factor * sum(size for parameter, size in owned if parameter.trainable))
    shared = values if apart < len(groups) else 0
    copied = values + state if takes_snapshots(job, topology) else 0
    made = ProcessNeed("", values=values, exchange=exchange, state=state, snapshot=copied)
    return replace(made, shared=shared, peers=len(groups) * workers)


def _bytes(parameter: Parameter) -> int:
    return parameter.count * ITEM_BYTES[parameter.dtype]
