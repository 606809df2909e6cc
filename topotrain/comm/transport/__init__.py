"""The transports carry messages. What each of them promises is the contract in `core.transport_contract`."""

from topotrain.core.transport_contract import (
    ConnectionLost,
    Endpoint,
    PeerUnreachable,
    Refused,
    Transport,
    TransportError,
)

__all__ = ["ConnectionLost", "Endpoint", "PeerUnreachable", "Refused", "Transport", "TransportError"]
