"""The candidates of an advice, and what is not considered."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from topotrain.config.job import Apply, ConfigError, Grads, Job, Pull
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.advice.candidate import Candidate, Family, LeftOut, slowed
from topotrain.tools.advice.layout_proposals import Proposal, counts, proposals
from topotrain.tools.advice.wishes import SearchTime, Wishes
from topotrain.tools.prediction.host_resources import sharing_on, slowdown
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.planned_memory import planned_memory
from topotrain.tools.probe.probe_file import Probe

PROPOSALS_SHARE = 0.5
"""The share of a search's time in which its candidates are made; the rest is for rehearsals."""


@dataclass(frozen=True, slots=True)
class CandidateList:
    """The candidates, and the layouts and settings that are no candidates.

    candidates: can be rehearsed. refused: layouts that do not fit into memory. left_out: is not considered.
    late: the number of layouts that were not looked at because the time was over.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[LeftOut, ...]
    left_out: tuple[LeftOut, ...]
    late: int = 0


@dataclass(frozen=True)
class CandidateSource:
    """Makes the candidates for a program on machines.

    Attributes:
        probe: of the program.
        machines: where the job is to run.
        job: its other fields are kept, and its own block is a candidate unless it chooses none.
        wishes: of the user.
        own: whether the block of the job is a candidate.
    """

    probe: Probe
    machines: Machines
    job: Job
    wishes: Wishes
    own: bool = False

    @property
    def hosts(self) -> int:
        """The number of hosts; one where none was given."""
        return max(1, self.machines.hosts)

    def collect(self, time: SearchTime | None = None) -> CandidateList:
        """Return all candidates, or those that there is time for.

        time: of the search. None: not limited. Raises ConfigError for a straggler that no layout has.
        """
        self._check_stragglers()
        candidates: dict[tuple[Job, int], Candidate] = {}
        refused: list[LeftOut] = []
        left_out: list[LeftOut] = []
        changing = late = 0
        for family, job, hosts in self._jobs(left_out):
            if candidates and time is not None and time.is_over(PROPOSALS_SHARE):
                late += 1
                continue
            try:
                found = self.candidate(family, job, hosts)
                if self.wishes.sync and not found.is_exact:
                    changing += 1
                    continue
            except ConfigError as error:
                left_out.append(LeftOut(_words(job), str(error)))
                continue
            try:
                # Before the rehearsals, so that a layout that does not fit is not only mentioned if it would be fast.
                if self.machines.memory_bytes is not None:
                    planned_memory(found.job, self.probe, found.machines, found.topology)
            except ConfigError as error:
                refused.append(LeftOut(found.label, str(error)))
            else:
                candidates.setdefault((found.job, found.used), found)
        if changing:
            text = "asynchrony, local steps or lossy compression: left out by --sync"
            left_out.append(LeftOut(f"{changing} layouts that change the statistics", text))
        if late and time is not None:
            text = f"half of the {time.within_s:g} s of the search was over before they were looked at"
            left_out.append(LeftOut(f"{late} further layouts", text))
        return CandidateList(tuple(candidates.values()), tuple(refused), (*left_out, *self._settings()), late)

    def candidate(self, family: Family, job: Job, hosts: int = 0) -> Candidate:
        """Return the candidate of a job.

        hosts: how many are used at most. 0: all.

        Raises ConfigError where its fields do not fit the machines or the script.
        """
        members, batch = job.cluster.nworkers_per_group, self.probe.batch.size
        # First: to place thousands of workers takes time.
        if not job.per_worker_batch and members > batch:
            raise ConfigError(
                "cluster.nworkers_per_group", members, f"must be at most {batch}: a batch has so many samples"
            )
        machines, chosen = self.machines, self._fastest(hosts or self.hosts)
        if self.hosts > len(chosen):
            link = machines.link if len(chosen) > 1 else None
            machines = replace(machines, hosts=len(chosen), link=link)
        topology = replace(machines, stragglers={}).topology(job, self.probe.transports["tcp"].mbit)
        # With one host a straggler is a worker.
        numbers = chosen if self.hosts > 1 else ()
        without = tuple(sorted(set(self.machines.stragglers) - set(chosen))) if numbers else ()
        return Candidate(family, job, topology, slowed(machines, topology, numbers), self.hosts, without)

    def _fastest(self, count: int) -> tuple[int, ...]:
        """Return the numbers of so many hosts, without the slowest ones."""
        if count >= self.hosts:
            return tuple(range(self.hosts))
        slow = self.machines.stragglers
        return tuple(sorted(sorted(range(self.hosts), key=lambda host: (slow.get(host, 1.0), host))[:count]))

    def _jobs(self, left_out: list[LeftOut]) -> Iterator[tuple[Family, Job, int]]:
        bare = without_layout(self.job)
        if self.own:
            yield Family.OWN, self.job, self.hosts
        for proposal in proposals(self.hosts, self.workers_per_host(), self._on_one_host(), self._fewer_hosts()):
            try:
                yield proposal.family, replace(bare, cluster=replace(bare.cluster, **proposal.fields)), proposal.hosts
            except ConfigError as error:
                left_out.append(LeftOut(_fields(proposal), str(error)))

    @property
    def _cores(self) -> int:
        return self.machines.cores or self.probe.machine.cores

    def workers_per_host(self) -> tuple[int, ...]:
        """Return the numbers of workers that each of several hosts may get.

        They are one, and the number that computes the most at once by the probed times.
        """
        cores, sharing = sharing_on(self.machines, self.probe)
        best = max(counts(cores), key=lambda number: number / slowdown(number, cores, sharing))
        return (1,) if best == 1 else (1, best)

    def _on_one_host(self) -> tuple[int, ...]:
        # One worker has a proposal of its own.
        return tuple(number for number in counts(self._cores) if number > 1)

    def _fewer_hosts(self) -> tuple[int, ...]:
        """Return numbers of hosts below all of them, the smallest first."""
        if self.hosts == 1:
            return ()
        quick = self.hosts - sum(factor > 1 for factor in self.machines.stragglers.values())
        found = {*counts(self.hosts), *([quick] if quick > 0 else ())} - {self.hosts}
        return tuple(sorted(found))

    def _check_stragglers(self) -> None:
        cluster = self.job.cluster
        mine = cluster.nworker_groups * cluster.nworkers_per_group
        most = self.hosts if self.hosts > 1 else max(self._cores, mine)
        what = "host" if self.hosts > 1 else "worker"
        for number in self.machines.stragglers:
            if number >= most:
                raise ConfigError("--straggler", number, f"must be the number of a {what}, 0 to {most - 1}")

    def _settings(self) -> Iterable[LeftOut]:
        """Yield settings that the advice does not decide."""
        job = self.job
        if (job.grads, job.apply, job.pull) == (Grads.kVisible, Apply.kAtStep, Pull.kStep):
            why = "whether the script allows them is not known; try them with --set on the advised file"
            yield LeftOut("grads: kHidden, apply: kOnArrival, pull: kLazy", why)
        if self.hosts > 1:
            yield LeftOut("engine: kGloo, kNccl", "torch.distributed adds up there, which is not rehearsed")
        elif not self.wishes.sync:
            yield LeftOut("compression", "on one host messages go through memory, which costs less than compressing")
        if not self.wishes.sync:
            yield LeftOut("n_push, n_fetch above 1", "local steps are plain SGD, whatever the script's optimizer is")
        if not job.cluster.backup and self.machines.stragglers and not self.wishes.sync:
            yield LeftOut("backup", "needs grads: kHidden and per_worker_batch: true")
        yield LeftOut("a model that is split over workers", "`topotrain plan` estimates partition blocks")


def _fields(proposal: Proposal) -> str:
    shown = (f"{name}: {getattr(value, 'value', value)}" for name, value in proposal.fields.items() if name != "outer")
    return f"{proposal.family.value} ({', '.join(shown)})"


def _words(job: Job) -> str:
    cluster = job.cluster
    groups, members = cluster.nworker_groups, cluster.nworkers_per_group
    return f"{groups} × {members} workers, {cluster.nserver_groups} × {cluster.nservers_per_group} servers"
