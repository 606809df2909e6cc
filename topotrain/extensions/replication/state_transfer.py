"""Transfer of a server's whole state to a new standby.

The state can be taken between any two messages, also within a step, because with several groups there may never be a
moment between steps. So the server's buffers are sent as far as they can still be needed: by a gradient that is being
received, or by a message that may be sent again and is a view of a buffer.
"""

import struct

import torch

from topotrain.core import protocol as m
from topotrain.extensions.replication.replicated_server import ReplicatedServer
from topotrain.extensions.replication.state_codec import StateReader, StateWriter


def save(copy: ReplicatedServer) -> torch.Tensor | None:
    """Return the state of a copy as bytes (1-D uint8). None: not possible now."""
    state = copy.state_dict()
    if state is None:
        return None
    model = copy.server.model
    writer = StateWriter(None if model is None else model.flats)
    return writer.bytes(schema=state["server"]["schema"], state=writer.write(state))


def restore(copy: ReplicatedServer, data: torch.Tensor) -> None:
    """Give a new copy the state in these bytes. Raises ProtocolError if it cannot."""
    try:
        reader = StateReader(data)
        if reader.trees["schema"]:
            # The model comes first: its buffers are filled in place, and other tensors are views of them.
            copy.server.start.make_model(reader.trees["schema"])
        model = copy.server.model
        reader.fill(None if model is None else model.flats)
        copy.load_state_dict(reader.read(reader.trees["state"]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RuntimeError) as error:
        raise m.ProtocolError(f"not the state of a server: {error!r}") from error
