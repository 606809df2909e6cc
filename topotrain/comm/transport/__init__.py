"""The transports: how messages travel. What each of them promises is the core's contract (`core.transport_contract`)."""

from topotrain.core.transport_contract import (
    ConnectionLost,
    Endpoint,
    PeerUnreachable,
    Refused,
    Transport,
    TransportError,
)

__all__ = ["ConnectionLost", "Endpoint", "PeerUnreachable", "Refused", "Transport", "TransportError"]
