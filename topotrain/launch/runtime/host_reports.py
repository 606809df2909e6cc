"""Reports of one process about its connections and its servers."""

from collections.abc import Iterator, Mapping

from topotrain.comm.router import Router, RouterConfig
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Role
from topotrain.core.events import Event, Notice, ServerLoad, Slices, Traffic
from topotrain.extensions.replication.replica_host import HostedServer
from topotrain.launch.runtime.round_traffic import link_seconds, step_traffic

INTERVAL_S = 1.0
"""Seconds between two reports about the same thing, at least."""
COUNTS_S = 0.25
"""Seconds between two reports of what extensions have counted, at least."""
NOTICED_S = 0.02
"""Seconds that a step must take a link before a job says so at its start."""
MOST_SLICES = 500
"""The number of slices of a server that are listed. An event is one line, and a model may have 100,000 parameters."""


class HostReports:
    """Makes the reports of the process with this `place`. Nothing is reported twice without a change."""

    def __init__(self, place: RouterConfig) -> None:
        self._place = place
        self._due = 0.0
        self._traffic: dict[Address, Traffic] = {}
        self._loads: dict[Address, ServerLoad] = {}
        self._sliced: set[Address] = set()
        self._counts_due = 0.0
        self._counts: dict[Address, tuple[Event, ...]] = {}

    def due(self, now: float, last: bool = False) -> bool:
        """Whether it is time; last: no other report follows."""
        if now < self._due and not last:
            return False
        self._due = now + INTERVAL_S
        return True

    def traffic(self, me: Address, router: Router) -> Iterator[Event]:
        """Yield the bytes that an endpoint of the process has sent."""
        found = Traffic(str(me), {str(peer): count for peer, count in sorted(router.sent_by(me).items())})
        if found.sent and self._traffic.get(me) != found:
            self._traffic[me] = found
            yield found

    def counts(self, servers: Mapping[Address, HostedServer], now: float) -> Iterator[Event]:
        """Yield what the extensions of coordinators have counted so far."""
        if now < self._counts_due:
            return
        self._counts_due = now + COUNTS_S
        for me, each in servers.items():
            if me.index == 0:
                found = tuple(event for extension in each.server.hooks.interim for event in extension.interim_events())
                if self._counts.get(me, ()) != found:
                    self._counts[me] = found
                    yield from found

    def servers(self, servers: Mapping[Address, HostedServer], router: Router) -> Iterator[Event]:
        """Yield the slices, the load and the traffic of servers."""
        for me, each in servers.items():
            state = each.server.state
            model = state.model
            if model is not None and me not in self._sliced:
                self._sliced.add(me)
                yield slices(me, model.map)
                if me == Address(Role.SERVER, 0, 0) and not self._place.identity.incarnation:
                    yield from traffic_notice(me, self._place, model.map)
            updates = 0 if model is None else state.version - state.start.version
            load = ServerLoad(str(me), updates, state.version, each.busy_s)
            if self._loads.get(me) != load:
                self._loads[me] = load
                yield load
            yield from self.traffic(me, router)


def traffic_notice(me: Address, place: RouterConfig, slice_map: SliceMap) -> Iterator[Notice]:
    """Yield what a step sends between hosts, if a link needs a while for it. The speed of the link must be known."""
    topology, link = place.topology, place.job.cluster.link
    mbit = topology.link_mbit if link is None else link.bandwidth
    if not mbit or not topology.crosses_hosts:
        return
    found = step_traffic(place.job, topology, slice_map)
    if found is not None and (seconds := link_seconds(found.nbytes, mbit)) >= NOTICED_S:
        yield Notice(str(me), f"{found.explain()}. At {mbit:,.0f} Mbit/s a step takes {seconds:.2g} s at least")


def slices(me: Address, slice_map: SliceMap) -> Slices:
    """Return the parts of parameters that a server is home to."""
    found = slice_map.segments_of(me.index)
    shown = found[:MOST_SLICES]
    return Slices(
        str(me),
        tuple(slice_map.parameters[segment.parameter].name for segment in shown),
        tuple(segment.start for segment in shown),
        tuple(segment.hi - segment.lo for segment in shown),
        len(found) - len(shown),
    )
