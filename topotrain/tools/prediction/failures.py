"""The goodput of a predicted job with hosts that fail."""

from topotrain.config.job import ConfigError, Job, OnFailure
from topotrain.config.topology import Topology
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.simulator.goodput import ChipFailures

NOTICE_S = 0.4
"""Seconds until a group that has lost a process goes on, without the start of that process.

Measured: benchmarks/RESULTS.md, "pause of the group".
"""


def goodput(job: Job, topology: Topology, machines: Machines, start_s: float) -> float | None:
    """Return the share of the steps that failures leave; None: none was asked for.

    Groups that go on without each other stand still alone. start_s: from the start of a process to its first step.

    Raises:
        ConfigError: the job ends with its first failure.
    """
    if machines.mtbf_s is None:
        return None
    if job.on_failure is not OnFailure.kContinue:
        accepted = "needs on_failure: kContinue: this job ends with its first failure"
        raise ConfigError("--mtbf", f"{machines.mtbf_s:g} s", accepted)
    hosts = 1 if machines.emulated else len(set(topology.hosts)) or 1
    failures = ChipFailures(hosts, machines.mtbf_s, NOTICE_S + start_s, base=0.0)
    cluster = job.cluster
    waits = cluster.max_staleness is not None or (cluster.outer is not None and not cluster.quorum)
    return failures.formula(1 if waits else topology.worker_groups)
