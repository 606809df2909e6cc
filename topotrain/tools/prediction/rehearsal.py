"""A whole job in virtual time, with the costs of a probe.

Its servers, clients and workers are those of the product. No rule of the product is written here a second time.
Replies, their order and which process waits for which come from the product's code. Only the transport, the cores, the
clock and the script's computing are simulated.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from topotrain.config.job import Compression, ConfigError, Job, TransportChoice
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.client.client_context import Waiter
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.profiling.spans import ServerRecorder, WorkerRecorder
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.launch.runtime.server_composition import make_server
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES
from topotrain.tools.prediction.rehearsed.counted_operations import WorkMeter
from topotrain.tools.prediction.rehearsed.message_records import MessageRecords
from topotrain.tools.prediction.rehearsed.process_work import ProcessWork, VirtualClock
from topotrain.tools.prediction.rehearsed.rehearsed_network import Hosts, RehearsedTransport
from topotrain.tools.prediction.rehearsed.rehearsed_worker import RehearsedWorker
from topotrain.tools.probe.probe_file import Probe
from topotrain.tools.simulator.sim_cluster import SimCluster, SimServer
from topotrain.tools.simulator.sim_network import SimSender, SimulatedTransport, StillRuns

WARM_UP = 3
"""Steps of each worker before the measured ones."""
MEASURED = ((8, 24), (24, 12), (MOST_PROCESSES, 6))
"""Workers and servers at most, and the measured steps of each worker then."""
MOST_TIMES = 4
"""A rehearsal ends after so many times the steps that all workers together would make if they were equally fast.

A worker that is slower than this by comparison may have made no measured step then.
"""
_LIMIT_S, _YEAR_S = 1e9, 365.25 * 86400


Stepped = Callable[[int, int], None]
"""Is called at each step with the steps of all workers so far, and those after which the rehearsal ends."""


@dataclass(frozen=True, slots=True)
class Use:
    """For how many seconds each resource was busy, up to a time."""

    time: float
    busy: Mapping[str, float]


class _Enough(BaseException):
    """All workers have made their steps, or the job as a whole has made enough."""


class RehearsedServer(SimServer):
    """A server with messages that take time."""

    def __init__(self, server: Server, transport: SimulatedTransport, work: ProcessWork) -> None:
        super().__init__(server, transport)
        self.work = work

    def handle(self, sender: Address, message: Message) -> None:
        """Handle a message. One of the server's own timer waits for its turn."""
        if self.work.handling:
            super().handle(sender, message)
        else:
            self.work.receive(0.0, lambda: self.handle(sender, message))


class Rehearsal(SimCluster):
    """The rehearsal of one job that `rehearsable.check` accepts.

    traced: the spans of the second measured step are kept.
    """

    def __init__(
        self,
        job: Job,
        topology: Topology,
        probe: Probe,
        machines: Machines,
        seed: int,
        traced: bool,
        stepped: Stepped,
    ) -> None:
        self.probe, self.machines = probe, machines
        self._traced, self._stepped = traced, stepped
        self._made = 0
        self.warm: Use | None = None
        """When all workers had made their first steps, or the job as a whole enough of them."""
        self.recorders: dict[Address, WorkerRecorder | ServerRecorder] = {}
        self.work: dict[Address, ProcessWork] = {}
        self.shared = job.cluster.transport is not TransportChoice.kTcp
        super().__init__(job, topology, seed, probe.schema())
        factors = machines.stragglers
        self.scripts = [
            RehearsedWorker(me, job, topology, self.clients[me], self.work[me], probe, factors.get(number, 1.0), seed)
            for number, me in enumerate(self.workers)
        ]
        for script in self.scripts if traced else ():
            recorder = self.recorders[script.me] = WorkerRecorder(self._traced_step, script.clock)
            self.clients[script.me].channel.record_spans(recorder)

    # --- how it is made ------------------------------------------------------------------------------------------

    def _make_transport(self) -> SimulatedTransport:
        topology = self.topology
        self.hosts = Hosts(self.sim, topology, self.machines, self.probe)
        self.messages = MessageRecords(topology.worker_groups == 1)
        coded = topology.cluster.compression is not Compression.kNone
        for unit in topology.units:
            for me in (*unit.workers, *unit.servers):
                # With inline servers the worker's thread does the work of its server.
                process = Address(Role.WORKER, 0, me.index) if topology.inline else me
                if process not in self.work:
                    meters = WorkMeter(self.probe, coded), WorkMeter(self.probe, coded, optimizes=False)
                    cores = self.hosts.cores_of(process)
                    self.work[process] = ProcessWork(self.sim, cores, meters, topology.inline)
                self.work[me] = self.work[process]
        return RehearsedTransport(self.sim, self.probe, self.hosts, self.work, self.messages)

    def _make_server(self, me: Address) -> SimServer:
        sender = SimSender(self.transport, me)
        server = make_server(me, self.job, self.topology, PrivateMemory(), self.shared, sender)
        made = RehearsedServer(server, self.transport, self.work[me])
        if self._traced:
            recorder = ServerRecorder(self._traced_step, VirtualClock(made.work), str(me), server.groups)
            self.recorders[me] = recorder
            server.record_spans(recorder)
        return made

    def _waiter(self, me: Address) -> Waiter:
        return self.work[me]

    # --- how it runs -----------------------------------------------------------------------------------------------

    @property
    def measured(self) -> range:
        """The numbers of a worker's own steps that are measured at least."""
        cluster = self.job.cluster
        period = max(1, cluster.sync_freq, cluster.n_push, cluster.n_fetch)
        few = next(steps for most, steps in MEASURED if len(self.work) <= most)
        # Whole rounds.
        first = -(-WARM_UP // period) * period
        return range(first, first + -(-few // period) * period)

    @property
    def _traced_step(self) -> int:
        return self.measured.start + 2

    def _step_over(self) -> None:
        self._made += 1
        self._stepped(self._made, self._most(self.measured.stop))
        if self.warm is None and self._is_over(self.measured.start):
            self.warm = self.use()
        if self._is_over(self.measured.stop):
            raise _Enough

    def _is_over(self, steps: int) -> bool:
        """Whether each worker has made so many steps, or all together enough for it."""
        return self._made >= self._most(steps) or all(len(each.records) >= steps for each in self.scripts)

    def _most(self, steps: int) -> int:
        return MOST_TIMES * len(self.scripts) * steps

    def use(self) -> Use:
        # Of several cores each counts its part.
        found = {self._name(host, "cores"): cores.busy() / cores.count for host, cores in self.hosts.cores.items()}
        for (host, direction), meter in self.hosts.meters.items():
            found[self._name(host, f"link {direction}")] = meter.busy_s
        for me in self.sim_servers:
            found[f"{me}'s thread"] = self.work[me].busy_s
        return Use(self.sim.now, found)

    def _name(self, host: int, what: str) -> str:
        if what == "cores" and self.machines.emulated:
            return "the machine's cores"
        residents = [
            me
            for unit in self.topology.units
            for me in (*unit.workers, *unit.servers)
            if self.topology.host_of(me) == host
        ]
        return f"{residents[0] if len(residents) == 1 else f'host {host}'}'s {what}"

    def run(self) -> "Rehearsal":
        """Run until all workers have made their steps, or the job enough of them.

        Raises ConfigError where its steps take years.
        """
        for script in self.scripts:
            self.sim.actor(str(script.me), lambda script=script: script.run(self._step_over))  # type: ignore[misc]
        try:
            with suppress(_Enough):
                self.sim.run(_LIMIT_S)
        except StillRuns:
            accepted = f"some steps of this job would take more than {_LIMIT_S / _YEAR_S:.0f} years on these machines"
            raise ConfigError("prediction", None, accepted) from None
        return self
