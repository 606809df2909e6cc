"""Simulated job with faults: deaths and restarts, pauses, and lost connections.

Every batch has its own cell in each parameter, for each worker of the group that reads it. The gradient there is -1,
gradients are summed, and SGD has rate 1. At the end every cell must be exactly 1; otherwise a batch was lost or counted
twice. In a snapshot the cells of all listed batches must be 1, and all others 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, PeerLost
from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.elastic.eligibility import singly
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH
from topotrain.launch.runtime.process_host import peers
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.tools.simulator.fault_schedule import WEATHERS, Fault, FaultKind, FaultSchedule
from topotrain.tools.simulator.sim_cluster import SimCluster, SimWorker, parameters
from topotrain.tools.simulator.sim_disks import PublishedSnapshot, SimDisks, passes_of
from topotrain.tools.simulator.sim_network import NetworkFaults, SimulatedTransport
from topotrain.tools.simulator.sim_processes import CrashableTransport, CrashableWaiter, Killed, WorkerProcess
from topotrain.tools.simulator.worker_observer import InvariantViolated, WorkerObserver
from topotrain.training.data.batch_ranges import left
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.map_dataset import STATIC, LeaseIterator

LONG = 10.0
"""Virtual seconds after the last fault, several times more than the slowest of these jobs needs."""


class _Crashed(BaseException):
    """All processes of the job are gone."""


class TrialScript:
    """The script of one simulated worker process.

    Args:
        trial: the simulation.
        worker: the worker.
        process: its process, which may be dead.
    """

    def __init__(self, trial: "Trial", worker: SimWorker, process: WorkerProcess) -> None:
        self._trial, self._worker, self._process = trial, worker, process
        self._workers = trial.topology.workers_per_group
        self.final: list[torch.Tensor] = []
        """The final values, as worker (0,0) sees them."""

    def run(self) -> None:
        """Read all batches, with one step for each."""
        trial, worker, process, workers = self._trial, self._worker, self._process, self._workers
        witness = WorkerObserver(
            f"{worker.me} of incarnation {process.incarnation}", trial.batches * trial.epochs * workers
        )
        worker.open(0.0)
        if trial.singly:
            self._train_singly(witness)
            self._finish()
            return
        snapshot = 0  # the snapshot that needs this worker's state
        for epoch in self._epochs:
            begins = True
            for stream, seq, number in self._batches(epoch):
                if begins and trial.schedule.every:
                    worker.door.extension(WorkerStateClient).save(EPOCH, passes_of(epoch))
                if snapshot:
                    worker.door.extension(WorkerStateClient).save(snapshot, passes_of(epoch))
                begins = False
                worker.sleep(0.0, 0.004)
                if process.over:
                    raise Killed
                batch = epoch * trial.batches + number
                witness.look(worker.values())
                outcome = worker.step(
                    self._gradient(batch * workers + worker.me.index), marks=(stream, seq, seq), samples=1
                )
                snapshot = outcome.snapshot
                if not process.over:
                    trial.committed(worker.me)
                    witness.did(range(batch * workers, (batch + 1) * workers))
                    witness.look(worker.values())
                if outcome.leaves:
                    trial.leave(process)
            if worker.door.extension(DataClient).leaves:
                trial.leave(process)
        if snapshot:
            worker.door.extension(WorkerStateClient).save(snapshot, passes_of(trial.epochs))
        self._finish()

    def _train_singly(self, witness: WorkerObserver) -> None:
        """Train with backup workers.

        Each worker reads its own batches, some of them again, and joins the others after each epoch.
        """
        trial, worker, process, workers = self._trial, self._worker, self._process, self._workers
        me = worker.me.index
        if process.incarnation:
            worker.go_on_at(worker.door.extension(BackupWorkersClient).catch_up().next)
        for epoch in self._epochs:
            stream = (epoch << 32) | STATIC | me
            mine = self._unread(epoch, trial.batches * workers)[me::workers]
            number = worker.door.extension(DataClient).applied(stream)
            while number < len(mine):
                worker.sleep(0.0, 0.004)
                if process.over:
                    raise Killed
                cell = epoch * trial.batches * workers + mine[number]
                witness.look(worker.values())
                outcome = worker.step(self._gradient(cell), marks=(stream, number, number), samples=1)
                if outcome.late:
                    worker.go_on_at(outcome.next)
                elif not process.over:
                    number += 1
                    trial.committed(worker.me)
                    witness.did([cell])
                    witness.look(worker.values())
            worker.go_on_at(worker.door.extension(BackupWorkersClient).catch_up(epoch).next)

    @property
    def _epochs(self) -> range:
        """The epochs that are not over."""
        resumed = self._trial.resumed
        return range(0 if resumed is None else resumed.first, self._trial.epochs)

    def _unread(self, epoch: int, batches: int) -> list[int]:
        """Return the batches of an epoch that earlier starts have not applied."""
        resumed = self._trial.resumed
        return list(left(range(batches), () if resumed is None else resumed.runs(epoch)))

    def _finish(self) -> None:
        worker = self._worker
        worker.finish()
        if worker.me == (Role.WORKER, 0, 0):
            worker.door.values.fetch_final()
            worker.door.buffers.final()
            self.final = worker.values()

    def _batches(self, epoch: int) -> Iterator[tuple[int, int, int]]:
        trial, group, door = self._trial, self._worker.me.group, self._worker.door
        units = self._unread(epoch, trial.batches)
        if trial.mode == "static":
            stream = (epoch << 32) | STATIC | group
            mine = units[group :: trial.topology.worker_groups]
            for seq in range(door.extension(DataClient).applied(stream), len(mine)):
                yield stream, seq, mine[seq]
            return
        leases = LeaseIterator(door.extension(DataClient), epoch, len(units), 0)
        while leases.at < leases.last or leases.ask(wait=False) or leases.ask(wait=True):
            place = leases.take()
            yield place.stream, place.seq, units[place.number]
            leases.passed = place.ordinal + place.last  # the batch is over once the next one is asked for

    def _gradient(self, cell: int) -> list[torch.Tensor]:
        found = [torch.zeros(p.shape) for p in self._trial.map.parameters]
        for part in found:
            part[cell] = -1.0
        return found


class Trial(SimCluster):
    """A simulated cluster with faults.

    Args:
        job, seed: as for `SimCluster`.
        schedule: the faults, and the name of the network's faults.
        weather: the network's faults instead of the schedule's.
        before: the trial that crashed, of which this is the next start.
    """

    script_class = TrialScript

    def __init__(
        self,
        job: Job,
        seed: int,
        schedule: FaultSchedule,
        weather: NetworkFaults | None = None,
        before: "Trial | None" = None,
    ) -> None:
        self.lives: dict[Address, WorkerProcess] = {}
        self.batches, self.epochs, self.mode, self.tells = (
            schedule.batches,
            schedule.epochs,
            schedule.mode,
            schedule.tells,
        )
        self.singly = singly(job)
        self._faults = list(dict.fromkeys(schedule.faults))
        self._left = {fault: fault.after for fault in self._faults}
        self._aways: dict[WorkerProcess, float] = {}  # of processes that lose a connection
        self.kills = 0
        self.commits: dict[int, list[float]] = {}
        self.births: list[tuple[float, int]] = []
        self.deaths: list[tuple[float, int]] = []
        self.final: list[torch.Tensor] = []
        self.log: list[tuple[float, Fault]] = []  # the faults so far, with their times
        self.crashed = False
        self._published = 0  # by starts before this one
        self.schedule, self._weather = schedule, weather
        self.archive: SimDisks | None = None
        self.resumed: PublishedSnapshot | None = (
            None if before is None or before.archive is None else before.archive.last
        )
        cells = self.batches * self.epochs * job.cluster.nworkers_per_group
        schema = parameters(cells, max(cells, 150), max(cells, 256))
        super().__init__(job, seed, weather or WEATHERS[schedule.weather], schema, resumed=self.resumed)
        if before is not None:
            self._follow(before)
        if not snapshots_of(self.server(0, 0)).refusal:
            self.archive = SimDisks(self, self, self.resumed)
        self._open()

    def _follow(self, before: "Trial") -> None:
        """Take over time, random state, and statistics from the crashed trial."""
        self.sim.go_on_from(before.sim)
        self.random.setstate(before.random.getstate())
        self.kills, self.log, self.commits = before.kills, before.log, before.commits
        self.births, self.deaths, self._published = before.births, before.deaths, before.snapshots

    @property
    def snapshots(self) -> int:
        """The number of snapshots that were published and verified."""
        return self._published + (0 if self.archive is None else self.archive.published)

    def again(self) -> "Trial":
        """Return the next start of the job after a crash.

        It resumes from the newest snapshot, or starts at the beginning.
        """
        return Trial(self.job, self.sim.seed, self._left_over, self._weather, self)

    @property
    def _left_over(self) -> FaultSchedule:
        """The schedule with the faults that have not happened yet."""
        return replace(self.schedule, faults=tuple(self._faults))

    # --- how it is made ------------------------------------------------------------------------------------------

    def _wire(self, weather: NetworkFaults | None) -> SimulatedTransport:
        self.road = CrashableTransport(self.sim, self.lives, weather)
        return self.road

    def _door(self, me: Address) -> Client:
        known = self.lives.get(me)
        life = self.lives[me] = WorkerProcess(me, 0 if known is None else known.incarnation + 1)

        def say(to: Address, message: m.Message) -> None:
            self._meet(life, message)
            if life.over:
                raise Killed
            life.on_send()
            self.wire.send(me, to, message)

        waiter, extensions = CrashableWaiter(life, self.sim), client_extensions(self.topology)
        door = Client(me, self.topology, say, waiter, incarnation=life.incarnation, extensions=extensions)
        self.road.settle(me, door)
        for server in {*door.channel.servers, door.channel.first_server}:
            self.wire.connect(me, server, "")
        return door

    def _open(self) -> None:
        """Start the servers at random times.

        A server connects to a peer when both have started, and then admits workers.
        """
        within = self.schedule.opens
        there = {me: self.sim.now + (self.sim.random.uniform(0.0, within) if within else 0.0) for me in self.houses}
        self._opens = dict(there)
        for me in self.houses:
            for peer in peers(me, self.topology):
                time = max(there[me], there[peer])
                self._opens[me] = max(self._opens[me], time)
                if time > self.sim.now:
                    self.sim.at(time, lambda me=me, peer=peer: self._call(me, peer))  # type: ignore[misc]
                else:
                    self.wire.connect(me, peer, "")

    def _call(self, me: Address, peer: Address) -> None:
        """Connect a server to another one.

        A shard asks its coordinator for missed messages.
        """
        self.wire.connect(me, peer, "")
        if me.group == peer.group:
            house = self.houses[me]
            self.wire.awake(lambda: house.send(house.server.reconnected()), me)

    def _meet_servers(self) -> None:
        """Do nothing: servers connect to each other when they start."""

    # --- bad luck ------------------------------------------------------------------------------------------------

    def _meet(self, life: WorkerProcess, message: m.Message) -> None:
        """Execute the faults that are due at this message, before it is sent."""
        if life.over:
            return
        for fault in list(self._faults):
            theirs = (fault.group, fault.index) == life.me[1:] and fault.incarnation == life.incarnation
            if fault.at < 0 and theirs and isinstance(message, fault.kind):
                self._left[fault] -= 1
                if self._left[fault] < 0:
                    self.befall(fault)

    def befall(self, fault: Fault) -> None:
        """Execute a fault now."""
        if fault not in self._faults:
            return
        # Each fault happens once, also if its condition holds again in a later incarnation.
        self._faults.remove(fault)
        self.log.append((self.sim.now, fault))
        if fault.what is FaultKind.KILL:
            self.kill(fault.group, fault.away, fault.index)
        elif fault.what is FaultKind.CUT:
            self._cut(fault)
        elif fault.what is FaultKind.PAUSE:
            paused = Address(Role.WORKER, fault.group, fault.index)
            if fault.server >= 0:
                paused = self.doors[paused].channel.servers[fault.server]
            self.wire.pause(paused)
            self.sim.at(self.sim.now + fault.away, lambda: self.wire.resume(paused))
        elif fault.what is FaultKind.CRASH:
            raise _Crashed
        elif self.archive is not None:
            for _ in range(3):
                self.archive.ask()

    def _tick(self) -> None:
        """Request snapshots as the clock of the host of server (0,0) does."""
        if self.archive is not None and not all(life.over for life in self.lives.values()):
            self.archive.ask()
            self.sim.at(self.sim.now + self.schedule.every, self._tick)

    def kill(self, group: int, away: float, index: int = 0) -> None:
        """Kill all processes of a group, or one process.

        They restart after `away` seconds, unless their scripts have ended.
        """
        if not all(self.lives[me].over for me in self._fellows(group, index)):
            self._kill(self._fellows(group, index), away)

    def _fellows(self, group: int, index: int) -> tuple[Address, ...]:
        """Return the workers that die together with this one."""
        return (Address(Role.WORKER, group, index),) if self.singly else self.topology.workers(group)

    def _kill(self, fellows: tuple[Address, ...], away: float) -> None:
        self.kills += 1
        self.deaths.append((self.sim.now, fellows[0].group))
        for me in fellows:
            life, door = self.lives[me], self.doors[me]
            self.wire.resume(me)
            for server in sorted({*door.channel.servers, door.channel.first_server}) if not life.over else ():
                self._later(lambda life=life, server=server: self._end(life, server))  # type: ignore[misc]
            life.kill()
        lives = [self.lives[me] for me in fellows]

        def again() -> None:
            if [self.lives[me] for me in fellows] == lives:
                self._bear(fellows)

        self.sim.at(self.sim.now + away, again)

    def _cut(self, fault: Fault) -> None:
        worker = Address(Role.WORKER, fault.group, fault.index)
        life, door = self.lives[worker], self.doors[worker]
        if life.over:
            return
        server = door.channel.servers[fault.server]

        def notice() -> None:
            if self.lives[worker] is life and life.over and not life.dead and worker != self.workers[0]:
                self._kill(self._fellows(*worker[1:]), fault.away)  # its last messages are lost, so it has failed
            door.lost(server, "the connection was cut")

        self._aways[life] = fault.away
        self._later(lambda: self._end(life, server))
        self._later(lambda: self.wire.awake(notice, worker))

    def _later(self, do: Callable[[], None]) -> None:
        self.sim.at(self.sim.now + self.sim.random.uniform(*self.wire.weather.delay), do)

    def _end(self, life: WorkerProcess, server: Address) -> None:
        """Deliver the end of a connection to a server."""
        if self.road.cut.get((life.me, server)) is not life and self.lives[life.me] is life:
            self.road.cut[life.me, server] = life
            if self.tells and life.came:
                house = self.houses[server]
                self.wire.awake(lambda: house.send(house.server.lost(life.me)), server)

    def _bear(self, fellows: tuple[Address, ...]) -> None:
        self.births.append((self.sim.now, fellows[0].group))
        for me in fellows:
            for server in sorted({*self.doors[me].channel.servers, self.doors[me].channel.first_server}):
                self._end(self.lives[me], server)  # replaces its connection, if the server has not noticed the end
            self.doors[me] = self._door(me)
            self._start(me)

    def _start(self, me: Address) -> None:
        life, door = self.lives[me], self.doors[me]

        def live() -> None:
            try:
                opens = max(self._opens[server] for server in {*door.channel.servers, door.channel.first_server})
                if opens > self.sim.now:
                    self.sim.sleep(opens - self.sim.now)
                if life.over:
                    raise Killed
                life.admit()
                if life.incarnation:
                    door.rejoin.announce()
                script = self.script_class(self, SimWorker(self, me, self.singly), life)
                script.run()
                self.final = script.final or self.final
                life.finish()
            except Killed:
                pass
            except PeerLost:
                self.kill(me.group, self._aways[life], me.index)

        self.sim.actor(f"{me} of incarnation {life.incarnation}", live)

    def run(self) -> "Trial":
        """Run until the end, or until a crash.

        Raises InvariantViolated, Deadlock, and the errors of servers and workers.
        """
        for me in self.workers:
            self._start(me)
        if self.schedule.every:
            self.sim.at(self.sim.now + self.schedule.every, self._tick)
        for fault in list(self._faults):
            if fault.at >= 0:
                self.sim.at(fault.at, lambda fault=fault: self.befall(fault))  # type: ignore[misc]
        torments = sum(fault.away + max(fault.at, 0.0) for fault in self._faults)
        try:
            self.sim.run(self.sim.now + LONG + torments)
        except _Crashed:
            self.crashed = True
        if self.crashed:
            return self
        for me, house in self.houses.items():
            if house.server.decisions.undecided:
                raise InvariantViolated(
                    f"{me} still waits for votes about {house.server.decisions.undecided} steps after the end"
                )
        return self

    def committed(self, worker: Address) -> None:
        """Record the time of a step."""
        self.commits.setdefault(worker.group, []).append(self.sim.now)

    def leave(self, process: WorkerProcess) -> None:
        """End a worker of a group that was asked to leave."""
        raise InvariantViolated(f"{process.me} leaves without a request")

    def wrong(self) -> list[tuple[int, int, float]]:
        """Return (parameter, cell, value) of all cells that are not 1.

        All are wrong if worker (0,0) has not finished.
        """
        cells = self.batches * self.epochs * self.topology.workers_per_group
        if not self.final:
            return [(-1, -1, 0.0)]
        return [
            (index, cell, float(part[cell]))
            for index, part in enumerate(self.final)
            for cell in range(cells)
            if float(part[cell]) != 1.0
        ]
