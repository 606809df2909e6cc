"""Connections between the simulated workers of a group.

As on a real transport, messages arrive in order and once, and the end of a process is noticed behind its last message.
"""

from collections.abc import Callable
from contextlib import suppress

from topotrain.config.topology import Address, Topology
from topotrain.core.client.client import Client
from topotrain.core.protocol import Message
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.outer_optimizer.groups.group_reduction import PeerChannel
from topotrain.tools.simulator.sim_network import Simulation
from topotrain.tools.simulator.sim_processes import CrashableTransport, Killed, WorkerProcess


class PeerSender(MessageSender):
    """Sends the messages of one worker to the others of its group. sender: of the worker."""

    def __init__(self, sender: MessageSender) -> None:
        self._sender = sender

    def send(self, to: Address, message: Message) -> None:
        # A process may die while it handles a message, where no script could end. Its next wait ends it.
        with suppress(Killed):
            self._sender.send(to, message)


class SimPeers:
    """The connections of all workers to others of their groups.

    Args:
        sim, transport, topology: of the job.
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
