"""The goodput of a predicted job with hosts that fail.

A host that fails is started again with its processes. If it had only workers of groups that the others can do without,
these groups stand still, and the others train on. If not, the whole job goes back to its last snapshot.
"""

from collections import defaultdict

from topotrain.config.job import ConfigError, Job, OnFailure
from topotrain.config.topology import Topology
from topotrain.extensions.elastic.eligibility import leave_refusal
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe

NOTICE_S = 0.4
"""Seconds until a group that has lost a process goes on, without the start of that process.

Measured: benchmarks/results, "pause of the group".
"""

SNAPSHOT_S_PER_BYTE = 0.62e-9
"""Seconds that a snapshot costs all workers, by its bytes.

Measured: benchmarks/results, "What snapshots cost": 78 ms for 126 MB.
"""


def goodput(job: Job, topology: Topology, machines: Machines, probe: Probe, step_s: float) -> float | None:
    """Return the share of the steps that failures and snapshots leave; None: no failures were asked for.

    step_s: the usual time of a step. Raises ConfigError where a failure ends the job, or begins it anew.
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
    """Return how many hosts take the job back, and how many pause each group, or all that wait for each other."""
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
