"""A worker's door to the optimizer's state, which lives on the servers."""

from collections.abc import Sequence

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.extension import ClientAccess


class OptimizerStateClient:
    """Reads all of it, and loads it.

    Args:
        voice: how to speak.
        servers: of this worker.
    """

    def __init__(self, voice: ClientAccess, servers: Sequence[Address]) -> None:
        self._voice, self._servers = voice, servers
        self._rounds = 0
        self._parts: dict[Address, dict[tuple[int, int, str], m.StatePart]] = {}
        self._ended: dict[Address, int] = {}  # how many parts the server has sent

    def get(self) -> list[m.StatePart]:
        """All optimizer state, in parts."""
        with self._voice.waiter.update():
            self._parts = {server: {} for server in self._servers}
            self._ended.clear()
            self._rounds += 1
        for server in self._servers:
            self._voice.tell(server, m.StateRequest(self._rounds))
        self._voice.wait_until(self._all_here)
        return [part for server in self._servers for part in self._parts[server].values()]

    def take(self, sender: Address, message: m.StatePart) -> None:
        """A server has told a part. Raises ProtocolError where nobody has asked."""
        if message.round != self._rounds:
            return
        if sender not in self._parts:
            raise m.ProtocolError(f"{sender} tells state that nobody has asked for")
        if message.key:
            self._parts[sender][(message.bucket, message.piece, message.key)] = message
        elif 0 <= message.number <= 2**53:
            self._ended[sender] = int(message.number)

    def _all_here(self) -> bool:
        return all(self._ended.get(server) == len(self._parts[server]) for server in self._servers)

    def put(self, home: Address, bucket: int, piece: int, key: str, value: float | torch.Tensor) -> None:
        """Load one entry: a number, or the piece's part of a tensor (1-D). home: of the bucket."""
        tensor = value if isinstance(value, torch.Tensor) else None
        number = 0.0 if isinstance(value, torch.Tensor) else value
        self._voice.tell(home, m.StatePart(0, bucket, piece, number, key, body=tensor))
