"""The candidates of an advice: named blocks that fit a job, a probe and machines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from topotrain.config.job import ConfigError, Job
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.advice.candidate import Candidate, slowed
from topotrain.tools.advice.named_blocks import NamedBlock, on_one_host, over_hosts
from topotrain.tools.prediction.host_resources import sharing_on, slowdown
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES
from topotrain.tools.probe.probe_file import Probe

OWN = "the block of the job file"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not rehearsed, and why. what: a layout or a setting."""

    what: str
    why: str


@dataclass(frozen=True)
class CandidateSource:
    """Makes the candidates for a program on machines.

    Attributes:
        probe: of the program.
        machines: where the job is to run.
        job: its other fields are kept. Its own block is a candidate, unless it is `auto`.
    """

    probe: Probe
    machines: Machines
    job: Job

    @property
    def hosts(self) -> int:
        """The number of hosts; one where none was given."""
        return max(1, self.machines.hosts)

    def candidates(self, left_out: list[LeftOut]) -> Iterator[Candidate]:
        """Yield the candidates, and add what is none to a list.

        Raises ConfigError for a straggler that no layout has.
        """
        self._check_stragglers()
        seen = set()
        for block in self._blocks():
            try:
                found = self._candidate(block)
            except ConfigError as error:
                left_out.append(LeftOut(_words(block), str(error)))
                continue
            if (found.job, found.used) not in seen:
                seen.add((found.job, found.used))
                yield found

    def _blocks(self) -> Iterator[NamedBlock]:
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

    def _candidate(self, block: NamedBlock) -> Candidate:
        """Return the candidate of a block.

        Raises ConfigError where its fields do not fit the machines or the job.
        """
        job = self.job
        if block.setting != OWN:
            bare = without_layout(job)
            job = replace(bare, **block.job, cluster=replace(bare.cluster, **block.cluster))
        members, batch = job.cluster.nworkers_per_group, self.probe.batch.size
        # First: to place thousands of workers takes time.
        if not job.per_worker_batch and members > batch:
            raise ConfigError(
                "cluster.nworkers_per_group", members, f"must be at most {batch}: a batch has so many samples"
            )
        machines, chosen = self.machines, self._fastest(block.hosts)
        if self.hosts > len(chosen):
            link = machines.link if len(chosen) > 1 else None
            machines = replace(machines, hosts=len(chosen), link=link)
        topology = replace(machines, stragglers={}).topology(job, self.probe.transports["tcp"].mbit)
        # With one host a straggler is a worker.
        numbers = chosen if self.hosts > 1 else ()
        needs = any(getattr(self.job, name) is not value for name, value in block.job.items())
        return Candidate(
            job,
            topology,
            slowed(machines, topology, numbers),
            setting=block.setting,
            needs=block.setting if needs else "",
            given=self.hosts,
            without=tuple(sorted(set(self.machines.stragglers) - set(chosen))) if numbers else (),
        )

    def _fastest(self, count: int) -> tuple[int, ...]:
        """Return the numbers of so many hosts, without the slowest ones."""
        slow = self.machines.stragglers
        return tuple(sorted(sorted(range(self.hosts), key=lambda host: (slow.get(host, 1.0), host))[:count]))

    @property
    def _cores(self) -> int:
        return self.machines.cores or self.probe.machine.cores

    def _workers_per_host(self) -> int:
        """Return the number of workers with which a host computes the most, as probed.

        A batch must have a sample for each.
        """
        cores, sharing = sharing_on(self.machines, self.probe)
        # So many on one host, with a server each, can be rehearsed.
        most = min(cores, MOST_PROCESSES // 2)
        if not self.job.per_worker_batch:
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

    def _check_stragglers(self) -> None:
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


def _words(block: NamedBlock) -> str:
    if block.setting == OWN:
        return OWN
    counts = ("nworker_groups", "nworkers_per_group", "nserver_groups", "nservers_per_group")
    groups, members, server_groups, servers = (block.cluster.get(name, 1) for name in counts)
    setting = f", {block.setting}" if block.setting else ""
    return f"{groups} × {members} workers, {server_groups} × {servers} servers{setting}"
