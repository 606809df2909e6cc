"""TCP with emulated links: they carry all traffic after the handshake."""

import socket

from topotrain.comm.emulation.link import EmulatedNetwork
from topotrain.comm.security.handshake import Identity, Peer
from topotrain.comm.transport.peer_keepalive import LEASE_S
from topotrain.comm.transport.tcp import TcpTransport


class EmulatedTcpTransport(TcpTransport):
    """A `TcpTransport` over the links of `network`."""

    def __init__(
        self,
        network: EmulatedNetwork,
        identity: Identity,
        start_port: int = 0,
        host: str = "127.0.0.1",
        lanes: int = 1,
        exact: bool = False,
        tls: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(identity, start_port, host, lanes=lanes, exact=exact, tls=tls, lease_s=lease_s)
        self._network = network

    def _wrap(self, sock: socket.socket, peer: Peer) -> socket.socket:
        return self._network.shape(sock, peer.me, peer.address)
