"""A job whose worker groups die at any moment and are started again, whose processes pause, whose connections end.

Every batch has a cell of its own in each parameter, for each worker of the group that reads it: gradient -1 there, a
plain sum, SGD of rate 1. At the end every cell is exactly 1, or something was lost or counted twice. So are the cells
in a snapshot of all batches that it says it has, and all others are 0.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from topotrain import message as m
from topotrain.exchange import Exchange, PeerLost
from topotrain.faults import WEATHERS, Fault, Schedule, What
from topotrain.feeds import STATIC, Leases
from topotrain.job import Job
from topotrain.regrouping import singly
from topotrain.rehearsal import Seat, Town, parameters
from topotrain.snapshotbook import PUBLISHED, WRITTEN, Drop, Publish, Write, texts
from topotrain.topology import Address, Role
from topotrain.wire import Resident
from topotrain.wire.simulated import SimulatedWire, Simulation, Weather
from topotrain.witness import Witness, Wrong

LONG = 10.0
"""Virtual seconds after the last fault, by which the slowest of these jobs is over many times."""


class Killed(BaseException):
    """The process of this worker is gone; no `except Exception` of a script may swallow it."""


@dataclass(eq=False)
class Life:
    """One process of a worker. `said`: messages that it has sent."""

    me: Address
    incarnation: int
    said: int = 0
    over: bool = False  # dead, or its script has ended
    dead: bool = False


class Patience:
    """How a mortal waits (`exchange.Waiter`)."""

    def __init__(self, life: Life, sim: Simulation) -> None:
        self._life, self._sim = life, sim

    def update(self) -> AbstractContextManager[object]:
        """Nobody else is running."""
        return self._sim.update()

    def wait(self, ready: Callable[[], bool]) -> None:
        """As `Simulation.wait`; raises Killed when the life is over."""
        self._sim.wait(lambda: self._life.over or ready())
        if self._life.over:
            raise Killed


class Road(SimulatedWire):
    """A road on which a worker's connections end with its process: what was on them is lost, from some byte on."""

    def __init__(self, trial: "Trial", weather: Weather | None) -> None:
        super().__init__(trial.sim, weather)
        self._trial = trial
        self._newest: dict[tuple[Address, Address], float] = {}
        self.cut: dict[tuple[Address, Address], Life] = {}  # (worker, server) -> the life that is not heard any more

    def _way(self, me: Address, to: Address) -> tuple[Life, tuple[Address, Address]] | None:
        for worker, server in ((me, to), (to, me)):
            if worker.role is Role.WORKER:
                return self._trial.lives[worker], (worker, server)
        return None

    def _depart(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
        now, uniform = self._simulation.now, self._simulation.random.uniform
        if isinstance(message, m.Fail):  # nobody does anything wrong here, but dies
            raise Wrong(f"{me} to {to}: {message.text}")
        time = now + uniform(*self.weather.delay)
        if late:
            time += uniform(0.0, self.weather.late)
        else:
            time = self._last[me, to] = max(time, self._last.get((me, to), 0.0))
        if isinstance(message, m.Return):  # here, too, nothing said before a greeting comes after it
            time = self._last[me, to] = max(time, self._newest.get((me, to), 0.0))
        self._newest[me, to] = max(time, self._newest.get((me, to), 0.0))
        then = self._way(me, to)

        def arrive() -> None:
            now = self._way(me, to)
            if then is None or (now is not None and now[0] is then[0] and self.cut.get(then[1]) is not then[0]):
                self._arrive(me, to, message)

        self._simulation.at(time, lambda: self.awake(arrive, me, to))

    def settle(self, me: Address, resident: Resident) -> None:
        """A process stands in for the one that was there."""
        self._residents[me] = resident


class Archive:
    """The hosts' disks: keep what a snapshot consists of, and compare it with what it says it is."""

    def __init__(self, trial: "Trial") -> None:
        self._trial = trial
        self._values: dict[int, dict[str, torch.Tensor]] = {}
        self._over = 0  # epochs before it were read to their end by the snapshot before: none lists them any more
        self.published = 0
        for me, house in trial.houses.items():
            house.server.snapshots.follow(lambda what, me=me: self._work(me, what))  # type: ignore[misc]

    def ask(self) -> None:
        """A host's clock says that it is time."""
        me = Address(Role.SERVER, 0, 0)
        self._trial.wire.awake(lambda: self._trial.houses[me].handle(me, m.SnapshotAsk()), me)

    def _work(self, me: Address, what: Write | Publish | Drop) -> None:
        if isinstance(what, Drop):
            raise Wrong(f"snapshot {what.number} came to nothing: {what.why}")
        if isinstance(what, Publish):
            self._check(what)
            self._answer(me, texts(what.number, PUBLISHED, {}))
            return
        for slab in what.frozen.values:
            counts = {p.name: p.count for p in self._trial.map.parameters}
            kept = self._values.setdefault(what.number, {})
            whole = kept.setdefault(slab.name, torch.full((counts[slab.name],), torch.nan, dtype=slab.body.dtype))
            whole[slab.lo : slab.lo + slab.body.numel()] = slab.body
        self._answer(me, texts(what.number, WRITTEN, {"server": str(what.server)}))

    def _answer(self, me: Address, said: list[m.SnapshotPart]) -> None:
        def say() -> None:
            for part in said:
                self._trial.houses[me].handle(me, part)

        sim = self._trial.sim
        sim.at(sim.now + sim.random.uniform(0.0, 0.01), lambda: self._trial.wire.awake(say, me))

    def _check(self, what: Publish) -> None:
        self.published += 1
        trial, workers = self._trial, self._trial.topology.workers_per_group
        epoch_cells = trial.batches * workers
        each = 1 if trial.singly else workers  # cells of one batch
        cells = torch.zeros(epoch_cells * trial.epochs)
        cells[: self._over * epoch_cells] = 1.0
        self._over = max(self._over, what.facts["first_epoch"] or 0)
        for epoch, runs in what.facts["epochs"]:
            for first, last in runs:
                # The last unit of a pass may name more than there are.
                cells[epoch * epoch_cells :][first * each : min(last * each, epoch_cells)] = 1.0
        for name, found in self._values.pop(what.number).items():
            if not torch.equal(found[: cells.numel()].to(cells.dtype), cells):
                has = [cell for cell in range(cells.numel()) if found[cell]]
                raise Wrong(f"snapshot {what.number} says it has {what.facts['epochs']}, and {name} has cells {has}")


class Trial(Town):
    """A town whose processes are tormented.

    Args:
        job, seed: as for `Town`.
        schedule: what happens; with it the name of a weather.
        weather: instead of the schedule's.
    """

    def __init__(self, job: Job, seed: int, schedule: Schedule, weather: Weather | None = None) -> None:
        self.lives: dict[Address, Life] = {}
        self.batches, self.epochs, self.mode, self.tells = (
            schedule.batches,
            schedule.epochs,
            schedule.mode,
            schedule.tells,
        )
        self.singly = singly(job)
        self._faults = list(dict.fromkeys(schedule.faults))
        self._left = {fault: fault.after for fault in self._faults}
        self._aways: dict[Life, float] = {}  # of those that lose a connection
        self.kills = 0
        self.commits: dict[int, list[float]] = {}
        self.births: list[tuple[float, int]] = []
        self.deaths: list[tuple[float, int]] = []
        self.final: list[torch.Tensor] = []
        self.log: list[tuple[float, Fault]] = []  # what has befallen it, and when
        cells = self.batches * self.epochs * job.cluster.nworkers_per_group
        super().__init__(job, seed, weather or WEATHERS[schedule.weather], parameters(cells, max(cells, 150), 256))
        self.archive = None if self.server(0, 0).snapshots.refusal else Archive(self)

    # --- how it is made ------------------------------------------------------------------------------------------

    def _wire(self, weather: Weather | None) -> SimulatedWire:
        self.road = Road(self, weather)
        return self.road

    def _door(self, me: Address) -> Exchange:
        known = self.lives.get(me)
        life = self.lives[me] = Life(me, 0 if known is None else known.incarnation + 1)

        def say(to: Address, message: m.Message) -> None:
            self._meet(life, message)
            if life.over:
                raise Killed
            life.said += 1
            self.wire.send(me, to, message)

        door = Exchange(me, self.topology, say, Patience(life, self.sim), incarnation=life.incarnation)
        self.road.settle(me, door)
        for server in {*door.servers, door.desk}:
            self.wire.connect(me, server, "")
        return door

    # --- bad luck ------------------------------------------------------------------------------------------------

    def _meet(self, life: Life, message: m.Message) -> None:
        """What is to happen at just this message happens, before it is said."""
        if life.over:
            return
        for fault in list(self._faults):
            theirs = (fault.group, fault.index) == life.me[1:] and fault.incarnation == life.incarnation
            if fault.at < 0 and theirs and isinstance(message, fault.kind):
                self._left[fault] -= 1
                if self._left[fault] < 0:
                    self.befall(fault)

    def befall(self, fault: Fault) -> None:
        """It happens now."""
        if fault not in self._faults:
            return
        self._faults.remove(fault)
        self.log.append((self.sim.now, fault))
        if fault.what is What.KILL:
            self.kill(fault.group, fault.away, fault.index)
        elif fault.what is What.CUT:
            self._cut(fault)
        elif fault.what is What.PAUSE:
            self._pause(fault)
        elif self.archive is not None:
            for _ in range(3):
                self.archive.ask()

    def kill(self, group: int, away: float, index: int = 0) -> None:
        """All processes of a group, or one, are gone, and come back after a while, unless their scripts have ended."""
        if not all(self.lives[me].over for me in self._fellows(group, index)):
            self._kill(self._fellows(group, index), away)

    def _fellows(self, group: int, index: int) -> tuple[Address, ...]:
        """Who lives and dies with this worker."""
        return (Address(Role.WORKER, group, index),) if self.singly else self.topology.workers(group)

    def _kill(self, fellows: tuple[Address, ...], away: float) -> None:
        self.kills += 1
        self.deaths.append((self.sim.now, fellows[0].group))
        for me in fellows:
            life, door = self.lives[me], self.doors[me]
            self.wire.resume(me)
            for server in sorted({*door.servers, door.desk}) if not life.over else ():
                self._later(lambda life=life, server=server: self._end(life, server))  # type: ignore[misc]
            life.over = life.dead = True
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
        server = door.servers[fault.server]

        def notice() -> None:
            if self.lives[worker] is life and life.over and not life.dead and worker != self.workers[0]:
                self._kill(self._fellows(*worker[1:]), fault.away)  # its last words are lost, and so it has failed
            door.lost(server, "the connection was cut")

        self._aways[life] = fault.away
        self._later(lambda: self._end(life, server))
        self._later(lambda: self.wire.awake(notice, worker))

    def _pause(self, fault: Fault) -> None:
        who = Address(Role.WORKER, fault.group, fault.index)
        if fault.server >= 0:
            who = self.doors[who].servers[fault.server]
        self.wire.pause(who)
        self.sim.at(self.sim.now + fault.away, lambda: self.wire.resume(who))

    def _later(self, do: Callable[[], None]) -> None:
        self.sim.at(self.sim.now + self.sim.random.uniform(*self.wire.weather.delay), do)

    def _end(self, life: Life, server: Address) -> None:
        """The end of a connection comes to a server."""
        if self.road.cut.get((life.me, server)) is not life and self.lives[life.me] is life:
            self.road.cut[life.me, server] = life
            if self.tells:
                house = self.houses[server]
                self.wire.awake(lambda: house.send(house.server.lost(life.me)), server)

    def _bear(self, fellows: tuple[Address, ...]) -> None:
        self.births.append((self.sim.now, fellows[0].group))
        for me in fellows:
            for server in sorted({*self.doors[me].servers, self.doors[me].desk}):
                self._end(self.lives[me], server)  # its connection is replaced, if its end was not noticed before
            self.doors[me] = self._door(me)
            self._start(me)

    def _start(self, me: Address) -> None:
        life, door = self.lives[me], self.doors[me]

        def live() -> None:
            try:
                if life.incarnation:
                    door.come_back()
                self.script(Seat(self, me))
                life.over = True
            except Killed:
                pass
            except PeerLost:
                self.kill(me.group, self._aways[life], me.index)

        self.sim.actor(f"{me} of incarnation {life.incarnation}", live)

    def run(self) -> "Trial":
        """From the start to the end. Raises Wrong, Deadlock, and whatever a server or a worker raises."""
        for me in self.workers:
            self._start(me)
        for fault in list(self._faults):
            if fault.at >= 0:
                self.sim.at(fault.at, lambda fault=fault: self.befall(fault))  # type: ignore[misc]
        torments = sum(fault.away + max(fault.at, 0.0) for fault in self._faults)
        self.sim.run(LONG + torments)
        for me, house in self.houses.items():
            if house.server.undecided:
                raise Wrong(f"{me} still waits for votes about {house.server.undecided} steps, and all is over")
        return self

    # --- what a script does --------------------------------------------------------------------------------------

    def script(self, seat: Seat) -> None:
        """Read all that there is, one step for each batch."""
        life, workers = self.lives[seat.me], self.topology.workers_per_group
        witness = Witness(f"{seat.me} of incarnation {life.incarnation}", self.batches * self.epochs * workers)
        seat.visible = seat.visible and not self.singly
        seat.open(0.0)
        if self.singly:
            self._train_singly(seat, witness)
            self._end_well(seat)
            return
        for epoch in range(self.epochs):
            for stream, seq, number in self._batches(seat, epoch):
                seat.sleep(0.0, 0.004)
                if life.over:
                    raise Killed
                batch = epoch * self.batches + number
                witness.look(seat.values())
                outcome = seat.step(self._gradient(seat, batch), marks=(stream, seq, seq))
                if not life.over:
                    self.commits.setdefault(seat.me.group, []).append(self.sim.now)
                    witness.did(range(batch * workers, (batch + 1) * workers))
                    witness.look(seat.values())
                if outcome.leaves:
                    self._go(life)
            if seat.door.data.leaves:
                self._go(life)
        self._end_well(seat)

    def _train_singly(self, seat: Seat, witness: Witness) -> None:
        """With backup workers each does its own batches, some of them again, and joins the others after each epoch."""
        life, workers, me = self.lives[seat.me], self.topology.workers_per_group, seat.me.index
        if life.incarnation:
            seat.steps = seat.door.catch_up().next
        for epoch in range(self.epochs):
            stream = (epoch << 32) | STATIC | me
            number = seat.door.data.applied(stream)
            while number < self.batches:
                seat.sleep(0.0, 0.004)
                if life.over:
                    raise Killed
                cell = (epoch * self.batches + number) * workers + me
                witness.look(seat.values())
                outcome = seat.step(self._gradient(seat, cell // workers), marks=(stream, number, number))
                if outcome.late:
                    seat.steps = outcome.next
                elif not life.over:
                    number += 1
                    self.commits.setdefault(seat.me.group, []).append(self.sim.now)
                    witness.did([cell])
                    witness.look(seat.values())
            seat.steps = seat.door.catch_up(epoch).next

    def _end_well(self, seat: Seat) -> None:
        seat.finish()
        if seat.me == self.workers[0]:
            seat.door.final_values()
            seat.door.final_buffers()
            self.final = seat.values()

    def _go(self, life: Life) -> None:
        """A worker leaves, since its group was told to."""
        raise Wrong(f"{life.me} leaves, and nobody has told it to")

    def _batches(self, seat: Seat, epoch: int) -> Iterator[tuple[int, int, int]]:
        group, door = seat.me.group, seat.door
        if self.mode == "static":
            stream = (epoch << 32) | STATIC | group
            mine = range(self.batches)[group :: self.topology.worker_groups]
            for seq in range(door.data.applied(stream), len(mine)):
                yield stream, seq, mine[seq]
            return
        leases = Leases(door.data, epoch, self.batches, 0)
        while leases.at < leases.last or leases.ask(wait=False) or leases.ask(wait=True):
            place = leases.take()
            yield place.stream, place.seq, place.number
            leases.passed = place.ordinal + place.last

    def _gradient(self, seat: Seat, batch: int) -> list[torch.Tensor]:
        workers = self.topology.workers_per_group
        found = [torch.zeros(p.shape) for p in self.map.parameters]
        for part in found:
            part[batch * workers + seat.me.index] = -1.0
        return found

    def wrong(self) -> list[tuple[int, int, float]]:
        """(parameter, cell, value) that is not 1; everything is, if worker (0,0) has not come to its end."""
        cells = self.batches * self.epochs * self.topology.workers_per_group
        if not self.final:
            return [(-1, -1, 0.0)]
        return [
            (index, cell, float(part[cell]))
            for index, part in enumerate(self.final)
            for cell in range(cells)
            if float(part[cell]) != 1.0
        ]
