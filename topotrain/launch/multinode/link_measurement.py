"""The speed of the links between the units of a job, measured when they meet.

    jobs/ID.RUN/meeting      the hosts of the units, by the unit that opens the job
    jobs/ID.RUN/link/R       where unit R, which has servers, answers measurements
    jobs/ID.RUN/speed/R      the slowest link that unit R, which has workers, has found, in Mbit/s; 0: none

Each unit with workers measures the links to units that serve them. Slices have one size for the whole job, so the unit
that opens the job takes the slowest link of all, and publishes it with the hosts. All waits are short, and whatever
cannot be measured is left out: without a speed the slices have their default size.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from topotrain.comm.link_speed import LIMIT_S, receive_for_measurement, send_for_measurement
from topotrain.comm.request_reply import RequestChannel, RequestServer, connect, service_identity
from topotrain.comm.store import Store, StoreError
from topotrain.comm.transport import TransportError
from topotrain.config.job import TransportChoice
from topotrain.config.topology import Topology

SERVICE = "link"
MEETING_KEY = "meeting"
_PEERS = 3  # most links that a unit measures; they share the time
_COME_S, _ALL_S = 2.0, 4.0
"""Seconds for which a unit waits for an address, and unit 0 for all speeds."""
_POLL_S = 0.02


def links(topology: Topology) -> dict[int, tuple[int, ...]]:
    """Return the units to which each unit with workers measures its links, by rank."""
    if not topology.fits_slices or topology.implicit:
        return {}
    found: dict[int, set[int]] = {}
    always = topology.cluster.transport is TransportChoice.kTcp
    for group in range(topology.worker_groups):
        for worker in topology.workers(group):
            for server in topology.servers(topology.server_group_of(group)):
                mine, its = topology.unit_of(worker), topology.unit_of(server)
                # Inside a host the transport shares memory, unless the job says otherwise.
                if mine != its and (always or not topology.together(worker, server)):
                    found.setdefault(mine, set()).add(its)
    return {unit: _some(sorted(peers), unit) for unit, peers in sorted(found.items())}


def _some(peers: list[int], unit: int) -> tuple[int, ...]:
    # Not the same for all units: the links of one server would be shared by all measurements.
    count = len(peers)
    return tuple(peers[(unit + i) % count] for i in range(min(count, _PEERS)))


class LinkMeasurement:
    """The part of one unit.

    Args:
        run: the keys of this start.
        rank: of this unit.
        topology: the whole layout, with hosts.
        address: at which other units reach this one.
        secret: the secret of the job.
    """

    def __init__(self, run: Store, rank: int, topology: Topology, address: str, secret: bytes) -> None:
        self._run, self._rank, self._address, self._secret = run, rank, address, secret
        self._links = links(topology)
        self._start_port = topology.cluster.start_port
        self._until = time.monotonic() + _ALL_S

    def serve_client(self, channel: RequestChannel) -> None:
        """Answer the measurements of another unit."""
        with suppress(TransportError):
            receive_for_measurement(channel)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Measure the links of this unit; inside, other units can measure theirs to it."""
        server = self._listen() if any(self._rank in peers for peers in self._links.values()) else None
        try:
            if self._rank in self._links:
                speed = self._slowest()
                with suppress(StoreError):
                    self._run.set(f"speed/{self._rank}", repr(speed).encode())
            yield
        finally:
            if server is not None:
                server.close()

    def _listen(self) -> RequestServer | None:
        try:
            server = self._server()
            server.start()
            self._run.set(f"link/{self._rank}", f"{self._address} {server.port}".encode())
        # A wrong address is an error of the connections that the job needs, which explain it.
        except (OSError, TransportError, StoreError):
            return None
        return server

    def _server(self) -> RequestServer:
        """Return a service at a port from `start_port` on. Raises OSError."""
        ports = range(self._start_port, self._start_port + 100) if self._start_port else (0,)
        for port in ports:
            with suppress(OSError):
                return RequestServer(SERVICE, self._address, port, self._secret, self.serve_client, most=64)
        raise OSError(f"no free port from {self._start_port} on")

    def _slowest(self) -> float:
        peers, until = self._links[self._rank], time.monotonic() + _COME_S
        found = [self._speed(peer, LIMIT_S / len(peers), until - time.monotonic()) for peer in peers]
        return min((speed for speed in found if speed > 0), default=0.0)

    def _speed(self, peer: int, limit_s: float, seconds: float) -> float:
        """Return the Mbit/s of the link to a unit; 0: it cannot be measured.

        seconds: for the unit's address.
        """
        try:
            host, port = self._run.watch(f"link/{peer}", max(0.0, seconds)).decode().split()
            channel = connect(host, int(port), service_identity(SERVICE, self._secret))
        except (OSError, TransportError, StoreError, ValueError):
            return 0.0
        try:
            return send_for_measurement(channel, limit_s=limit_s)
        except TransportError:
            return 0.0
        finally:
            channel.close()

    def agreed(self) -> float:
        """Return the Mbit/s of the slowest link of all units; 0: not measured.

        For the unit that opens the job.
        """
        found: dict[int, float] = {}
        with suppress(StoreError):
            while found.keys() != self._links.keys() and time.monotonic() < self._until:
                for unit in self._links.keys() - found.keys():
                    raw = self._run.get(f"speed/{unit}")
                    if raw is not None:
                        found[unit] = _number(raw)
                if found.keys() != self._links.keys():
                    time.sleep(_POLL_S)
        return min((speed for speed in found.values() if speed > 0), default=0.0)


def _number(raw: bytes) -> float:
    # The value comes from a store, which may have other writers.
    with suppress(ValueError):
        speed = float(raw)
        return speed if math.isfinite(speed) and speed > 0 else 0.0
    return 0.0
