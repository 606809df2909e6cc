"""Simulated worker processes that can die, and lose the messages in transit.

Between the workers of a group messages arrive in order and once, as on a real transport, and the end of a process is
noticed behind its last message.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from batch_counts import InvariantViolated
from faulty_network import FaultyTransport, NetworkFaults

from topotrain.comm.transport import Endpoint
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.outer_optimizer.groups.group_reduction import PeerChannel
from topotrain.tools.simulator.sim_network import Simulation


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


class CrashableTransport(FaultyTransport):
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

    def _travel(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
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


class PeerSender(MessageSender):
    """Sends the messages of one worker to the others of its group. sender: of the worker."""

    def __init__(self, sender: MessageSender) -> None:
        self._sender = sender

    def send(self, to: Address, message: m.Message) -> None:
        # A process may die while it handles a message, where no script could end. Its next wait ends it.
        with suppress(Killed):
            self._sender.send(to, message)


class SimPeers:
    """The connections of all workers to others of their groups.

    notice_time: draws when a process notices something that happens now.
    """

    def __init__(
        self,
        sim: Simulation,
        transport: CrashableTransport,
        topology: Topology,
        notice_time: Callable[[], float],
    ) -> None:
        self._sim, self._transport, self._topology, self._notice_time = sim, transport, topology, notice_time
        self._there: dict[tuple[Address, int], tuple[WorkerProcess, Client]] = {}  # by worker and incarnation

    def join(self, process: WorkerProcess, client: Client, channel: PeerChannel) -> None:
        """Connect a worker to the others of its group, as `Connections.join_group`."""
        me, number = process.me, process.incarnation
        self._there[me, number] = process, client
        workers = self._topology.workers(me.group)
        # As in a job, each pair connects once, from the later worker to the earlier one.
        for peer in workers[: me.index]:
            client.channel.wait_until(lambda peer=peer: (peer, number) in self._there)  # type: ignore[misc]
            self._transport.connect(me, peer, "")
            channel.send_hello(peer.index)
        channel.wait_for_hellos(range(me.index + 1, len(workers)))

    def end(self, process: WorkerProcess) -> None:
        """A process has died, or its script has ended. The others of its group notice it."""
        for other in self._topology.workers(process.me.group):
            if other != process.me:
                self._lose(process.me, other, process.incarnation, "closed by the peer")

    def cut(self, process: WorkerProcess, index: int) -> bool:
        """The connection to another worker of the group ends; whether there is one."""
        me, number = process.me, process.incarnation
        other = me._replace(index=index)
        theirs = self._there.get((other, number))
        if theirs is None or (me, number) not in self._there or process.over or theirs[0].over:
            return False
        self._transport.cut[me, other], self._transport.cut[other, me] = process, theirs[0]
        self._lose(me, other, number, "the connection was cut")
        self._lose(other, me, number, "the connection was cut")
        return True

    def _lose(self, peer: Address, who: Address, number: int, why: str) -> None:
        """Let a worker notice the end of its connection to another one."""
        there = self._there.get((who, number))
        if there is None:
            return
        process, client = there

        def notice() -> None:
            if not process.over:
                client.lost(peer, why)

        # Behind the last message of the other one.
        time = max(self._notice_time(), self._transport.last_arrival(peer, who))
        self._sim.at(time, lambda: self._transport.when_resumed(notice, who))
