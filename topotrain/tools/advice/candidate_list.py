"""The candidates of an advice, and what is not considered."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from topotrain.config.job import Apply, ConfigError, Grads, Job, Pull
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.advice.candidate import Candidate, Family, LeftOut, slowed
from topotrain.tools.advice.layout_proposals import Proposal, counts, proposals
from topotrain.tools.advice.speed_bounds import slowdown
from topotrain.tools.advice.wishes import Wishes
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.planned_memory import planned_memory
from topotrain.tools.probe.probe_file import Probe

CLEAR = 1.25
"""A number of workers per host is the only one considered where it computes so many times as fast as any other."""


@dataclass(frozen=True, slots=True)
class CandidateList:
    """The candidates, and the layouts and settings that are no candidates.

    candidates: can be rehearsed. refused: layouts that do not fit into memory. left_out: is not considered.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[LeftOut, ...]
    left_out: tuple[LeftOut, ...]


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

    def collect(self) -> CandidateList:
        """Return all candidates. Raises ConfigError for a straggler that no layout has."""
        self._check_stragglers()
        candidates: dict[Job, Candidate] = {}
        refused: list[LeftOut] = []
        left_out: list[LeftOut] = []
        changing = 0
        for family, job in self._jobs(left_out):
            try:
                found = self.candidate(family, job)
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
                candidates.setdefault(found.job, found)
        if changing:
            text = "asynchrony, local steps or lossy compression: left out by --sync"
            left_out.append(LeftOut(f"{changing} layouts that change the statistics", text))
        return CandidateList(tuple(candidates.values()), tuple(refused), (*left_out, *self._settings()))

    def candidate(self, family: Family, job: Job) -> Candidate:
        """Return the candidate of a job.

        Raises ConfigError where its fields do not fit the machines or the script.
        """
        topology = replace(self.machines, stragglers={}).topology(job, self.probe.transports["tcp"].mbit)
        members, batch = topology.workers_per_group, self.probe.batch.size
        if not job.per_worker_batch and members > batch:
            raise ConfigError(
                "cluster.nworkers_per_group", members, f"must be at most {batch}: a batch has so many samples"
            )
        return Candidate(family, job, topology, slowed(self.machines, topology))

    def _jobs(self, left_out: list[LeftOut]) -> Iterator[tuple[Family, Job]]:
        if self.own:
            yield Family.OWN, self.job
        bare = without_layout(self.job)
        for proposal in proposals(self.hosts, self.workers_per_host()):
            try:
                yield proposal.family, _with_block(bare, proposal)
            except ConfigError as error:
                left_out.append(LeftOut(_fields(proposal), str(error)))

    def workers_per_host(self) -> tuple[int, ...]:
        """Return the numbers of workers that a host may get.

        They follow from the times of processes that compute at once.
        """
        cores = self.machines.cores or self.probe.machine.cores
        every = counts(cores)
        if self.hosts == 1:
            # One worker has a proposal of its own.
            return tuple(number for number in every if number > 1)
        speed = {number: number / slowdown(self.probe, number) for number in every}
        best = max(every, key=lambda number: speed[number])
        if best == 1 or speed[best] > CLEAR * speed[1]:
            return (best,)
        return (1, best)

    def _check_stragglers(self) -> None:
        cluster = self.job.cluster
        mine = cluster.nworker_groups * cluster.nworkers_per_group
        most = self.hosts if self.hosts > 1 else max(self.machines.cores or self.probe.machine.cores, mine)
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


def _with_block(bare: Job, proposal: Proposal) -> Job:
    return replace(bare, cluster=replace(bare.cluster, **proposal.fields))


def _fields(proposal: Proposal) -> str:
    shown = (f"{name}: {getattr(value, 'value', value)}" for name, value in proposal.fields.items() if name != "outer")
    return f"{proposal.family.value} ({', '.join(shown)})"


def _words(job: Job) -> str:
    cluster = job.cluster
    groups, members = cluster.nworker_groups, cluster.nworkers_per_group
    return f"{groups} × {members} workers, {cluster.nserver_groups} × {cluster.nservers_per_group} servers"
