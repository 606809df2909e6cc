"""The goodput of a predicted job with hosts that fail.

A host that fails is started again with its processes. If it had only workers of groups that the others can do without,
these groups stand still, and the others train on. If not, the whole job goes back to its last snapshot.
"""

from dataclasses import dataclass

from topotrain.config.job import ConfigError, Job, OnFailure
from topotrain.config.topology import Address, Topology
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


@dataclass(frozen=True, slots=True)
class _Host:
    """The part of a job that is lost with one host.

    all_back: the whole job goes back to a snapshot. groups: these stand still, and nothing else.
    """

    all_back: bool
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class HostFailures:
    """Failures of the hosts of one job.

    Attributes:
        job: the job.
        topology: where its processes are.
        machines: the hosts, of which one fails after `mtbf_s` in the mean.
        probe: of the program. Its start is part of each pause, and its model is in each snapshot.
        step_s: the usual time of a step.
    """

    job: Job
    topology: Topology
    machines: Machines
    probe: Probe
    step_s: float

    def goodput(self) -> float | None:
        """Return the share of the steps that failures and snapshots leave.

        None: no failures were asked for.

        Raises:
            ConfigError: the job ends with a failure, or begins anew.
        """
        mtbf_s = self.machines.mtbf_s
        if mtbf_s is None:
            return None
        if self.job.on_failure is not OnFailure.kContinue:
            accepted = "needs on_failure: kContinue: this job ends with its first failure"
            raise ConfigError("--mtbf", f"{mtbf_s:g} s", accepted)
        hosts = self._hosts()
        back = sum(host.all_back for host in hosts)
        interval_s = self._snapshot_interval_s()
        if back and not interval_s:
            accepted = "must be above 0 with --mtbf: without snapshots a failure starts the job from its beginning"
            raise ConfigError("snapshot_s", f"{self.job.snapshot_s:g}", accepted)
        pause_s = NOTICE_S + self.probe.start_s
        # The failures of a second of training, each times its seconds. After a snapshot half an interval is lost.
        common = back * (pause_s + interval_s / 2) / mtbf_s
        own = [count * pause_s / mtbf_s for count in self._pauses(hosts)]
        left = sum(1 / (1 + common + each) for each in own) / len(own)
        return left * self._share_beside_snapshots(interval_s)

    def _pauses(self, hosts: list[_Host]) -> list[int]:
        """Return for each group how many hosts pause it, and nothing else, when they fail."""
        if self._all_wait:
            return [sum(bool(host.groups) for host in hosts)]
        found = [0] * self.topology.worker_groups
        for host in hosts:
            for group in host.groups:
                found[group] += 1
        return found

    @property
    def _all_wait(self) -> bool:
        """Whether no group makes more than some steps without the others."""
        cluster = self.job.cluster
        return cluster.max_staleness is not None or (cluster.outer is not None and not cluster.quorum)

    def _snapshot_interval_s(self) -> float:
        """Seconds between two snapshots; 0: there are none."""
        intervals = (self.job.snapshot_s, self.job.checkpoint_freq * self.step_s)
        return min((each for each in intervals if each > 0), default=0.0)

    def _share_beside_snapshots(self, interval_s: float) -> float:
        if not interval_s:
            return 1.0
        model_bytes = sum(parameter.nbytes for parameter in self.probe.model)
        cost_s = SNAPSHOT_S_PER_BYTE * model_bytes * (1 + self.probe.optimizer.state_factor)
        return interval_s / (interval_s + cost_s)

    def _hosts(self) -> list[_Host]:
        servers = (each for group in range(self.topology.server_groups) for each in self.topology.servers(group))
        with_servers = set(map(self._number, servers))
        groups: dict[int, set[int]] = {host: set() for host in with_servers}
        for group in range(self.topology.worker_groups):
            for worker in self.topology.workers(group):
                groups.setdefault(self._number(worker), set()).add(group)
        return [self._host(host in with_servers, its) for host, its in groups.items()]

    def _host(self, has_server: bool, groups: set[int]) -> _Host:
        all_back = has_server or any(leave_refusal(self.job, self.topology, group) for group in groups)
        return _Host(all_back, frozenset() if all_back else frozenset(groups))

    def _number(self, process: Address) -> int:
        return self.machines.host_of(self.topology, process)
