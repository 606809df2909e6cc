"""The client of the optimizer's state, which the servers hold."""

import torch

from topotrain.config.sharding import Bucket, Piece
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.rejoin import Rejoin
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.schema import torch_dtype


class OptimizerStateClient(ClientExtension):
    """Reads the state of all servers, and loads it.

    Args:
        rejoin: knows which servers have a newer state than the script.
    """

    messages = (m.StatePart,)

    def __init__(self, rejoin: Rejoin) -> None:
        self._rejoin = rejoin
        self._rounds = 0
        self._parts: dict[Address, dict[tuple[int, int, str], m.StatePart]] = {}
        self._ended: dict[Address, int] = {}  # how many parts the server has sent

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel, self._model, self._values = channel, model, values

    def get(self) -> list[m.StatePart]:
        """All optimizer state, in parts."""
        # Else the state of a lazily committed step could be in some parts, and not in others.
        self._values.settle()
        with self._channel.waiter.update():
            self._parts = {server: {} for server in self._channel.servers}
            self._ended.clear()
            self._rounds += 1
        for server in self._channel.servers:
            self._channel.send(server, m.StateRequest(self._rounds))
        servers = self._channel.servers
        self._channel.wait_until(lambda: all(self._ended.get(each) == len(self._parts[each]) for each in servers))
        return [part for server in servers for part in self._parts[server].values()]

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Memory for a piece's part of a tensor."""
        assert isinstance(message, m.StatePart)
        bucket = self._model.bucket(sender, message.bucket)
        piece = _piece(bucket, message.piece)
        return torch.empty(piece.hi - piece.lo, dtype=torch_dtype(self._model.map.spaces[bucket.space].dtype))

    def handle(self, sender: Address, message: m.Message) -> None:
        """Store a part from a server. Raises ProtocolError for one that was not requested."""
        assert isinstance(message, m.StatePart)
        if message.key:
            _piece(self._model.bucket(sender, message.bucket), message.piece)
        if message.round != self._rounds:
            return
        if sender not in self._parts:
            raise m.ProtocolError(f"{sender} sends optimizer state that was not requested")
        if message.key:
            self._parts[sender][(message.bucket, message.piece, message.key)] = message
        # A float64 holds integers exactly up to here; NaN and the rest are no counts.
        elif 0 <= message.number <= 2**53:
            self._ended[sender] = int(message.number)

    def put(self, bucket: Bucket, piece: int, key: str, value: float | torch.Tensor, initial: bool = True) -> None:
        """Load one entry: a number or a 1-D tensor.

        Without a key the server forgets the piece's entries. initial: a server that is ahead keeps its own.
        """
        server = self._model.server_of(bucket)
        # A restarted script loads the state with which it began.
        if initial and self._rejoin.is_ahead(server):
            return
        tensor = value if isinstance(value, torch.Tensor) else None
        number = 0.0 if isinstance(value, torch.Tensor) else value
        self._channel.send(server, m.StatePart(0 if initial else 1, bucket.id, piece, number, key, body=tensor))


def _piece(bucket: Bucket, number: int) -> Piece:
    if not 0 <= number < len(bucket.pieces):
        raise m.ProtocolError(f"piece {number} of bucket {bucket.id}, which has {len(bucket.pieces)} pieces")
    return bucket.pieces[number]
