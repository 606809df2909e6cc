"""Processes of workers in a rehearsal: they die, and what was on its way to or from them dies with them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from topotrain.comm.transport import Endpoint
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.tools.simulator.sim_network import NetworkFaults, SimulatedTransport, Simulation
from topotrain.tools.simulator.worker_observer import InvariantViolated


class Killed(BaseException):
    """The process of this worker is gone; no `except Exception` of a script may swallow it."""


@dataclass(eq=False)
class WorkerProcess:
    """One process of a worker. `said`: messages that it has sent. `came`: the servers have let it in."""

    me: Address
    incarnation: int
    said: int = 0
    came: bool = False
    over: bool = False  # dead, or its script has ended
    dead: bool = False


class CrashableWaiter:
    """How a mortal waits (`client.Waiter`)."""

    def __init__(self, life: WorkerProcess, sim: Simulation) -> None:
        self._life, self._sim = life, sim

    def update(self) -> AbstractContextManager[object]:
        """Nobody else is running."""
        return self._sim.update()

    def wait(self, ready: Callable[[], bool]) -> None:
        """As `Simulation.wait`; raises Killed when the life is over."""
        self._sim.wait(lambda: self._life.over or ready())
        if self._life.over:
            raise Killed


class CrashableTransport(SimulatedTransport):
    """A road on which a worker's connections end with its process: what was on them is lost, from some byte on."""

    def __init__(self, sim: Simulation, lives: Mapping[Address, WorkerProcess], weather: NetworkFaults | None) -> None:
        super().__init__(sim, weather)
        self._lives = lives
        self._newest: dict[tuple[Address, Address], float] = {}
        self.cut: dict[
            tuple[Address, Address], WorkerProcess
        ] = {}  # (worker, server) -> the life that is not heard any more

    def _way(self, me: Address, to: Address) -> tuple[WorkerProcess, tuple[Address, Address]] | None:
        for worker, server in ((me, to), (to, me)):
            if worker.role is Role.WORKER:
                return self._lives[worker], (worker, server)
        return None

    def _depart(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
        now, uniform = self._simulation.now, self._simulation.random.uniform
        if isinstance(message, m.Fail):  # nobody does anything wrong here, but dies
            raise InvariantViolated(f"{me} to {to}: {message.text}")
        time = now + uniform(*self.weather.delay)
        if late:
            time += uniform(0.0, self.weather.late)
        else:
            time = self._last[me, to] = max(time, self._last.get((me, to), 0.0))
        if isinstance(message, m.WorkerRejoined):  # here, too, nothing said before a greeting comes after it
            time = self._last[me, to] = max(time, self._newest.get((me, to), 0.0))
        self._newest[me, to] = max(time, self._newest.get((me, to), 0.0))
        then = self._way(me, to)

        def arrive() -> None:
            now = self._way(me, to)
            if then is None or (now is not None and now[0] is then[0] and self.cut.get(then[1]) is not then[0]):
                self._arrive(me, to, message)

        self._simulation.at(time, lambda: self.awake(arrive, me, to))

    def settle(self, me: Address, resident: Endpoint) -> None:
        """A process stands in for the one that was there."""
        self._residents[me] = resident
