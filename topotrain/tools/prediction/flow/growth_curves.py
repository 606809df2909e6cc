"""How samples per second grow with hosts, for each framework, by the flow model.

Each worker keeps its batch, so that twice the workers read twice the samples in a step (weak scaling). Every unit has a
host of its own. The costs of a layout's servers are included: where servers have hosts of their own, these hosts train
nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from topotrain.config.job import (
    Algorithm,
    ChangeMethod,
    Cluster,
    Job,
    Link,
    LRGen,
    Updater,
    UpdaterType,
)
from topotrain.tools.prediction.flow_model import FlowModel
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import (
    VERSION,
    Machine,
    Probe,
    ProbedBatch,
    ProbedKernels,
    ProbedOptimizer,
    ProbedParameter,
    ProbedTransport,
)

HOSTS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
LINKS: Mapping[str, Link] = {
    "100 Mbit/s, 20 ms": Link(bandwidth=100.0, delay=20.0),
    "1 Gbit/s, 1 ms": Link(bandwidth=1000.0, delay=1.0),
    "25 Gbit/s, 0.05 ms": Link(bandwidth=25_000.0, delay=0.05),
}
SYNC_FREQ = 16
"""Updates of a server group between two exchanges with the others."""
ROUND = 100
"""Steps of a worker between two rounds of an outer optimizer."""
HOSTS_PER_SERVER = 5
"""Of so many hosts one is for a server, in layouts with separate servers."""
_LAYERS = 24
_WIDTH = 1024


def all_reduce(algorithm: Algorithm) -> Callable[[int], Cluster]:
    """Return the function of the hosts that gives the block of an AllReduce."""
    return lambda hosts: Cluster(
        nworkers_per_group=hosts, nservers_per_group=hosts, algorithm=algorithm if hosts > 1 else Algorithm.kAuto
    )


def _apart(hosts: int, per_server: int = HOSTS_PER_SERVER) -> tuple[int, int]:
    """Return how many of the hosts are workers, and how many are servers.

    In these layouts servers have hosts of their own.
    """
    servers = max(1, hosts // per_server)
    return max(1, hosts - servers), servers


def sandblaster(hosts: int) -> Cluster:
    """Return the block of a synchronous group with separate servers."""
    workers, servers = _apart(hosts)
    return Cluster(nworkers_per_group=workers, nservers_per_group=servers, server_worker_separate=hosts > 1)


def downpour(hosts: int) -> Cluster:
    """Return the block of groups of one worker with separate servers."""
    workers, servers = _apart(hosts)
    return Cluster(nworker_groups=workers, nservers_per_group=servers, server_worker_separate=hosts > 1)


def hogwild(hosts: int) -> Cluster:
    """Return the block of workers with a copy of the parameters each.

    The copies agree in the background.
    """
    return Cluster(nworker_groups=hosts, nserver_groups=hosts, sync_freq=SYNC_FREQ)


def islands(hosts: int) -> Cluster:
    """Return the block of workers that train alone between two rounds.

    The rounds are those of an outer optimizer.
    """
    workers, servers = _apart(hosts, 2 * HOSTS_PER_SERVER)
    rate = LRGen(type=ChangeMethod.kFixed, base_lr=0.7)
    outer = Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=rate)
    return Cluster(
        nworker_groups=workers,
        nservers_per_group=servers,
        server_worker_separate=hosts > 1,
        sync_freq=ROUND,
        outer=outer,
    )


FRAMEWORKS: Mapping[str, Callable[[int], Cluster]] = {
    "AllReduce, over servers": all_reduce(Algorithm.kAuto),
    "AllReduce, ring": all_reduce(Algorithm.kRing),
    "AllReduce, tree": all_reduce(Algorithm.kTree),
    "Sandblaster": sandblaster,
    "Downpour": downpour,
    "Distributed Hogwild": hogwild,
    "DiLoCo": islands,
}


def block(framework: str, hosts: int) -> Job:
    """Return a job of this framework on so many hosts."""
    return Job(cluster=FRAMEWORKS[framework](hosts), per_worker_batch=True)


def reference_probe() -> Probe:
    """Return the probe of a program that stands for many.

    It is a transformer of 302 million parameters of 16 bits, with a step of one second on each host, as a graphics
    processor computes it. Costs of messages and kernels are those of a server processor.
    """
    # Four matrices of width times width for attention and eight for the rest, layer by layer.
    shapes = [(4 * _WIDTH, _WIDTH), (8 * _WIDTH, _WIDTH)] * _LAYERS
    count = len(shapes)
    model = tuple(
        # The last layer has its gradient first.
        ProbedParameter(f"layer{number}", shape, "bfloat16", True, (count - number) / count)
        for number, shape in enumerate(shapes)
    )
    way = ProbedTransport(10e-6, 0.15e-9, 10e-6, 0.15e-9, 30e-6)
    return Probe(
        version=VERSION,
        made_at=0.0,
        machine=Machine("reference", 16, 64 << 30, "Linux"),
        versions={},
        program="reference.py",
        model=model,
        batch=ProbedBatch(32, 0.33, 0.66, 0.01, 0.01, 0.0, 0.0, 1, 0),
        spread=0.0,
        optimizer=ProbedOptimizer("Adam", 2.0, 10e-6, 0.2e-9, 0.0),
        kernels=ProbedKernels(3e-6, 0.05e-9, 0.1e-9),
        transports={"shm": replace(way, latency_s=10e-6), "tcp": way},
        worker_step_s=0.005,
        server_message_s=10e-6,
        sharing={},
        start_s=10.0,
    )


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """One prediction. samples_per_s: of the whole job."""

    framework: str
    link: str
    hosts: int
    samples_per_s: float


def growth(probe: Probe, hosts: Sequence[int] = HOSTS, links: Mapping[str, Link] = LINKS) -> Iterator[GrowthPoint]:
    """Predict each framework on so many hosts with each of these links."""
    for name, link in links.items():
        for framework in FRAMEWORKS:
            for count in hosts:
                model = FlowModel(block(framework, count), probe, Machines(link=link))
                yield GrowthPoint(framework, name, count, model.samples_per_s)
