"""Simulated job with faults: deaths and restarts, pauses, lost connections, and groups that leave and join.

Every batch has its own cell in each parameter, for each worker of the group that reads it. The gradient there is -1,
gradients are summed, and SGD has rate 1. At the end every cell must be exactly 1; otherwise a batch was lost or counted
twice. In a snapshot the cells of all listed batches must be 1, and all others 0.

Some scripts also assign the cells of their batches in one more parameter (ASSIGNED), before each step.

The launcher's part (`launch.recovery`) is simulated. The servers are asked before a group leaves or joins. A leaving
group gets a request and a grace period. It is gone when it has no process left, and then the servers are informed.
Other faults in the meantime only make it leave sooner. Every batch still counts exactly once.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from batch_counts import BatchCounts, InvariantViolated
from cell_observers import CellObserver
from fault_schedule import ANY, ASSIGNED, MOVES, NETWORKS, Fault, FaultKind, FaultSchedule
from faulty_cluster import FaultyCluster, SimWorker, parameters
from faulty_network import NetworkFaults
from reports import FunctionSender
from sim_disks import PublishedSnapshot, SimDisks, passes_of
from sim_processes import CrashableTransport, CrashableWaiter, Killed, PeerSender, WorkerProcess
from torch import nn

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, PeerLost
from topotrain.core.client.client_context import StepOutcome
from topotrain.core.model.schema import PrivateMemory
from topotrain.extensions.assignment.assignment_client import AssignmentPlace
from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.elastic.eligibility import in_place_refusal, singly
from topotrain.extensions.elastic.group_departure import GroupDeparture
from topotrain.extensions.elastic.membership_messages import GroupLeaveRequest, GroupLeft, RestartRequest
from topotrain.extensions.in_place_recovery.in_place_client import InPlaceClient
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH
from topotrain.launch.runtime.process_host import peers
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.tools.simulator.sim_cluster import reduction_of
from topotrain.tools.simulator.sim_network import forget_frames
from topotrain.training.data.batch_ranges import left
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.map_dataset import STATIC, LeaseIterator
from topotrain.training.data.sampling import cut
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import Worker, WorkerMemory
from topotrain.training.worker_stats import BatchAccounting

_COORDINATOR = Address(Role.SERVER, 0, 0)
LONG = 10.0
"""Virtual seconds after the last fault, several times more than the slowest of these jobs needs."""


# Not an Exception: the code under test must not catch it.
class _Crashed(BaseException):
    """All processes of the job are gone."""


class TrialScript:
    """The script of one simulated worker process, which may be dead already."""

    def __init__(self, trial: "Trial", worker: SimWorker, process: WorkerProcess) -> None:
        self._trial, self._worker, self._process = trial, worker, process
        self._workers = trial.topology.workers_per_group
        self._absent = self._alone = False
        self._accounting: BatchAccounting | None = None  # of a worker that makes several steps before a commit
        self.final: list[torch.Tensor] = []
        """The final values, as worker (0,0) sees them."""

    def run(self) -> None:
        """Read all batches, with one step for each."""
        trial, worker, process, workers = self._trial, self._worker, self._process, self._workers
        observer = CellObserver(
            f"{worker.me} of incarnation {process.incarnation}",
            trial.batches * trial.epochs * workers,
            trial.counts.exact,
        )
        worker.open(0.0)
        if trial.singly:
            self._train_singly(observer)
            self._finish()
            return
        snapshot = 0  # the snapshot that needs this worker's state
        self._look_for_group()
        for epoch in self._epochs:
            begins = True
            if self._absent and not self._join(epoch):
                continue
            for stream, seq, number in self._batches(epoch, self._alone):
                self._alone = False
                # A real worker stores its state at the begin of an epoch, and at a step that a snapshot names.
                if begins and trial.schedule.every:
                    worker.client.extension(WorkerStateClient).save(EPOCH, passes_of(epoch))
                if snapshot:
                    worker.client.extension(WorkerStateClient).save(snapshot, passes_of(epoch))
                begins = False
                batch = epoch * trial.batches + number
                cells = range(batch * workers, (batch + 1) * workers)
                if trial.schedule.assigns:
                    self._assign(cells, AssignmentPlace(stream, seq, 0))
                outcome = self._step_together(observer, cells, (stream, seq, seq))
                snapshot = outcome.snapshot
                # The step of a process that died in it may count or not.
                if not process.over:
                    self._record(observer, cells)
                if outcome.leaves:
                    trial.leave(process)
            if worker.client.extension(DataClient).leaves:
                trial.leave(process)
        if snapshot:
            worker.client.extension(WorkerStateClient).save(snapshot, passes_of(trial.epochs))
        self._finish()

    def _look_for_group(self) -> None:
        """Note whether the group goes on without this process, which is a new one."""
        in_place = self._worker.me.group in self._trial.in_place
        if self._process.incarnation and in_place:
            self._absent = not self._worker.client.extension(InPlaceClient).group_epoch().joined

    def _join(self, epoch: int) -> bool:
        """Join the group, unless it has read this epoch to its end."""
        client = self._worker.client.extension(InPlaceClient)
        if client.group_epoch().epoch > epoch:
            return False
        self._worker.steps = client.join().step
        # Until it has found a batch: the group may have gone on to the next epoch since the question.
        self._absent, self._alone = False, True
        return True

    def _step_together(self, observer: CellObserver, cells: range, marks: tuple[int, int, int]) -> StepOutcome:
        """Take the step of a batch that is divided among the present workers of the group."""
        worker, client = self._worker, self._worker.client.extension(InPlaceClient) if self._workers > 1 else None
        while True:
            while client is not None and client.dropped(worker.steps):
                self._repeat(client.catch_up())
            members = self._members
            lo, hi = cut(len(cells), len(members))[members.index(worker.me.index)]
            outcome = self._step(observer, cells[lo:hi], marks)
            if not outcome.repeats:
                self._process.stepped = True
                return outcome
            self._trial.repeats += 1
            self._repeat(outcome)

    @property
    def _members(self) -> tuple[int, ...]:
        """The workers among which a batch is divided."""
        known = self._worker.client.extension(InPlaceClient).members if self._workers > 1 else ()
        return known or tuple(range(self._workers))

    def _repeat(self, outcome: StepOutcome) -> None:
        """Go on at the step in which a batch is repeated. Raises PeerLost."""
        if self._trial.schedule.assigns:
            raise PeerLost("a step with an assignment is not repeated")
        self._worker.steps = outcome.next

    def _train_singly(self, observer: CellObserver) -> None:
        """Train with backup workers: each worker reads batches of its own."""
        trial, worker, process, workers = self._trial, self._worker, self._process, self._workers
        me = worker.me.index
        # The others of its group went on meanwhile, so the step to join at is asked for.
        if process.incarnation:
            worker.steps = worker.client.extension(BackupWorkersClient).catch_up().next
        for epoch in self._epochs:
            stream = (epoch << 32) | STATIC | me
            mine = self._unread(epoch, trial.batches * workers)[me::workers]
            number = worker.client.extension(DataClient).applied(stream)
            while number < len(mine):
                cell = epoch * trial.batches * workers + mine[number]
                outcome = self._step(observer, (cell,), (stream, number, number))
                # The group committed this step without the worker, which computes the batch again for a later step.
                if outcome.late:
                    worker.steps = outcome.next
                elif not process.over:
                    number += 1
                    self._record(observer, [cell])
            # A worker that has read its batches early joins the others for the next epoch.
            worker.steps = worker.client.extension(BackupWorkersClient).catch_up(epoch).next

    def _assign(self, cells: range, place: AssignmentPlace) -> None:
        """Assign the cells of a batch.

        With one group each assignment adds 1, so that a repeated one is found.

        Raises:
            PeerLost: a worker of the group is away and would miss it, or the group has lost one.
        """
        if len(self._members) < self._workers:
            raise PeerLost("an assignment is for the whole group")
        trial, values = self._trial, self._worker.values()[ASSIGNED]
        here = slice(cells.start, cells.stop)
        adds = trial.topology.worker_groups == 1 and trial.schedule.mode == "static"
        values[here] = values[here] + 1 if adds else 1
        self._worker.assign(ASSIGNED, values, place)

    def _step(self, observer: CellObserver, cells: Sequence[int], marks: tuple[int, int, int]) -> StepOutcome:
        """Take the step of one batch, with a gradient of -1 in these cells."""
        self._worker.sleep(0.0, 0.004)
        # It may have been killed while it computed.
        if self._process.over:
            raise Killed
        # Before the step, which overwrites values that were wrong for a while.
        observer.check(self._worker.values())
        return self._worker.step(self._gradient(cells), marks=marks, samples=len(cells))

    def _record(self, observer: CellObserver, cells: Sequence[int]) -> None:
        """Count a committed step, and check the values after it."""
        self._trial.committed(self._worker.me)
        observer.made(cells)
        observer.check(self._worker.values())

    @property
    def _epochs(self) -> range:
        """The epochs that are not over."""
        resumed = self._trial.resumed
        return range(0 if resumed is None else resumed.first, self._trial.epochs)

    def _unread(self, epoch: int, batches: int) -> list[int]:
        """Return the batches of an epoch that earlier starts have not applied."""
        resumed = self._trial.resumed
        return list(left(range(batches), () if resumed is None else resumed.runs(epoch)))

    def _finish(self, worker: Worker | None = None) -> None:
        """Finish the script, and take the final values; worker: the product's, which has a model."""
        (worker or self._worker).finish()
        self._take_final(worker)

    def _take_final(self, worker: Worker | None) -> None:
        if self._worker.me == (Role.WORKER, 0, 0):
            self._worker.client.values.fetch_final()
            self._worker.client.buffers.final()
            parts = () if worker is None else range(len(worker.parts.tensors))
            self.final = (
                [worker.buffers.view("params", at).clone() for at in parts] if worker else self._worker.values()
            )

    def _trained(self, model: nn.Module, plain: torch.optim.Optimizer, inner: InnerOptimizer) -> Worker:
        """Return a worker of the product that trains a model alone between rounds."""
        trial, client, memory = self._trial, self._worker.client, WorkerMemory(PrivateMemory())
        parts = describe_model(model, (), inner.optimizers)
        return Worker(self._worker.me, trial.job, trial.topology, parts, (plain,), client, memory, inner)

    def _steps(self, compute: Callable[[], None]) -> Iterator[tuple[int, int, int, int]]:
        """Yield all batches, each when its gradient is computed. Raises Killed."""
        for epoch in self._epochs:
            for batch in self._batches(epoch, False):
                compute()
                if self._process.over:
                    raise Killed
                yield epoch, *batch

    def _batches(self, epoch: int, alone: bool) -> Iterator[tuple[int, int, int]]:
        """Yield the rest of an epoch; alone: the group has gone on without this process."""
        trial, group, client = self._trial, self._worker.me.group, self._worker.client
        units = self._unread(epoch, trial.batches)
        if trial.schedule.mode == "static":
            # Numbered as by `training.data`: with this number the servers return the position of a restarted worker.
            stream = (epoch << 32) | STATIC | group
            mine = units[group :: trial.topology.worker_groups]
            for seq in range(client.extension(DataClient).applied(stream), len(mine)):
                yield stream, seq, mine[seq]
            return
        leases = LeaseIterator(client.extension(DataClient), epoch, len(units), 0, alone, self._accounting)
        while leases.at < leases.last or leases.ask(wait=False) or leases.ask(wait=True):
            place = leases.take()
            yield place.stream, place.seq, units[place.number]
            leases.read(place)  # the batch is over once the next one is asked for

    def _gradient(self, cells: Sequence[int]) -> list[torch.Tensor]:
        found = [torch.zeros(p.shape) for p in self._trial.map.parameters]
        for part in found:
            part[list(cells)] = -1.0
        if self._trial.schedule.assigns:
            found[ASSIGNED].zero_()
        return found


class Trial(FaultyCluster):
    """A simulated cluster with faults.

    network_faults: instead of the schedule's. absent: groups that start later. before: the trial that crashed, of which
    this is the next start.
    """

    script_class = TrialScript
    transport: CrashableTransport
    left_at = -1.0
    """The time at which the last process of a group that left had ended."""

    def __init__(
        self,
        job: Job,
        seed: int,
        schedule: FaultSchedule,
        network_faults: NetworkFaults | None = None,
        absent: Iterable[int] = (),
        before: "Trial | None" = None,
    ) -> None:
        self.absent = set(absent)
        self.worker_processes: dict[Address, WorkerProcess] = {}
        self.batches, self.epochs = schedule.batches, schedule.epochs
        self.singly = singly(job)
        self.counts = BatchCounts(layout(job.cluster))
        self.repeats = 0
        """Steps that a worker has repeated because its group had lost, or got back, another one."""
        self._choices = random.Random(f"{seed} in place")
        self._leaving: dict[int, Fault] = {}
        self._whole: dict[int, int] = {}  # group -> how often all of it was killed
        self._told: dict[int, float] = {}  # group -> when its servers are told of the last restart
        self._numbers: dict[int, int] = {}  # group -> the incarnation of the last restart
        # A fault is its own key, so two equal ones are one.
        self._faults = list(dict.fromkeys(schedule.faults))
        self._left = {fault: fault.after for fault in self._faults}
        self._aways: dict[WorkerProcess, float] = {}  # of processes that lose a connection
        self._forks: dict[Address, float] = {}  # worker that fails to start once -> seconds until its group restarts
        self.kills = 0
        self.commits: dict[int, list[float]] = {}
        self.restarts: list[tuple[float, int]] = []
        self.deaths: list[tuple[float, int]] = []
        self.final: list[torch.Tensor] = []
        self.log: list[tuple[float, Fault]] = []  # the faults so far, with their times
        self.crashed = False
        self._published = 0  # by starts before this one
        self.schedule, self._network_faults = schedule, network_faults
        self.disks: SimDisks | None = None
        self.resumed: PublishedSnapshot | None = None if before is None or before.disks is None else before.disks.last
        cells = self.batches * self.epochs * job.cluster.nworkers_per_group
        # Long enough that several servers hold a part: cuts are at multiples of 64 elements.
        counts = (cells, max(cells, 150), max(cells, 256), *((max(cells, 64),) if schedule.assigns else ()))
        schema = parameters(*counts)
        topology = layout(job.cluster)
        groups = range(topology.worker_groups)
        self.in_place = {group for group in groups if not in_place_refusal(job, topology, group)}
        self._prepare(job, before)
        super().__init__(job, seed, network_faults or NETWORKS[schedule.network], schema, resumed=self.resumed)
        self.transport.observers.append(self._inject_delivered)
        if before is not None:
            self._continue(before)
        # Some layouts cannot take snapshots.
        if not snapshots_of(self.server(0, 0)).refusal:
            self.disks = SimDisks(self, schedule, self.singly, self.resumed)
        self._open()

    def _prepare(self, job: Job, before: "Trial | None") -> None:
        """Make what is needed before the processes are."""

    def _continue(self, before: "Trial") -> None:
        """Take over time, random state, and statistics from the crashed trial."""
        self.sim.now = before.sim.now
        self.sim.random.setstate(before.sim.random.getstate())
        self.random.setstate(before.random.getstate())
        self.kills, self.log, self.commits = before.kills, before.log, before.commits
        self.restarts, self.deaths, self._published = before.restarts, before.deaths, before.snapshots

    @property
    def snapshots(self) -> int:
        """The number of snapshots that were published and verified."""
        return self._published + (0 if self.disks is None else len(self.disks.published))

    def again(self) -> "Trial":
        """Return the next start of the job, from the newest snapshot or the beginning."""
        left = replace(self.schedule, faults=tuple(self._faults))
        return type(self)(self.job, self.sim.seed, left, self._network_faults, self.away, self)

    @property
    def away(self) -> set[int]:
        """The groups without a process, also after a crash."""
        # A group that was leaving at a crash has no process any more.
        return self.absent | self._leaving.keys()

    @property
    def moves(self) -> list[Fault]:
        """The changes of groups in their order, without those that the servers refused."""
        return [fault for _, fault in self.log if fault.what in MOVES]

    # --- how it is made ------------------------------------------------------------------------------------------

    def _make_transport(self) -> CrashableTransport:
        return CrashableTransport(self.sim, self.worker_processes, self._faults_of_network)

    def _make_client(self, me: Address, number: int = 0) -> Client:
        process = self.worker_processes[me] = WorkerProcess(me, number)

        waiter, sender = CrashableWaiter(process, self.sim), FunctionSender(partial(self.say, process))
        gradients, sums = reduction_of(
            self.job, self.topology, (me, number), PeerSender(sender), self.transport, self.present
        )
        client = Client(
            me,
            self.topology,
            sender,
            waiter,
            incarnation=process.incarnation,
            extensions=(*client_extensions(self.topology), *sums),
            gradients=gradients,
        )
        self.transport.replace(me, client)
        for server in {*client.channel.servers, client.channel.first_server}:
            self.transport.connect(me, server, "")
        return client

    def _open(self) -> None:
        """Start the servers at random times."""
        within = self.schedule.opens
        there = {
            me: self.sim.now + (self.sim.random.uniform(0.0, within) if within else 0.0) for me in self.sim_servers
        }
        self._opens = dict(there)
        for me in self.sim_servers:
            for peer in peers(me, self.topology):
                time = max(there[me], there[peer])
                # A server admits workers when all its peers have started and are connected.
                self._opens[me] = max(self._opens[me], time)
                if time > self.sim.now:
                    self.sim.at(time, lambda me=me, peer=peer: _call(self, me, peer))  # type: ignore[misc]
                else:
                    self.transport.connect(me, peer, "")

    def _connect_servers(self) -> None:
        """Do nothing: servers connect to each other when they start."""

    # --- faults --------------------------------------------------------------------------------------------------

    def say(self, process: WorkerProcess, to: Address, message: m.Message) -> None:
        """A process sends a message, and can die at it. Raises Killed when it is over."""
        self.inject_due(process, message)
        if process.over:
            raise Killed
        self.transport.send(process.me, to, message)

    def inject_due(self, process: WorkerProcess, message: m.Message) -> None:
        """Execute the faults that are due at this message, before it is sent."""
        if process.over:
            return
        # A copy: `inject` removes the fault.
        for fault in list(self._faults):
            theirs = (fault.group, fault.index) == process.me[1:] and fault.incarnation == process.incarnation
            if fault.at < 0 and theirs and isinstance(message, fault.kind):
                self._left[fault] -= 1
                if self._left[fault] < 0:
                    self.inject(fault)

    def _inject_delivered(self, sender: Address, to: Address, message: m.Message) -> None:
        """Execute the faults that are due at this message of any process, behind its delivery."""
        for fault in self._faults:
            if fault.incarnation == ANY and isinstance(message, fault.kind):
                self._left[fault] -= 1
                if self._left[fault] < 0:
                    self.sim.at(self.sim.now, partial(self.inject, fault))

    def inject(self, fault: Fault) -> None:
        """Execute a fault now."""
        if fault not in self._faults:
            return
        # Each fault happens once, also if its condition holds again in a later incarnation.
        self._faults.remove(fault)
        if fault.what in MOVES:
            self._move(fault)
            return
        self.log.append((self.sim.now, fault))
        if fault.what is FaultKind.KILL:
            self.kill(fault.group, fault.away, fault.index)
        elif fault.what is FaultKind.FORK:
            self._forks[Address(Role.WORKER, fault.group, fault.index)] = fault.away
        elif fault.what is FaultKind.CUT:
            self._cut(fault)
        elif fault.what is FaultKind.PAUSE:
            paused = Address(Role.WORKER, fault.group, fault.index)
            if fault.server >= 0:
                # Only a server of this worker's group: a pause of another would not hold the worker up.
                paused = self.clients[paused].channel.servers[fault.server]
            self.transport.pause(paused)
            self.sim.at(self.sim.now + fault.away, lambda: self.transport.resume(paused))
        elif fault.what is FaultKind.CRASH:
            raise _Crashed
        elif self.disks is not None:
            # A clock that jumps triggers snapshots at a wrong moment, and several of them.
            for _ in range(3):
                self.disks.ask()

    def _tick(self) -> None:
        """Request snapshots as the clock of the host of server (0,0) does."""
        if self.disks is not None and not all(process.over for process in self.worker_processes.values()):
            self.disks.ask()
            self.sim.at(self.sim.now + self.schedule.every, self._tick)

    def kill(self, group: int, away: float, index: int | None = 0) -> None:
        """Kill a group, or one process; they restart after `away` seconds if not over.

        index: of the process that dies. None: all of the group.
        """
        together = self.topology.workers(group) if index is None else self._killed_together(group, index)
        if not all(self.worker_processes[me].over for me in together):
            self._kill(together, away)

    def _killed_together(self, group: int, index: int) -> tuple[Address, ...]:
        """Return the workers that die together with this one."""
        worker, everyone = Address(Role.WORKER, group, index), self.topology.workers(group)
        others = [self.worker_processes[me] for me in everyone if me != worker]
        there = any(process.stepped and not process.over for process in others)
        # Some scripts break the rules that a repeated step needs.
        survived = group in self.in_place and there and self._choices.random() < self.schedule.survive
        return (worker,) if self.singly or survived else everyone

    def _kill(self, workers: tuple[Address, ...], away: float) -> None:
        group = workers[0].group
        if group in self._leaving:
            self._end_all(group)
            return
        if group in self.absent:
            return
        self.kills += 1
        self.deaths.append((self.sim.now, group))
        for me in workers:
            process, client = self.worker_processes[me], self.clients[me]
            # The messages that a pause holds back must not wait for a dead process.
            self.transport.resume(me)
            for server in sorted({*client.channel.servers, client.channel.first_server}) if not process.over else ():
                self.sim.at(self._notice_time(), lambda process=process, server=server: self._end(process, server))  # type: ignore[misc]
            # Last: only a living process has connections that end.
            process.kill()
        worker_processes = [self.worker_processes[me] for me in workers]
        # The restart of a whole group replaces that of one worker.
        self._whole[group] = turn = self._whole.get(group, 0) + (len(workers) == self.topology.workers_per_group)
        number = self._next_incarnation(workers)

        def again() -> None:
            # Another fault may have restarted some of them already.
            if self._whole[group] == turn and [self.worker_processes[me] for me in workers] == worker_processes:
                self._restart(workers, number)

        self.sim.at(self.sim.now + away, again)

    def _next_incarnation(self, workers: tuple[Address, ...]) -> int:
        """Return the number of a restart, and tell the servers of the group what restarts."""
        group = workers[0].group
        known = [self.worker_processes[me].incarnation for me in self.topology.workers(group)]
        self._numbers[group] = number = max([*known, self._numbers.get(group, 0)]) + 1
        if group in self.in_place:
            index = workers[0].index if len(workers) < self.topology.workers_per_group else -1
            coordinator = Address(Role.SERVER, self.topology.server_group_of(group), 0)
            told, sim_server = RestartRequest(group, number, index), self.sim_servers[coordinator]
            # Commands of a launcher arrive in order, and also late.
            self._told[group] = time = max(self._notice_time(), self._told.get(group, 0.0))
            tell = partial(self.transport.when_resumed, lambda: sim_server.handle(coordinator, told), coordinator)
            self.sim.at(time, tell)
        return number

    def _cut(self, fault: Fault) -> None:
        worker = Address(Role.WORKER, fault.group, fault.index)
        process, client = self.worker_processes[worker], self.clients[worker]
        if process.over:
            return
        server = client.channel.servers[fault.server]

        def notice() -> None:
            # Only worker (0,0) ends with a reply of the servers, so only its last messages have surely arrived.
            if (
                self.worker_processes[worker] is process
                and process.over
                and not process.dead
                and worker != self.workers[0]
            ):
                # Its last messages are lost, so it has failed.
                self._kill(self._killed_together(*worker[1:]), fault.away)
            client.lost(server, "the connection was cut")

        self._aways[process] = fault.away
        # Both ends notice the cut, each at a time of its own.
        self.sim.at(self._notice_time(), lambda: self._end(process, server))
        self.sim.at(self._notice_time(), lambda: self.transport.when_resumed(notice, worker))

    def _notice_time(self) -> float:
        """Draw the time at which a process notices an event now."""
        return self.sim.now + self.sim.random.uniform(*self.transport.network_faults.delay)

    def _end(self, process: WorkerProcess, server: Address) -> None:
        """Deliver the end of a connection to a server."""
        if self.transport.cut.get((process.me, server)) is not process and self.worker_processes[process.me] is process:
            # Once per process: a cut and a death may end the same connection.
            self.transport.cut[process.me, server] = process
            if self.schedule.detects and process.admitted:
                sim_server = self.sim_servers[server]
                self.transport.when_resumed(lambda: sim_server.send(sim_server.server.lost(process.me)), server)

    def _restart(self, workers: tuple[Address, ...], number: int) -> None:
        self._numbers[workers[0].group] = max(number, self._numbers[workers[0].group])
        self.restarts.append((self.sim.now, workers[0].group))
        refused = next((me for me in workers if me in self._forks), None)
        for me in workers:
            for server in sorted({*self.clients[me].channel.servers, self.clients[me].channel.first_server}):
                # replaces its connection, if the server has not noticed the end
                self._end(self.worker_processes[me], server)
            if me != refused:
                self.clients[me] = self._make_client(me, number)
                self._start(me)
        if refused is not None:  # it counts as lost, and the others of its group have started
            self._kill(self._killed_together(*refused[1:]), self._forks.pop(refused))

    def _start(self, me: Address) -> None:
        if me.group in self.absent:
            return
        process, client = self.worker_processes[me], self.clients[me]

        def run_process() -> None:
            try:
                opens = max(self._opens[server] for server in {*client.channel.servers, client.channel.first_server})
                # A real worker retries until its servers listen.
                if opens > self.sim.now:
                    self.sim.sleep(opens - self.sim.now)
                if process.over:
                    raise Killed
                process.admitted = True
                if process.incarnation:
                    client.rejoin.announce()
                script = self.script_class(self, SimWorker(self, me, self.singly), process)
                script.run()
                self.final = script.final or self.final
                process.over = True
            except Killed as killed:
                forget_frames(killed)
            except PeerLost as lost:
                forget_frames(lost)
                # A worker that has lost a server ends, and so does one that cannot repeat a step. Several workers of a
                # group may end, and the launcher restarts it once.
                cut = process in self._aways
                if cut or not process.over:
                    self.kill(me.group, self._aways.get(process, 0.05), me.index if cut else None)

        self.sim.actor(f"{me} of incarnation {process.incarnation}", run_process)

    # --- groups that leave and join ------------------------------------------------------------------------------

    def _move(self, fault: Fault) -> None:
        """Let a group leave or join, unless the servers refuse it. A refused change is not tried again."""
        away, joins = fault.group in self.absent, fault.what is FaultKind.JOIN
        # Only absent groups join and only present ones leave; the servers may refuse, as in a job.
        if fault.group in self._leaving or away is not joins or self._refused(fault):
            return
        self.log.append((self.sim.now, fault))
        if joins:
            self.absent.discard(fault.group)
            workers = self.topology.workers(fault.group)
            self._restart(workers, self._next_incarnation(workers))
        else:
            self._leave(fault)

    def _refused(self, fault: Fault) -> str:
        return self.server(0, 0).extension(GroupDeparture).may_change(fault.group, fault.what.value)

    def _leave(self, fault: Fault) -> None:
        self._leaving[fault.group] = fault
        if fault.what is FaultKind.LOSE:
            self._end_all(fault.group)
            return
        worker_processes = self._processes_of(fault.group)
        again = all(process.dead for process in worker_processes)  # the request is for the processes about to start
        self._send(GroupLeaveRequest(fault.group, self._newest(fault.group) + again))

        def late() -> None:
            # The group may have left, joined and been asked again meanwhile.
            if self._leaving.get(fault.group) is fault:
                self._end_all(fault.group)

        self.sim.at(self.sim.now + fault.away, late)

    def _processes_of(self, group: int) -> list[WorkerProcess]:
        return [self.worker_processes[worker] for worker in self.topology.workers(group)]

    def _newest(self, group: int) -> int:
        """Return the incarnation of the last start of a process of a group."""
        started = max(process.incarnation for process in self._processes_of(group))
        return max(started, self._numbers.get(group, 0))

    def _send(self, message: m.Message) -> None:
        sim_server = self.sim_servers[_COORDINATOR]
        self.transport.when_resumed(lambda: sim_server.handle(_COORDINATOR, message), _COORDINATOR)

    def _end_all(self, group: int) -> None:
        # A worker that is about to restart alone does not start any more.
        self._whole[group] = self._whole.get(group, 0) + 1
        known = self._processes_of(group)
        if all(process.dead for process in known):  # about to restart: the new processes end before they start
            new = (WorkerProcess(process.me, process.incarnation + 1, over=True, dead=True) for process in known)
            self.worker_processes |= {process.me: process for process in new}
        for process in self._processes_of(group):
            if not process.over:
                self._end_one(process)
        self._emptied(group)

    def _end_one(self, process: WorkerProcess) -> None:
        """End one process of a leaving group."""
        process.kill()
        # The messages that a pause holds back must not wait for a process that has ended.
        self.transport.resume(process.me)
        client = self.clients[process.me]
        # Each server notices the end of its connection at a time of its own.
        for server in sorted({*client.channel.servers, client.channel.first_server}):
            self.sim.at(self._notice_time(), partial(self._end, process, server))

    def _emptied(self, group: int) -> None:
        """Inform the servers once a leaving group has no process left."""
        worker_processes = self._processes_of(group)
        if group not in self._leaving or not all(process.over for process in worker_processes):
            return
        del self._leaving[group]
        if any(process.dead for process in worker_processes):  # else its scripts have finished meanwhile
            self.absent.add(group)
            self.left_at = self.sim.now
            # It may arrive before or after the servers notice the ends of connections.
            self.sim.at(self._notice_time(), partial(self._send, GroupLeft(group, self._newest(group) + 1)))

    def leave(self, process: WorkerProcess) -> None:
        """End a worker of a group that was asked to leave."""
        if not process.over:
            self._end_one(process)
            self._emptied(process.me.group)
        # The script of this worker must not run on, as nothing runs after the end of a real process.
        raise Killed

    def run(self) -> "Trial":
        """Run until the end, or until a crash.

        Raises InvariantViolated, Deadlock, and the errors of servers and workers.
        """
        for group in sorted(self.absent):
            for process in self._processes_of(group):
                process.kill()
            # The launcher informs the coordinator as soon as it runs.
            self.sim.at(self._opens[_COORDINATOR], partial(self._send, GroupLeft(group, 0)))
        for me in self.workers:
            self._start(me)
        if self.schedule.every:
            self.sim.at(self.sim.now + self.schedule.every, self._tick)
        for fault in list(self._faults):
            if fault.at >= 0:
                # A time in the past, of an earlier start, means now.
                self.sim.at(fault.at, lambda fault=fault: self.inject(fault))  # type: ignore[misc]
        # Until then a right run may still be waiting for a fault; LONG counts from the last one.
        pauses = sum(fault.away + max(fault.at, 0.0) for fault in self._faults)
        try:
            self.sim.run(self.sim.now + LONG + pauses)
        except _Crashed as crash:
            forget_frames(crash)
            self.crashed = True
        if self.crashed:
            return self
        for me, sim_server in self.sim_servers.items():
            # A run may end well and leave a vote behind, which would hold up a longer job.
            if sim_server.server.decisions.undecided:
                raise InvariantViolated(
                    f"{me} still waits for votes about {sim_server.server.decisions.undecided} steps after the end"
                )
        # Without a result `wrong` says so.
        if self.final:
            self.counts.check_sums(self, self.batches * self.epochs * self.topology.workers_per_group, self.resumed)
        return self

    def committed(self, worker: Address) -> None:
        """Record the time of a step."""
        self.commits.setdefault(worker.group, []).append(self.sim.now)

    def wrong(self) -> list[tuple[int, int, float]]:
        """Return (parameter, cell, value) of all cells that are not 1.

        All are wrong if worker (0,0) has not finished.
        """
        cells = self.batches * self.epochs * self.topology.workers_per_group
        # A cell number of -1 marks a script that never came to its end.
        if not self.final:
            return [(-1, -1, 0.0)]
        return [
            (index, cell, float(part[cell]))
            for index, part in enumerate(map(self.counts.of, self.final))
            for cell in range(cells)
            if float(part[cell]) != 1.0
        ]


def _call(trial: Trial, me: Address, peer: Address) -> None:
    """Connect a server to another one."""
    trial.transport.connect(me, peer, "")
    # A shard asks its coordinator for messages that it has missed.
    if me.group == peer.group:
        sim_server = trial.sim_servers[me]
        trial.transport.when_resumed(lambda: sim_server.send(sim_server.server.reconnected()), me)
