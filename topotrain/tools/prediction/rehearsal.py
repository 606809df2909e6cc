"""A whole job in virtual time, with the costs of a probe.

Its servers, clients and workers are those of the product. No rule of the product is written here a second time.
Replies, their order and which process waits for which come from the product's code. Only the transport, the cores, the
clock and the script's computing are simulated.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median

from topotrain.config.job import Compression, ConfigError, Job, TransportChoice
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.client.client_context import Waiter
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.profiling.spans import ServerRecorder, WorkerRecorder
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.launch.runtime.server_composition import make_server
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
from topotrain.tools.prediction.process_work import ProcessWork, VirtualClock, WorkMeter
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES, changes, expected_error, goodput, processes_of
from topotrain.tools.prediction.rehearsed_network import Hosts, MessageRecords, RehearsedTransport
from topotrain.tools.prediction.rehearsed_worker import RehearsedWorker, StepRecord
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
_SHOWN_WAIT_S = 1e-6

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

    def run(self) -> None:
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

    # --- what it shows ---------------------------------------------------------------------------------------------

    def prediction(self, memory: Sequence[ProcessMemory]) -> Prediction:
        """Return the prediction, when it has run.

        Raises ConfigError where failures end the job.
        """
        job, topology = self.job, self.topology
        steps = [record for script in self.scripts for record in self._measured(script)]
        times = sorted(record.ended - record.begun for record in steps)
        parts, waits = self._parts(len(steps))
        begun = max(script.records[0].begun for script in self.scripts if script.records)
        step_s = median(times)
        return Prediction(
            framework=topology.framework,
            processes=processes_of(topology),
            step_s=step_s,
            step_p95_s=quantile(times, 0.95),
            samples_per_s=sum(script.samples * self._rate(script, step_s) for script in self.scripts),
            parts=parts,
            waits=waits,
            busiest=self._busiest(),
            links=tuple(self._links(len(steps))),
            memory=tuple(memory),
            staleness=_staleness(steps),
            start_s=self.probe.start_s + begun,
            goodput=goodput(job, topology, self.machines, self.probe, step_s),
            error=expected_error(job, self.machines, topology, self.probe.machine.cores),
            same_as_one_process=not changes(job),
            seed=self.sim.seed,
        )

    def _measured(self, script: RehearsedWorker) -> Sequence[StepRecord]:
        return script.records[self.measured.start :]

    def _counted(self, script: RehearsedWorker) -> Sequence[StepRecord]:
        """Return the steps that count for the rates of a worker.

        Of a slow one they are all but its first one.
        """
        return self._measured(script) or script.records[1:]

    def _rate(self, script: RehearsedWorker, usual_s: float) -> float:
        """Return the steps per second of a worker. usual_s: of a step of all workers."""
        counted = self._counted(script)
        if counted:
            return sum(not record.late for record in counted) / (counted[-1].ended - counted[0].begun)
        # Too slow for a step in all of the rehearsal: by arithmetic, and as long as the slowest worker of its group.
        group = [each for each in self.scripts if each.me.group == script.me.group]
        return 1.0 / (usual_s + max(each.extra_s for each in group))

    def _parts(self, count: int) -> tuple[StepParts, tuple[Wait, ...]]:
        """Return the parts of a step, and the waits, as means over so many steps."""
        spent: dict[str, float] = defaultdict(float)
        waited: dict[Address, float] = defaultdict(float)
        for script in self.scripts:
            for record in self._measured(script):
                exchange = self.messages.exchange(script.me, record.number) if record.exchanged else ()
                at = record.begun
                for part, moment, who in (
                    ("compute", record.computed, script.me),
                    *exchange,
                    ("pull", record.ended, script.me),
                ):
                    # In their order: what was over before takes no time of its own.
                    until = min(max(at, moment), record.ended)
                    spent[part] += until - at
                    if part == "wait":
                        waited[who] += until - at
                    at = until
        parts = StepParts(**{name: spent[name] / count for name in ("compute", "push", "apply", "pull", "wait")})
        waits = [Wait(str(who), seconds / count) for who, seconds in sorted(waited.items(), key=lambda each: -each[1])]
        return parts, tuple(wait for wait in waits if wait.seconds > _SHOWN_WAIT_S)

    def _busiest(self) -> tuple[BusyResource, ...]:
        before, after = self.warm, self.use()
        assert before is not None
        seconds = max(after.time - before.time, 1e-12)
        shares = {name: (busy - before.busy.get(name, 0.0)) / seconds for name, busy in after.busy.items()}
        ordered = sorted(shares.items(), key=lambda each: -each[1])
        return tuple(BusyResource(name, min(1.0, share)) for name, share in ordered)

    def _links(self, count: int) -> Iterator[LinkLoad]:
        messages, mean = self.messages, count / len(self.scripts)
        begun = self.warm.time if self.warm is not None else 0.0
        scripts = {script.me: script for script in self.scripts}
        for me, to in sorted(messages.sizes.keys() | messages.others.keys()):
            # Of two servers the steps are those of the first worker: they are the same for all, or have no number.
            worker = next((end for end in (me, to) if end.role is Role.WORKER), self.workers[0])
            counted = self._counted(scripts[worker])
            # A worker that makes steps alone exchanges in some of them only.
            exchanged = {record.number for record in counted if record.exchanged}
            numbered = [size for step, sizes in messages.sizes[me, to].items() if step in exchanged for size in sizes]
            rest = [size for time, size in messages.others[me, to] if time >= begun]
            steps = max(1, len(counted))
            sent = len(numbered) / steps + len(rest) / mean
            if sent:
                nbytes = sum(numbered) / steps + sum(rest) / mean
                yield LinkLoad(f"{me} > {to}", nbytes, sent, self.hosts.far(me, to))


def _staleness(steps: Sequence[StepRecord]) -> Staleness:
    seen = sorted(float(value) for record in steps for value in record.staleness)
    return Staleness(fmean(seen), quantile(seen, 0.95), seen[-1]) if seen else Staleness(0.0, 0.0, 0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of sorted values does not exceed."""
    return values[min(len(values) - 1, max(0, round(share * len(values)) - 1))]
