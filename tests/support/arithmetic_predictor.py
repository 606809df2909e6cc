"""A probe that is made up, and a predictor whose figures are plain arithmetic, for tests of advice."""

from dataclasses import dataclass, field, replace
from typing import Any

from made_probe import made_probe

from topotrain.config.job import Grads, Job
from topotrain.config.topology import Topology
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import (
    BusyResource,
    LinkLoad,
    Prediction,
    ProcessMemory,
    Staleness,
    StepParts,
    Wait,
)
from topotrain.tools.prediction.rehearsable import changes, goodput, planned_memory, processes_of
from topotrain.tools.probe.probe_file import Probe, ProbedBatch

MBIT_BYTES = 1e6 / 8


def timed_probe(elements: int = 250_000, batch: int = 64, cores: int = 2, **more: Any) -> Probe:
    """A probe of four equal parameters; a sample takes a millisecond, and two processes do not disturb each other."""
    compute = 1e-3 * batch
    times = ProbedBatch(batch, 0.2 * compute, 0.8 * compute, 1e-4, 1e-4, 0.0, 1e-3, 20)
    sharing = dict.fromkeys(range(2, cores + 1), 1.0)
    return replace(made_probe((elements // 4,) * 4, cores=cores), batch=times, sharing=sharing, **more)


@dataclass
class ArithmeticPredictor:
    """Adds computing and the time of the busiest link, and remembers what it was asked.

    error: of its predictions. asked: the jobs, in order.
    """

    error: float = 0.08
    asked: list[Job] = field(default_factory=list)

    def __call__(self, job: Job, probe: Probe, machines: Machines) -> Prediction:
        self.asked.append(job)
        topology = machines.topology(job)
        planned_memory(job, probe, machines, topology)
        members, groups = topology.workers_per_group, topology.worker_groups
        samples = probe.batch.size / (1 if job.per_worker_batch else members)
        numbers = [[machines.stragglers.get(g * members + i, 1.0) for i in range(members)] for g in range(groups)]
        compute = [probe.batch.per_sample_s * samples * max(slow) for slow in numbers]
        push, servers = self._link_s(job, topology, probe, machines)
        steps = [each + push for each in compute]
        rate = sum(samples * members / step for step in steps)
        step = sum(steps) / groups
        name = "server 0/0's link out"
        return Prediction(
            topology.framework,
            processes_of(topology),
            step,
            step,
            rate,
            StepParts(sum(compute) / groups, push, 0.0, 0.0, 0.0),
            (Wait("worker 0/1", max(steps) - min(steps)),) if len(set(steps)) > 1 else (),
            (BusyResource(name, push / step), BusyResource("cores of host 0", 1 - push / step)) if servers else (),
            (LinkLoad("worker 0/0 > server 0/0", 1000.0, 2.0, len(set(topology.hosts)) > 1),),
            (ProcessMemory("worker 0/0", 1000), ProcessMemory("server 0/0", 2000)),
            Staleness(groups - 1.0, groups - 1.0, groups - 1.0),
            probe.start_s,
            goodput(job, topology, machines, probe, step),
            self.error,
            not changes(job),
        )

    def _link_s(self, job: Job, topology: Topology, probe: Probe, machines: Machines) -> tuple[float, int]:
        """Seconds of a step on the busiest server's link, and the number of servers."""
        if machines.link is None or machines.link.bandwidth is None or topology.implicit:
            return 0.0, 0
        size = sum(parameter.nbytes for parameter in probe.model)
        far = topology.worker_groups if topology.server_groups == 1 else 1
        hosts = len({topology.host_of(w) for g in range(topology.worker_groups) for w in topology.workers(g)})
        often = job.cluster.sync_freq if job.cluster.outer is not None else 1
        places = len({topology.host_of(server) for server in topology.servers(0)})
        share = size * max(hosts, far) / places / often
        # Gradients, values, and with several workers in a group their means.
        copies = 3 if topology.workers_per_group > 1 and job.grads is Grads.kVisible else 2
        return copies * share / (machines.link.bandwidth * MBIT_BYTES), topology.shards
