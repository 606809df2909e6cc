"""Compression in the client of a worker."""

from collections.abc import Sequence

from topotrain.config.job import Cluster
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.core.client.client_context import ClientModel, ServerChannel, StepEnd, StepOutcome
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import BodyCodec
from topotrain.core.model.schema import FlatBuffers
from topotrain.extensions.compression.message_filter import WorkerEncoding


class CompressionClient(ClientExtension):
    """One worker's part of the rule in `message_filter`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._me = channel.me

    def body_codec(self, slice_map: SliceMap, flats: FlatBuffers, adds: bool, held: Sequence[Bucket]) -> BodyCodec:
        self._codec = WorkerEncoding(self._cluster, slice_map, flats, adds, held)
        return self._codec

    def after_commit(self, end: StepEnd, outcome: StepOutcome) -> None:
        # If the servers refused this worker's gradients, their encoding must not leave a residual behind.
        refused = any(worker == self._me.index for worker, _ in outcome.refused)
        self._codec.step_done(outcome.found_inf or refused, end.weight, end.revisions, end.inv_scale)
