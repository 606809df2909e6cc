"""Jobs that can be rehearsed: memory, expected error, goodput with failures.

A host that fails is started again with its processes. If it had only workers of groups that the others can do without,
these groups stand still, and the others train on. If not, the whole job goes back to its last snapshot.

`python -m benchmarks.predictions --held-out` predicts forty jobs on which nothing in the product was tuned, runs them,
and compares the time of a step. All have two workers, on the probed machine. docs/prediction.md has the summary.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from topotrain.config.job import Agreement, Compression, ConfigError, Job, OnFailure, TransportChoice
from topotrain.config.topology import Topology
from topotrain.extensions.elastic.eligibility import leave_refusal
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import ProcessMemory
from topotrain.tools.probe.probe_file import Probe

MOST_PROCESSES = 64
"""Workers and servers that are rehearsed each for itself."""
MEASURED_WORKERS = 2
SHARED_MEMORY, TCP, LINK, STRAGGLER = 0.37, 0.24, 0.21, 0.43
"""The error within which nine of ten of the held-out jobs are, by what is between their processes."""


def processes_of(topology: Topology) -> int:
    """Return how many workers and servers a layout has."""
    return topology.worker_groups * topology.workers_per_group + topology.server_groups * topology.shards


def check(job: Job, topology: Topology) -> None:
    """Raise ConfigError for what cannot be rehearsed; it names the field."""
    cluster, workers = job.cluster, topology.workers_per_group
    if job.splits:
        raise ConfigError("partition", None, "must be left out: a model that is split over workers cannot be predicted")
    if topology.torch_collective:
        accepted = "must be kAuto or kOwn: torch.distributed cannot be predicted"
        raise ConfigError("cluster.engine", cluster.engine.value, accepted)
    if cluster.replicas > 1:
        raise ConfigError("cluster.replicas", cluster.replicas, "must be 1: replicated servers cannot be predicted")
    if cluster.outer is not None and workers > 1:
        accepted = "must be 1 with cluster.outer: a group that shares a replica cannot be predicted"
        raise ConfigError("cluster.nworkers_per_group", workers, accepted)
    if topology.worker_groups > 1 and topology.implicit:
        accepted = "must be 1 or more: groups without servers have nothing in common"
        raise ConfigError("cluster.nserver_groups", cluster.nserver_groups, accepted)


def planned_memory(job: Job, probe: Probe, machines: Machines, topology: Topology) -> Sequence[ProcessMemory]:
    """Return the training state of each process.

    Raises ConfigError where a host needs more than it has.
    """
    optimizer = probe.optimizer
    planned = plan(job, PlannedSchema(probe.schema(), optimizer.state_factor, optimizer.momentum, (optimizer.name,)))
    if machines.memory_bytes is not None:
        on_host = Counter[int]()
        for process in planned.memory:
            on_host[topology.host_of(process.residents[0])] += process.total
        ((host, most),) = on_host.most_common(1)
        if most > machines.memory_bytes:
            needed = f"host {host} needs {most / 1e9:,.3g} GB of training state, without activations"
            raise ConfigError("--memory", f"{machines.memory_bytes / 1e9:,.3g} GB", f"is too little: {needed}")
    return tuple(ProcessMemory(process.who, process.total) for process in planned.memory)


def changes(job: Job) -> tuple[str, ...]:
    """Return why updates differ from those of one process; empty: they do not."""
    cluster = job.cluster
    several, implicit = cluster.nworker_groups > 1, cluster.nserver_groups == 0
    conditions = {
        "groups never meet": several and implicit,
        "asynchronous": several and not implicit and (cluster.outer is None or cluster.quorum > 0),
        "local steps": cluster.outer is not None or max(cluster.n_push, cluster.n_fetch) > 1,
        "averages": cluster.nserver_groups > 1 and cluster.agreement is not Agreement.kMaster,
        "lossy compression": cluster.compression is not Compression.kNone,
        "drops late gradients": cluster.backup > 0,
    }
    return tuple(text for text, holds in conditions.items() if holds)


def expected_error(job: Job, machines: Machines, topology: Topology, probed_cores: int) -> float | None:
    """Return the relative error to expect of a step; None: it was not measured.

    0.2 is a fifth more or less.
    """
    workers = topology.worker_groups * topology.workers_per_group
    if workers != MEASURED_WORKERS or machines.cores not in (None, probed_cores):
        return None
    if any(times > 1 for times in machines.stragglers.values()):
        return STRAGGLER
    if machines.hosts > 1 or machines.link is not None:
        return LINK
    return TCP if job.cluster.transport is TransportChoice.kTcp else SHARED_MEMORY


NOTICE_S = 0.4
"""Seconds until a group that has lost a process goes on, without the start of that process.

Measured: benchmarks/results, "pause of the group".
"""

SNAPSHOT_S_PER_BYTE = 0.62e-9
"""Seconds that a snapshot costs all workers, by its bytes.

Measured: benchmarks/results, "What snapshots cost": 78 ms for 126 MB.
"""


def goodput(job: Job, topology: Topology, machines: Machines, probe: Probe, step_s: float) -> float | None:
    """Return the share of the steps that failures and snapshots leave.

    None: no failures were asked for. step_s: the usual time of a step. Raises ConfigError where a failure ends the job,
    or begins it anew.
    """
    mtbf_s = machines.mtbf_s
    if mtbf_s is None:
        return None
    if job.on_failure is not OnFailure.kContinue:
        accepted = "needs on_failure: kContinue: this job ends with its first failure"
        raise ConfigError("--mtbf", f"{mtbf_s:g} s", accepted)
    back, pauses = _failing_hosts(job, topology, machines)
    # Seconds between two snapshots; 0: there are none.
    interval_s = min((each for each in (job.snapshot_s, job.checkpoint_freq * step_s) if each > 0), default=0.0)
    if back and not interval_s:
        accepted = "must be above 0 with --mtbf: without snapshots a failure starts the job from its beginning"
        raise ConfigError("snapshot_s", f"{job.snapshot_s:g}", accepted)
    pause_s = NOTICE_S + probe.start_s
    # The failures of a second of training, each times its seconds. After a snapshot half an interval is lost.
    common = back * (pause_s + interval_s / 2) / mtbf_s
    left = sum(1 / (1 + common + count * pause_s / mtbf_s) for count in pauses) / len(pauses)
    if interval_s:
        state_bytes = sum(parameter.nbytes for parameter in probe.model) * (1 + probe.optimizer.state_factor)
        left *= interval_s / (interval_s + SNAPSHOT_S_PER_BYTE * state_bytes)
    return left


def _failing_hosts(job: Job, topology: Topology, machines: Machines) -> tuple[int, list[int]]:
    """Return how many hosts take the job back, and how many pause each group.

    Groups that wait for each other count as one.
    """
    with_servers = {machines.host_of(topology, server) for unit in topology.units for server in unit.servers}
    groups: dict[int, set[int]] = defaultdict(set)
    for unit in topology.units:
        for worker in unit.workers:
            groups[machines.host_of(topology, worker)].add(worker.group)
    pausing = [
        its
        for host, its in groups.items()
        if host not in with_servers and not any(leave_refusal(job, topology, group) for group in its)
    ]
    back = len(with_servers | groups.keys()) - len(pausing)
    cluster = job.cluster
    if cluster.max_staleness is not None or (cluster.outer is not None and not cluster.quorum):
        return back, [len(pausing)]
    return back, [sum(group in its for its in pausing) for group in range(topology.worker_groups)]
