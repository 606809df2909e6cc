"""Compression on a server: pushes are decoded, means and values are encoded."""

from topotrain.config.job import Cluster
from topotrain.config.sharding import SliceMap
from topotrain.core.model.body_codec import ServerBodyCodec
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.server.server_extension import GradientExtension
from topotrain.extensions.compression.message_filter import ServerEncoding


class CompressionServer(GradientExtension):
    """A server's part of the rule in `message_filter`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def server_codec(self, slice_map: SliceMap, shard: int, flats: FlatBuffers) -> ServerBodyCodec:
        return ServerEncoding(self._cluster, slice_map, shard, flats)
