"""A job on the simulated road whose worker groups die at any moment, and are started again with the next incarnation.

Every batch has a cell of its own in each parameter, for each worker of the group that reads it: gradient -1 there, a
plain sum, SGD of rate 1. At the end every cell is exactly 1, or something was lost or counted twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from simulation import Seat, Town, parameters

from topotrain import message as m
from topotrain.exchange import Exchange
from topotrain.feeds import STATIC, Leases
from topotrain.job import Job
from topotrain.topology import Address, Role
from topotrain.wire.simulated import SimulatedWire, Weather


class Killed(BaseException):
    """The process of this worker is gone; no `except Exception` of a script may swallow it."""


@dataclass(eq=False)
class Life:
    """One process of a worker. `said`: messages that it has sent."""

    me: Address
    incarnation: int
    said: int = 0
    over: bool = False  # dead, or its script has ended


@dataclass
class Fate:
    """When a group dies: at the `after`-th message of worker `index` of an incarnation, or at a moment."""

    group: int
    incarnation: int = 0
    index: int = 0
    after: int = -1
    kind: type[m.Message] = m.Message
    at: float = -1.0
    away: float = 0.1  # seconds until the group is started again


class Road(SimulatedWire):
    """A road on which a worker's connections end with its process: what was on them is lost, from some byte on."""

    def __init__(self, town: "Place", weather: Weather | None) -> None:
        super().__init__(town.sim, weather)
        self._town = town
        self._newest: dict[tuple[Address, Address], float] = {}
        self.cut: dict[tuple[Address, Address], Life] = {}  # (worker, server) -> the life that is not heard any more

    def way(self, me: Address, to: Address) -> tuple[Life, tuple[Address, Address]] | None:
        for worker, server in ((me, to), (to, me)):
            if worker.role is Role.WORKER:
                return self._town.lives[worker], (worker, server)
        return None

    def _depart(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
        now, uniform = self._simulation.now, self._simulation.random.uniform
        if isinstance(message, m.Fail):  # nobody does anything wrong here, but dies
            raise AssertionError(f"{me} to {to}: {message.text}")
        time = now + uniform(*self.weather.delay)
        if late:
            time += uniform(0.0, self.weather.late)
        else:
            time = self._last[me, to] = max(time, self._last.get((me, to), 0.0))
        if isinstance(message, m.Return):  # here, too, nothing said before a greeting comes after it
            time = self._last[me, to] = max(time, self._newest.get((me, to), 0.0))
        self._newest[me, to] = max(time, self._newest.get((me, to), 0.0))
        then = self.way(me, to)

        def arrive() -> None:
            now = self.way(me, to)
            if then is None or (now is not None and now[0] is then[0] and self.cut.get(then[1]) is not then[0]):
                self._arrive(me, to, message)

        self._simulation.at(time, arrive)


class Place(Town):
    """A town whose workers can be killed. `tells`: servers hear that a worker is gone before another comes."""

    def __init__(
        self,
        job: Job,
        seed: int,
        weather: Weather | None = None,
        batches: int = 12,
        epochs: int = 1,
        mode: str = "lease",
        tells: bool = True,
        fates: tuple[Fate, ...] = (),
    ) -> None:
        self.lives: dict[Address, Life] = {}
        self.batches, self.epochs, self.mode, self.tells, self.fates = batches, epochs, mode, tells, list(fates)
        self.kills = 0
        self.commits: dict[int, list[float]] = {}
        self.births: list[tuple[float, int]] = []
        self.deaths: list[tuple[float, int]] = []
        self.final: list[torch.Tensor] = []
        cells = batches * epochs * job.cluster.nworkers_per_group
        super().__init__(job, seed, weather, parameters(cells, max(cells, 150), 256))

    # --- how it is made ------------------------------------------------------------------------------------------

    def _wire(self, weather: Weather | None) -> SimulatedWire:
        return Road(self, weather)

    def _door(self, me: Address) -> Exchange:
        known = self.lives.get(me)
        life = self.lives[me] = Life(me, 0 if known is None else known.incarnation + 1)

        def say(to: Address, message: m.Message) -> None:
            if life.over:
                raise Killed
            fate = self._fate(life, message)
            if fate is not None:
                self.kill(fate)
                raise Killed
            life.said += 1
            self.wire.send(me, to, message)

        door = Exchange(me, self.topology, say, self.sim.waiter(), incarnation=life.incarnation)
        self.wire._residents[me] = door
        for server in {*door.servers, door.desk}:
            self.wire.connect(me, server, "")
        return door

    def _fate(self, life: Life, message: m.Message) -> Fate | None:
        for fate in self.fates:
            if fate.at >= 0 or (fate.group, fate.index) != life.me[1:] or fate.incarnation != life.incarnation:
                continue
            if isinstance(message, fate.kind):
                fate.after -= 1
                if fate.after < 0:
                    return fate
        return None

    # --- life and death ------------------------------------------------------------------------------------------

    def kill(self, fate: Fate) -> None:
        """All processes of a group are gone, and come back after a while, unless their scripts have ended."""
        self.fates.remove(fate)
        workers = self.topology.workers(fate.group)
        if all(self.lives[me].over for me in workers):
            return
        self.kills += 1
        self.deaths.append((self.sim.now, fate.group))
        for me in workers:
            life, door = self.lives[me], self.doors[me]
            for server in sorted({*door.servers, door.desk}) if not life.over else ():
                moment = self.sim.now + self.sim.random.uniform(*self.wire.weather.delay)
                self.sim.at(moment, lambda life=life, server=server: self._end(life, server))
            life.over, door._failure = True, Killed()
        self.sim.at(self.sim.now + fate.away, lambda: self._bear(fate.group))

    def _end(self, life: Life, server: Address) -> None:
        """The end of a connection comes to a server."""
        if self.wire.cut.get((life.me, server)) is not life and self.lives[life.me] is life:
            self.wire.cut[life.me, server] = life
            if self.tells:
                house = self.houses[server]
                house.send(house.server.lost(life.me))

    def _bear(self, group: int) -> None:
        self.births.append((self.sim.now, group))
        for me in self.topology.workers(group):
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

        self.sim.actor(f"{me} of incarnation {life.incarnation}", live)

    def run(self) -> "Place":
        for me in self.workers:
            self._start(me)
        for fate in list(self.fates):
            if fate.at >= 0:
                self.sim.at(fate.at, lambda fate=fate: self.kill(fate))
        self.sim.run()
        return self

    # --- what a script does --------------------------------------------------------------------------------------

    def script(self, seat: Seat) -> None:
        life = self.lives[seat.me]
        seat.open(0.0)
        for epoch in range(self.epochs):
            for stream, seq, number in self._batches(seat, epoch):
                seat.sleep(0.0, 0.004)
                if life.over:
                    raise Killed
                seat.step(self._gradient(seat, epoch * self.batches + number), marks=(stream, seq, seq))
                if not life.over:
                    self.commits.setdefault(seat.me.group, []).append(self.sim.now)
        seat.finish()
        if seat.me == self.workers[0]:
            seat.door.final_values()
            seat.door.final_buffers()
            self.final = seat.values()

    def _batches(self, seat: Seat, epoch: int) -> Iterator[tuple[int, int, int]]:
        group, door = seat.me.group, seat.door
        if self.mode == "static":
            stream = (epoch << 32) | STATIC | group
            mine = range(self.batches)[group :: self.topology.worker_groups]
            for seq in range(door.applied(stream), len(mine)):
                yield stream, seq, mine[seq]
            return
        leases = Leases(door, epoch, self.batches, 0)
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
