"""The client of the optimizer's state, which lives on the servers."""

import torch

from topotrain.config.sharding import Bucket, Piece
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_extension import ClientAccess, ClientExtension
from topotrain.core.model.schema import torch_dtype


class OptimizerStateClient(ClientExtension):
    """Reads all of it, and loads it."""

    messages = (m.StatePart,)

    def __init__(self) -> None:
        self._rounds = 0
        self._parts: dict[Address, dict[tuple[int, int, str], m.StatePart]] = {}
        self._ended: dict[Address, int] = {}  # how many parts the server has sent

    def bind(self, client: ClientAccess) -> None:
        """As `ClientExtension.bind`."""
        self._client = client

    def get(self) -> list[m.StatePart]:
        """All optimizer state, in parts."""
        client = self._client
        client.settle()
        with client.waiter.update():
            self._parts = {server: {} for server in client.servers}
            self._ended.clear()
            self._rounds += 1
        for server in client.servers:
            client.tell(server, m.StateRequest(self._rounds))
        client.wait_until(self._all_here)
        return [part for server in client.servers for part in self._parts[server].values()]

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Memory for a piece's part of a tensor."""
        assert isinstance(message, m.StatePart)
        bucket = self._client.bucket(sender, message.bucket)
        piece = _piece(bucket, message.piece)
        return torch.empty(piece.hi - piece.lo, dtype=torch_dtype(self._client.map.spaces[bucket.space].dtype))

    def handle(self, sender: Address, message: m.Message) -> None:
        """Take a part from a server. Raises ProtocolError for one that was not requested."""
        assert isinstance(message, m.StatePart)
        if message.key:
            _piece(self._client.bucket(sender, message.bucket), message.piece)
        if message.round != self._rounds:
            return
        if sender not in self._parts:
            raise m.ProtocolError(f"{sender} tells state that nobody has asked for")
        if message.key:
            self._parts[sender][(message.bucket, message.piece, message.key)] = message
        elif 0 <= message.number <= 2**53:
            self._ended[sender] = int(message.number)

    def _all_here(self) -> bool:
        return all(self._ended.get(server) == len(self._parts[server]) for server in self._client.servers)

    def put(self, bucket: Bucket, piece: int, key: str, value: float | torch.Tensor) -> None:
        """Load one entry: a number, or the piece's part of a tensor (1-D).

        A script that was started again begins with a state that is older than the servers'.
        """
        home = self._client.servers[bucket.shard]
        if home in self._client.begun:
            return
        tensor = value if isinstance(value, torch.Tensor) else None
        number = 0.0 if isinstance(value, torch.Tensor) else value
        self._client.tell(home, m.StatePart(0, bucket.id, piece, number, key, body=tensor))


def _piece(bucket: Bucket, number: int) -> Piece:
    if not 0 <= number < len(bucket.pieces):
        raise m.ProtocolError(f"piece {number} of bucket {bucket.id}, which has {len(bucket.pieces)}")
    return bucket.pieces[number]
