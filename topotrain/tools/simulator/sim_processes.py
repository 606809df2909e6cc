"""Simulated worker processes that can die, and lose the messages in transit."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from topotrain.comm.transport import Endpoint
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.tools.simulator.sim_network import NetworkFaults, SimulatedTransport, Simulation
from topotrain.tools.simulator.worker_observer import InvariantViolated


class Killed(BaseException):
    """The death of this worker's process. `except Exception` cannot catch it."""


@dataclass(eq=False)
class WorkerProcess:
    """One process of a worker.

    said: the number of messages that it has sent. came: the servers have admitted it.
    """

    me: Address
    incarnation: int
    said: int = 0
    came: bool = False
    over: bool = False  # dead, or its script has ended
    dead: bool = False

    def on_send(self) -> None:
        """Count a message that it sends."""
        self.said += 1

    def admit(self) -> None:
        """Record that the servers admit it."""
        self.came = True

    def finish(self) -> None:
        """Record the end of its script."""
        self.over = True

    def kill(self) -> None:
        """Record its death."""
        self.over = self.dead = True


class CrashableWaiter:
    """The `client.Waiter` of a worker process that can die."""

    def __init__(self, life: WorkerProcess, sim: Simulation) -> None:
        self._life, self._sim = life, sim

    def update(self) -> AbstractContextManager[object]:
        """Return an empty context: no other thread is running."""
        return self._sim.update()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait as `Simulation.wait` does. Raises Killed when the process is over."""
        self._sim.wait(lambda: self._life.over or ready())
        if self._life.over:
            raise Killed


class CrashableTransport(SimulatedTransport):
    """A transport on which a worker's connections end with its process.

    Messages in transit are lost from some byte on.
    """

    def __init__(self, sim: Simulation, lives: Mapping[Address, WorkerProcess], weather: NetworkFaults | None) -> None:
        super().__init__(sim, weather)
        self._lives = lives
        self._newest: dict[tuple[Address, Address], float] = {}
        self.cut: dict[
            tuple[Address, Address], WorkerProcess
        ] = {}  # (worker, server) -> the process whose messages are dropped

    def _way(self, me: Address, to: Address) -> tuple[WorkerProcess, tuple[Address, Address]] | None:
        for worker, server in ((me, to), (to, me)):
            if worker.role is Role.WORKER:
                return self._lives[worker], (worker, server)
        return None

    def _depart(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
        now, uniform = self._simulation.now, self._simulation.random.uniform
        if isinstance(message, m.Fail):  # processes die here, but do not fail
            raise InvariantViolated(f"{me} to {to}: {message.text}")
        time = now + uniform(*self.weather.delay)
        if late:
            time += uniform(0.0, self.weather.late)
        else:
            time = self._last[me, to] = max(time, self._last.get((me, to), 0.0))
        if isinstance(message, m.WorkerRejoined):  # as on a real transport, earlier messages arrive before it
            time = self._last[me, to] = max(time, self._newest.get((me, to), 0.0))
        self._newest[me, to] = max(time, self._newest.get((me, to), 0.0))
        then = self._way(me, to)

        def arrive() -> None:
            now = self._way(me, to)
            if then is None or (now is not None and now[0] is then[0] and self.cut.get(then[1]) is not then[0]):
                self._arrive(me, to, message)

        self._simulation.at(time, lambda: self.awake(arrive, me, to))

    def settle(self, me: Address, resident: Endpoint) -> None:
        """Attach a process in place of the former one."""
        self._residents[me] = resident
