"""Simulated connections between the workers of a unit."""

from collections.abc import Sequence

from topotrain.config.job import Job
from topotrain.config.topology import Address, Topology
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.protocol import Message
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.host_sums.host_reduction import HostReduction, HostSumClient, UnitLinks
from topotrain.extensions.host_sums.host_units import used_unit
from topotrain.extensions.host_sums.sum_writer import HostSumSettings
from topotrain.tools.simulator.sim_network import SimulatedTransport

PresentWorkers = dict[tuple[Address, int], HostReduction]
"""The workers that can be reached by others of their unit, by address and incarnation."""


class SimUnitLinks(UnitLinks):
    """The connections of one simulated worker to the others of its unit."""

    def __init__(
        self,
        me: tuple[Address, int],
        unit: Sequence[Address],
        sender: MessageSender,
        transport: SimulatedTransport,
        present: PresentWorkers,
    ) -> None:
        self._me, self._unit, self._sender = me, unit, sender
        self._transport, self._present = transport, present

    def begin(self, workers: Sequence[Address], reduction: HostReduction) -> None:
        (me, incarnation), there = self._me, self._present
        there[self._me] = reduction
        for other in self._unit:
            if other != me and (other, incarnation) in there:
                # As in a job, each pair connects once, from the later worker to the earlier one.
                earlier, later = sorted((me, other))
                self._transport.connect(later, earlier, "")
                there[later, incarnation].connected(earlier)

    def send(self, to: Address, message: Message) -> None:
        self._sender.send(to, message)

    def close(self) -> None:
        """Do nothing: a simulated connection ends with its process."""


def reduction_of(
    job: Job,
    topology: Topology,
    me: tuple[Address, int],
    sender: MessageSender,
    transport: SimulatedTransport,
    present: PresentWorkers,
) -> tuple[GradientExchange | None, tuple[ClientExtension, ...]]:
    """Return the part in the sums of its host of a worker with this incarnation, and its extension."""
    unit = used_unit(job, topology, me[0])
    if unit is None:
        return None, ()
    links = SimUnitLinks(me, unit.addresses(), sender, transport, present)
    reduction = HostReduction(unit, HostSumSettings.of(job), links)
    return reduction, (HostSumClient(unit, reduction),)
