"""The model as a worker's client knows it: buckets, buffers, encoding of bodies."""

from typing import NoReturn

import torch

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.client.server_channel import ServerChannel
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.protocol import ProtocolError, ReducedGradient, Values


class BodyCodec:
    """A worker's encoding of bodies, which leaves them as they are.

    `landing`, `mean` and `values` are for bodies that are encoded.
    """

    def push(self, bucket: Bucket, weight: float, present: int, gradient: torch.Tensor) -> torch.Tensor:
        """The body of a push.

        `gradient` may change from here on, unless it is the body itself.
        """
        return gradient

    def is_coded(self, message: ReducedGradient | Values, bucket: Bucket) -> bool:
        """Whether the body of this message is encoded.

        Raises ProtocolError if it must not be.
        """
        return not_coded(message, bucket)

    def landing(self, message: ReducedGradient | Values, bucket: Bucket) -> torch.Tensor:
        """Where an encoded body is to be received."""
        _refuse(bucket)

    def mean(self, bucket: Bucket, data: torch.Tensor) -> torch.Tensor:
        """Decode a mean; it stays until the next one of the bucket."""
        _refuse(bucket)

    def values(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Bring "params" to what the servers show now, by an encoded body."""
        _refuse(bucket)

    def restart(self, bucket: Bucket) -> None:
        """Values came as they are, and stand in "params"."""


def not_coded(message: ReducedGradient | Values, bucket: Bucket) -> bool:
    """Return False. Raises ProtocolError if the message claims to be encoded."""
    if isinstance(message, Values) and message.coded:
        _refuse(bucket)
    return False


def _refuse(bucket: Bucket) -> NoReturn:
    raise ProtocolError(f"bucket {bucket.id} came encoded, which its dtype never is")


def present_body(message: m.Message) -> torch.Tensor:
    """The body of a message that must have one. Raises ProtocolError."""
    if message.body is None:
        raise m.ProtocolError(f"{type(message).__name__} without a body")
    return message.body


class ClientModel:
    """The model of a job, as one worker's client knows it.

    Args:
        channel: the worker's channel to its servers.
        topology: the job's layout.
        shared: the transports show memory, as for `server.Server`.
    """

    def __init__(self, channel: ServerChannel, topology: Topology, shared: bool) -> None:
        self._me = channel.me
        self._servers = channel.servers
        self._relay = channel.servers[channel.me.index] if topology.relayed else None
        self.windowed = shared and topology.sees_memory(channel.me.group)
        """Whether workers and servers share the memory of parameters and gradients."""
        self.sends_own_shard = topology.collective
        """Whether the worker hands in the gradient of its own server's shard, as the script left it."""
        self.reducers = channel.servers if self._relay is None else (self._relay,)
        """Servers that take this worker's part of a sum."""
        self.is_open = False

    def open(self, slice_map: SliceMap, flats: FlatBuffers, codec: BodyCodec) -> None:
        """The model is known. Values land in the flat buffer "params", means in "mean"."""
        self.map, self.flats, self.codec = slice_map, flats, codec
        self.held = slice_map.buckets_on(self._me.index)
        self.held_by: dict[int, list[int]] = {server.index: [] for server in self._servers}
        for bucket in self.held:
            self.held_by[bucket.shard].append(bucket.id)
        self.first_piece = [0]
        """Of each bucket the number of its first piece, over all buckets; and last the number of all pieces."""
        for bucket in slice_map.buckets:
            self.first_piece.append(self.first_piece[-1] + len(bucket.pieces))
        self.is_open = True

    def bucket(self, sender: Address, number: int) -> Bucket:
        """The bucket that a message names. Raises ProtocolError if it is not the sender's."""
        if not self.is_open:
            raise m.ProtocolError(f"{sender} sends bucket {number} before this worker has described the model")
        # In a collective the server beside this worker sends the sums of all buckets.
        buckets = self.map.buckets if sender == self._relay else self.map.buckets_of(sender.index)
        if not buckets or not buckets[0].id <= number <= buckets[-1].id:
            raise m.ProtocolError(f"bucket {number} is not {sender}'s")
        return self.map.buckets[number]

    def server_of(self, bucket: Bucket) -> Address:
        """The server that stores a bucket."""
        return self._servers[bucket.shard]

    def reducer_of(self, bucket: Bucket) -> Address:
        """The server that takes this worker's part of a bucket's sum."""
        return self._relay or self._servers[bucket.shard]

    def reduced_by(self, server: Address) -> tuple[int, int]:
        """First bucket, and number of buckets, of which a server sends this worker sums."""
        buckets = self.map.buckets if self.reducers == (server,) else self.map.buckets_of(server.index)
        return (buckets[0].id if buckets else 0), len(buckets)

    def piece_bit(self, bucket: Bucket, piece: int) -> int:
        """The bit of a bucket's piece in a bitmap over all pieces."""
        return 1 << (self.first_piece[bucket.id] + piece)
