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


class PresentWorkers:
    """The workers that can be reached by others of their unit."""

    def __init__(self, transport: SimulatedTransport) -> None:
        self._transport = transport
        self._there: dict[tuple[Address, int], HostReduction] = {}

    def add(self, me: Address, incarnation: int, reduction: HostReduction, unit: Sequence[Address]) -> None:
        """A worker can be reached: connect it with the others of its incarnation."""
        self._there[me, incarnation] = reduction
        for other in unit:
            if other == me or (other, incarnation) not in self._there:
                continue
            # As in a job, each pair connects once, from the later worker to the earlier one.
            earlier, later = sorted((me, other))
            self._transport.connect(later, earlier, "")
            self._there[later, incarnation].connected(earlier)


class SimUnitLinks(UnitLinks):
    """The connections of one simulated worker to the others of its unit."""

    def __init__(
        self, present: PresentWorkers, me: Address, incarnation: int, unit: Sequence[Address], sender: MessageSender
    ) -> None:
        self._present, self._me, self._incarnation = present, me, incarnation
        self._unit, self._sender = unit, sender

    def begin(self, workers: Sequence[Address], reduction: HostReduction) -> None:
        self._present.add(self._me, self._incarnation, reduction, self._unit)

    def send(self, to: Address, message: Message) -> None:
        self._sender.send(to, message)

    def close(self) -> None:
        """Do nothing: a simulated connection ends with its process."""


def reduction_of(
    job: Job, topology: Topology, me: Address, incarnation: int, sender: MessageSender, present: PresentWorkers
) -> tuple[GradientExchange | None, tuple[ClientExtension, ...]]:
    """Return a worker's part in the sums of its host, and its extension."""
    unit = used_unit(job, topology, me)
    if unit is None:
        return None, ()
    links = SimUnitLinks(present, me, incarnation, unit.addresses(), sender)
    reduction = HostReduction(unit, HostSumSettings.of(job), links)
    return reduction, (HostSumClient(unit, reduction),)
