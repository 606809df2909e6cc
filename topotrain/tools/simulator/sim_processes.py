"""Simulated worker processes that can die, and lose the messages in transit."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from topotrain.comm.transport import Endpoint
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.tools.simulator.sim_network import NetworkFaults, SimulatedTransport, Simulation


class InvariantViolated(Exception):
    """The job violates an invariant, which the text describes."""


# Not an Exception: a script's own `except Exception` must not catch it.
class Killed(BaseException):
    """The death of this worker's process."""


# Compared by identity: the process after a restart has the same address, and is another key.
@dataclass(eq=False)
class WorkerProcess:
    """One process of a worker."""

    me: Address
    incarnation: int
    admitted: bool = False
    over: bool = False  # dead, or its script has ended
    dead: bool = False
    stepped: bool = False

    def kill(self) -> None:
        """Record its death."""
        self.over = self.dead = True


class CrashableWaiter:
    """The `client.Waiter` of a worker process that can die."""

    def __init__(self, process: WorkerProcess, sim: Simulation) -> None:
        self._process, self._sim = process, sim

    def update(self) -> AbstractContextManager[object]:
        """Return an empty context: no other thread is running."""
        return self._sim.update()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait as `Simulation.wait` does. Raises Killed when the process is over."""
        # A dead process must leave its wait, or its thread would never end.
        self._sim.wait(lambda: self._process.over or ready())
        if self._process.over:
            raise Killed

    def look(self) -> None:
        """As `Simulation.look`."""


class CrashableTransport(SimulatedTransport):
    """A transport on which a worker's connections end with its process."""

    def __init__(
        self, sim: Simulation, worker_processes: Mapping[Address, WorkerProcess], network_faults: NetworkFaults | None
    ) -> None:
        super().__init__(sim, network_faults)
        self._worker_processes = worker_processes
        self._newest: dict[tuple[Address, Address], float] = {}
        self.cut: dict[tuple[Address, Address], WorkerProcess] = {}
        """By worker and server: the process with messages that are dropped."""

    def _in_order(self, me: Address, to: Address) -> bool:
        # Nothing repeats a message between two workers, or puts it in order: they rely on their connection.
        return me.role is to.role is Role.WORKER

    def last_arrival(self, me: Address, to: Address) -> float:
        """The time at which the last message of one process to another arrives.

        It may be in the past.
        """
        return self._newest.get((me, to), 0.0)

    def _worker_connection(self, me: Address, to: Address) -> tuple[WorkerProcess, tuple[Address, Address]] | None:
        for worker, server in ((me, to), (to, me)):
            if worker.role is Role.WORKER:
                return self._worker_processes[worker], (worker, server)
        return None

    def _schedule(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
        if isinstance(message, m.Fail):  # processes die here, but do not fail
            raise InvariantViolated(f"{me} to {to}: {message.text}")
        time = self._arrival_time(me, to, late)
        if isinstance(message, m.WorkerRejoined):  # as on a real transport, earlier messages arrive before it
            time = self._last[me, to] = max(time, self._newest.get((me, to), 0.0))
        self._newest[me, to] = max(time, self._newest.get((me, to), 0.0))
        sender = self._worker_connection(me, to)
        receiver = self._worker_processes[to] if me.role is to.role is Role.WORKER else None

        def arrive() -> None:
            now = self._worker_connection(me, to)
            # Between two workers the connection ends with either process.
            if receiver is not None and (receiver.over or self._worker_processes[to] is not receiver):
                return
            # A message of a former process, or of a connection that was cut meanwhile, is lost with its connection.
            # Between servers connections stay.
            if sender is None or (now is not None and now[0] is sender[0] and self.cut.get(sender[1]) is not sender[0]):
                self._deliver(me, to, message)

        self._simulation.at(time, lambda: self.when_resumed(arrive, me, to))

    def replace(self, me: Address, resident: Endpoint) -> None:
        """Attach a process in place of the former one."""
        # Not by `attach`, which refuses an address that is taken.
        self._residents[me] = resident
        ended = {pair for pair in self._connections if me in pair and all(end.role is Role.WORKER for end in pair)}
        self._connections -= ended
