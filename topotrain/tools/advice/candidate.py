"""The candidates of an advice: jobs with a named block, placed on machines."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.advice.named_blocks import NamedBlock, on_one_host, over_hosts
from topotrain.tools.prediction.host_resources import sharing_on, slowdown
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES, changes
from topotrain.tools.probe.probe_file import Probe

OWN = "the block of the job file"
_NAMED = 4
"""Idle hosts that are named in a label."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A layout or a setting that was not rehearsed, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that can be rehearsed."""

    job: Job
    topology: Topology
    machines: Machines = field(default_factory=Machines)  # with stragglers by the numbers of this layout's workers
    setting: str = ""  # what the label has behind framework and counts
    needs: str = ""  # fields of the job that are set for it, in words, which the script must allow
    given: int = 1  # hosts that there are; the layout may be for fewer
    without: tuple[int, ...] = ()  # slow hosts that are left idle

    @property
    def used(self) -> int:
        """The number of hosts with processes of the job."""
        return len(set(self.topology.hosts)) or 1

    @property
    def label(self) -> str:
        """The layout in one line: framework, workers, servers, and what else is set."""
        topology = self.topology
        framework = topology.framework.replace(" (asynchronous)", "").replace(" (synchronous)", "")
        workers = _counts(topology.worker_groups, topology.workers_per_group, "worker")
        servers = "no servers"
        if not topology.implicit:
            apart = " apart" if self.job.cluster.server_worker_separate else ""
            servers = _counts(topology.server_groups, topology.shards, "server") + apart
        return ", ".join(part for part in (framework, workers, servers, self.setting, self._place) if part)

    @property
    def _place(self) -> str:
        """Which of the hosts are used, in words; "": all."""
        if self.used >= self.given:
            return ""
        few = ", ".join(map(str, self.without[:_NAMED])) + ", …" * (len(self.without) > _NAMED)
        idle = f" without host{'s' * (len(self.without) > 1)} {few}" if self.without else ""
        return f"on {self.used} of {self.given} hosts{idle}"

    @property
    def changes(self) -> tuple[str, ...]:
        """Why the updates differ from those of one process; empty: they do not."""
        return changes(self.job)

    @property
    def processes(self) -> int:
        """One for each worker, and one for the servers of each unit."""
        topology = self.topology
        workers = topology.worker_groups * topology.workers_per_group
        # Where each worker has a server beside it on one host, its process does the work of both.
        return workers + (0 if topology.inline else sum(bool(unit.servers) for unit in topology.units))


def candidates(probe: Probe, machines: Machines, job: Job) -> tuple[list[Candidate], list[LeftOut]]:
    """Return the candidates for a job, and the blocks that are none.

    Its other fields are kept, and its own block is a candidate unless it is `auto`. Raises ConfigError for a straggler
    that no layout has.
    """
    source = _CandidateSource(probe, machines, job)
    source.check_stragglers()
    # Several blocks may be the same job on as many hosts.
    found: dict[tuple[Job, int], Candidate] = {}
    left_out = []
    for block in source.blocks():
        try:
            one = source.candidate(block)
            found.setdefault((one.job, one.used), one)
        except ConfigError as error:
            left_out.append(LeftOut(_words(block), str(error)))
    return list(found.values()), left_out


@dataclass(frozen=True)
class _CandidateSource:
    """The named blocks for a job on machines, and the candidate of each."""

    probe: Probe
    machines: Machines
    job: Job

    @property
    def hosts(self) -> int:
        return max(1, self.machines.hosts)

    def blocks(self) -> Iterator[NamedBlock]:
        # One worker comes first: however short the time is, nothing slower is advised.
        alone, *here = on_one_host(self._workers_on_one_host())
        yield alone
        if not self.job.cluster.auto:
            yield NamedBlock({}, self.hosts, OWN)
        if self.hosts == 1:
            yield from here
            return
        # Where links are slow, the plainest block of one host is the fastest.
        yield from here[:1]
        yield from over_hosts(self.hosts, self._workers_per_host(), self._fewer_hosts())

    def candidate(self, block: NamedBlock) -> Candidate:
        """Return the candidate of a block.

        Raises ConfigError where it does not fit the machines or the job.
        """
        job = self.job
        if block.setting != OWN:
            bare = without_layout(job)
            job = replace(bare, **block.job, cluster=replace(bare.cluster, **block.cluster))
        members, batch = job.cluster.nworkers_per_group, self.probe.batch.size
        # First: to place thousands of workers takes time.
        if not job.per_worker_batch and members > batch:
            accepted = f"must be at most {batch}: a batch has so many samples"
            raise ConfigError("cluster.nworkers_per_group", members, accepted)
        machines, chosen = self.machines, self._fastest(block.hosts)
        if self.hosts > len(chosen):
            machines = replace(machines, hosts=len(chosen), link=machines.link if len(chosen) > 1 else None)
        topology = replace(machines, stragglers={}).topology(job, self.probe.transports["tcp"].mbit)
        needs = any(getattr(self.job, name) is not value for name, value in block.job.items())
        return Candidate(
            job,
            topology,
            replace(machines, stragglers=self._slow_workers(topology, chosen)),
            setting=block.setting,
            needs=block.setting if needs else "",
            given=self.hosts,
            without=tuple(sorted(set(self.machines.stragglers) - set(chosen))) if self.hosts > 1 else (),
        )

    def _slow_workers(self, topology: Topology, chosen: tuple[int, ...]) -> dict[int, float]:
        """Return the stragglers as numbers of workers of one layout.

        With several hosts a straggler is the number of a host, and all workers on it are slow. With one host it is the
        number of a worker, and a layout with fewer workers does not have it.
        """
        factors: dict[int, float] = {}
        for group in range(topology.worker_groups if self.machines.stragglers else 0):
            for worker in topology.workers(group):
                number = group * topology.workers_per_group + worker.index
                place = chosen[topology.host_of(worker)] if self.hosts > 1 else number
                if place in self.machines.stragglers:
                    factors[number] = self.machines.stragglers[place]
        return factors

    def _fastest(self, count: int) -> tuple[int, ...]:
        """Return the numbers of so many hosts, without the slowest ones."""
        slow = self.machines.stragglers
        return tuple(sorted(sorted(range(self.hosts), key=lambda host: (slow.get(host, 1.0), host))[:count]))

    @property
    def _cores(self) -> int:
        return self.machines.cores or self.probe.machine.cores

    def _workers_per_host(self) -> int:
        """Return the number of workers with which a host computes the most, as probed."""
        cores, sharing = sharing_on(self.machines, self.probe)
        # So many on one host, with a server each, can be rehearsed.
        most = min(cores, MOST_PROCESSES // 2)
        if not self.job.per_worker_batch:  # a batch must have a sample for each
            most = min(most, self.probe.batch.size // self.hosts)
        counts = range(1, max(1, most) + 1)
        return max(counts, key=lambda number: number / slowdown(number, cores, sharing))

    def _workers_on_one_host(self) -> int:
        """Return the same for one host, and at least two where there are cores for them."""
        most = self._cores if self.job.per_worker_batch else min(self._cores, self.probe.batch.size)
        return min(most, max(2, self._workers_per_host()))

    def _fewer_hosts(self) -> tuple[int, ...]:
        """Return half of the hosts, or what can be rehearsed, and all but the slow ones."""
        quick = self.hosts - sum(factor > 1 for factor in self.machines.stragglers.values())
        half = min(self.hosts // 2, MOST_PROCESSES // 2 // self._workers_per_host())
        return tuple(sorted({half, quick} & set(range(2, self.hosts))))

    def check_stragglers(self) -> None:
        cluster = self.job.cluster
        mine = cluster.nworker_groups * cluster.nworkers_per_group
        most = self.hosts if self.hosts > 1 else max(self._cores, mine)
        what = "host" if self.hosts > 1 else "worker"
        for number in self.machines.stragglers:
            if number >= most:
                raise ConfigError("--straggler", number, f"must be the number of a {what}, 0 to {most - 1}")


def not_considered(machines: Machines) -> Iterator[LeftOut]:
    """Yield settings that an advice does not decide."""
    if machines.hosts > 1:
        yield LeftOut("engine: kGloo, kNccl", "torch.distributed adds up there, which is not rehearsed")
    else:
        yield LeftOut("compression", "on one host messages go through memory, which costs less than compressing")
    yield LeftOut("n_push, n_fetch above 1", "local steps are plain SGD, whatever the script's optimizer is")
    yield LeftOut("a model that is split over workers", "`topotrain plan` estimates partition blocks")


def _counts(groups: int, members: int, noun: str) -> str:
    text = f"{members} {noun}" + "s" * (members > 1)
    return text if groups == 1 else f"{groups} groups of {text}"


def _words(block: NamedBlock) -> str:
    if block.setting == OWN:
        return OWN
    counts = ("nworker_groups", "nworkers_per_group", "nserver_groups", "nservers_per_group")
    groups, members, server_groups, servers = (block.cluster.get(name, 1) for name in counts)
    setting = f", {block.setting}" if block.setting else ""
    return f"{groups} × {members} workers, {server_groups} × {servers} servers{setting}"
