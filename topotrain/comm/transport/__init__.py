"""The transports carry messages, as `core.transport_contract` promises."""

from topotrain.core.transport_contract import (
    ConnectionLost,
    Endpoint,
    PeerUnreachable,
    Refused,
    Transport,
    TransportError,
)

__all__ = ["ConnectionLost", "Endpoint", "PeerUnreachable", "Refused", "Transport", "TransportError"]
