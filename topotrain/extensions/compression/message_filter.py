"""The encoding of messages: which bodies are encoded, and the state of both sides.

A server and its workers never work with numbers that the other side does not know. The worker sends later the part of a
gradient that a push left out, and the server that of a mean. The server goes on with the mean that the workers decode.
Values travel as differences to the last values of the worker group, so its workers stay equal bit for bit.

All other bodies travel as they are: initial and final values, edits, optimizer state, and messages between server
groups. So do bodies of a dtype that no codec encodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from topotrain.config.job import Cluster
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address
from topotrain.core.model.body_codec import BodyCodec, ServerBodyCodec, not_coded, present_body
from topotrain.core.model.schema import FlatBuffers, torch_dtype, typed
from topotrain.core.protocol import NO_REVISION, ProtocolError, Push, ReducedGradient, Values
from topotrain.core.server.component_state import State, restore_tensor
from topotrain.extensions.compression.codecs import Codec, ScratchMemory
from topotrain.extensions.compression.encoded_sizes import of_replies
from topotrain.extensions.compression.error_feedback import DeltaStream, ErrorFeedback, codec_for, working_dtype

_ALIGN = 64  # bytes: codecs read 4-byte words, and a cache line belongs to one bucket


class _Codecs:
    """The codec of each bucket, and memory for its encodings.

    replies: of means and values, and not of pushes.
    """

    def __init__(
        self, cluster: Cluster, slice_map: SliceMap, buckets: Sequence[Bucket], flats: FlatBuffers, replies: bool
    ) -> None:
        scratch = ScratchMemory()
        kind, ratio = of_replies(cluster) if replies else cluster.compression, cluster.compression_ratio
        self._codecs = [codec_for(kind, torch_dtype(space.dtype), ratio, scratch) for space in slice_map.spaces]
        self._flats = flats
        self._places: dict[int, tuple[int, int]] = {}
        # All encodings of a name share one piece of memory, which `flats` can make visible to peers.
        self._total = 0
        for bucket in buckets:
            codec = self._codecs[bucket.space]
            if codec is not None:
                size = codec.size(bucket.hi - bucket.lo)
                self._places[bucket.id] = self._total, self._total + size
                self._total += -(-size // _ALIGN) * _ALIGN

    def of(self, bucket: Bucket) -> Codec | None:
        """The bucket's codec, or None where bodies travel as they are."""
        return self._codecs[bucket.space]

    def buffer(self, name: str, bucket: Bucket) -> torch.Tensor:
        """The bytes of one encoding of the bucket, 1-D uint8, zero at first."""
        lo, hi = self._places[bucket.id]
        return self._flats.raw(name, self._total)[lo:hi]


class _Sender:
    """The error feedback of one bucket, and the loss scale of its residual."""

    def __init__(self, codec: Codec, numel: int, dtype: torch.dtype, coded: torch.Tensor) -> None:
        kept = working_dtype(dtype)
        self.coded = coded
        self._codec = codec
        # Two buffers: the residual must stay as it is until the step counts.
        self._feedback = ErrorFeedback(codec, torch.zeros(numel, dtype=kept), torch.zeros(numel, dtype=kept))
        self._inverse = 0.0  # 0: nothing has counted yet

    def encode(self, bucket: Bucket, present: int, gradient: torch.Tensor, more: bool) -> None:
        """Encode a gradient. The residual of pieces that are not `present` is kept."""
        absent = [bucket.place(piece) for i, piece in enumerate(bucket.pieces) if not present >> i & 1]
        self._feedback.encode(gradient, self.coded, more, absent)

    def encode_uncounted(self, gradient: torch.Tensor) -> None:
        """Encode a gradient to which the receiver will give no weight."""
        self._codec.encode(gradient, self.coded)

    def settle(self, inverse: float) -> None:
        """The encoded gradients count. inverse: their factor (`Commit.inv_scale`)."""
        if self._feedback.drafted:
            # Gradients carry the loss scale of their step, so the residual is converted when the scale has changed.
            self._feedback.settle(self._inverse / inverse if self._inverse else 1.0)
            self._inverse = inverse

    def drop(self) -> None:
        """The encoded gradients do not count."""
        self._feedback.drop()

    def state_dict(self) -> State:
        return {"coded": self.coded, "inverse": self._inverse, "feedback": self._feedback.state_dict()}

    def load_state_dict(self, state: State) -> None:
        restore_tensor(self.coded, state["coded"])
        self._inverse = state["inverse"]
        self._feedback.load_state_dict(state["feedback"])


class WorkerEncoding(BodyCodec):
    """The codec of a worker.

    It encodes on the script's thread, and decodes on the threads of the transports, one message at a time.

    Args:
        cluster: the settings.
        slice_map: the map.
        flats: the worker's buffers. Values are decoded into "params" in place, means into "mean".
        adds: every push of a step counts, since each backward is a reduction of its own. Else the last one of a
            bucket counts.
        held: the buckets of this worker. None: all.
    """

    def __init__(
        self,
        cluster: Cluster,
        slice_map: SliceMap,
        flats: FlatBuffers,
        adds: bool,
        held: Sequence[Bucket] | None = None,
    ) -> None:
        buckets = slice_map.buckets if held is None else held
        self._out = _Codecs(cluster, slice_map, buckets, flats, False)
        self._in = _Codecs(cluster, slice_map, buckets, flats, True)  # its scratch is another thread's
        self._flats = flats
        self._adds = adds
        self._differences = _differences(cluster)
        self._senders: dict[int, _Sender] = {}
        self._streams: dict[int, DeltaStream] = {}

    def push(self, bucket: Bucket, weight: float, present: int, gradient: torch.Tensor) -> torch.Tensor:
        """The body of a push. `gradient` may change after the call, unless it is the body."""
        codec = self._out.of(bucket)
        if codec is None:
            return gradient
        sender = self._senders.get(bucket.id)
        if sender is None:
            coded = self._out.buffer("coded push", bucket)
            sender = self._senders[bucket.id] = _Sender(codec, gradient.numel(), gradient.dtype, coded)
        if self._adds and weight <= 0:
            sender.encode_uncounted(gradient)  # samples that do not count must not be sent later, either
        else:
            sender.encode(bucket, present, gradient, more=self._adds)
        return sender.coded

    def step_done(self, found_inf: bool, weight: float, revisions: Sequence[int], inv_scale: float) -> None:
        """The step is committed: its pushes count, or do not. Arguments as in `Commit`."""
        nothing = found_inf or (weight <= 0 and not self._adds)
        for number, sender in self._senders.items():
            if nothing or (revisions and revisions[number] == NO_REVISION):
                sender.drop()
            else:
                sender.settle(inv_scale)

    def is_coded(self, message: ReducedGradient | Values, bucket: Bucket) -> bool:
        """Whether the body of this message is an encoding."""
        if self._in.of(bucket) is None:
            return not_coded(message, bucket)
        return isinstance(message, ReducedGradient) or message.coded

    def landing(self, message: ReducedGradient | Values, bucket: Bucket) -> torch.Tensor:
        """Memory for such a body."""
        return self._in.buffer(f"coded {type(message).__name__}", bucket)

    def mean(self, bucket: Bucket, data: torch.Tensor) -> torch.Tensor:
        """Decode a mean. It stays until the next one of the bucket."""
        mean = self._flats.view("mean", bucket)
        _decode(_codec(self._in, bucket), data, mean)
        return mean

    def values(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Add the encoded difference of new values to "params"."""
        try:
            self._stream(bucket).decode(data)
        except ValueError as error:
            raise _not_decoded(error) from error

    def restart(self, bucket: Bucket) -> None:
        """Values came as they are, and are in "params"."""
        if self._differences and self._in.of(bucket) is not None:
            self._stream(bucket).restart(self._flats.view("params", bucket))

    def _stream(self, bucket: Bucket) -> DeltaStream:
        stream = self._streams.get(bucket.id)
        if stream is None:
            # The stream's `held` is "params" itself: no second copy of the values is needed.
            stream = DeltaStream(_codec(self._in, bucket), self._flats.view("params", bucket))
            self._streams[bucket.id] = stream
        return stream


class ServerEncoding(ServerBodyCodec):
    """The codec of a server, for all its worker groups.

    One thread at a time may use it. `landing` is an exception.
    """

    def __init__(self, cluster: Cluster, slice_map: SliceMap, shard: int, flats: FlatBuffers) -> None:
        buckets = slice_map.buckets_of(shard)
        self._buckets = {bucket.id: bucket for bucket in buckets}
        self._pushes = _Codecs(cluster, slice_map, buckets, flats, False)
        self._codecs = _Codecs(cluster, slice_map, buckets, flats, True)
        self._flats = flats
        self._differences = _differences(cluster)
        self._taken: dict[tuple[Address, int], tuple[int, int]] = {}  # (step, ordinal) of the last push
        self._means: dict[int, dict[int, _Sender]] = {}  # by group and bucket
        self._streams: dict[tuple[int, int], DeltaStream] = {}
        self._coded: set[tuple[int, int]] = set()  # the last values of the group were a difference

    # --- pushes and means ----------------------------------------------------------------------------------------

    def landing(self, worker: Address, bucket: Bucket) -> torch.Tensor | None:
        """Memory for a worker's push; None: it is not encoded."""
        name = f"coded push {worker.group}/{worker.index}"
        return None if self._pushes.of(bucket) is None else self._pushes.buffer(name, bucket)

    def push(self, worker: Address, message: Push, bucket: Bucket, like: torch.Tensor) -> torch.Tensor:
        """A worker's gradient, typed like `like`. Raises ProtocolError for another body."""
        body = present_body(message)
        codec = self._pushes.of(bucket)
        if codec is None:
            return typed(body, like)
        gradient = self._flats.view(f"push {worker.group}/{worker.index}", bucket)
        now = (message.step, message.ordinal)
        if now > self._taken.get((worker, bucket.id), (-1, -1)):  # a repeated push is decoded already
            _decode(codec, body, gradient)
            self._taken[worker, bucket.id] = now
        return gradient

    def mean(self, group: int, bucket: Bucket, present: int, mean: torch.Tensor) -> None:
        """Encode a mean, and make it, in place, the one that the workers will decode."""
        codec = self._codecs.of(bucket)
        if codec is None:
            return
        sender = self._sender(group, bucket, codec, mean.dtype)
        # Each mean of a step is sent, so each adds to the residual of the last one.
        sender.encode(bucket, present, mean, more=True)
        # The server goes on with the decoded mean, so that its update is the one that the workers have seen.
        codec.decode(sender.coded, mean)

    def _sender(self, group: int, bucket: Bucket, codec: Codec, dtype: torch.dtype) -> _Sender:
        senders = self._means.setdefault(group, {})
        sender = senders.get(bucket.id)
        if sender is None:
            coded = self._codecs.buffer(f"coded mean {group}", bucket)
            sender = senders[bucket.id] = _Sender(codec, bucket.hi - bucket.lo, dtype, coded)
        return sender

    def mean_body(self, group: int, bucket: Bucket, mean: torch.Tensor) -> torch.Tensor:
        """The body of that mean."""
        return mean if self._codecs.of(bucket) is None else self._means[group][bucket.id].coded

    def step_done(self, group: int, applied: bool, inv_scale: float) -> None:
        """The group's step is over: its means count, or do not."""
        for sender in self._means.get(group, {}).values():
            if applied:
                sender.settle(inv_scale)
            else:
                sender.drop()

    def forget(self, group: int) -> None:
        # The residual of the means is kept for the new processes.
        self._taken = {key: taken for key, taken in self._taken.items() if key[0].group != group}
        for sender in self._means.get(group, {}).values():
            sender.drop()
        self._streams = {key: stream for key, stream in self._streams.items() if key[0] != group}
        self._coded = {key for key in self._coded if key[0] != group}

    # --- values --------------------------------------------------------------------------------------------------

    def show(self, group: int, bucket: Bucket, values: torch.Tensor, anew: bool) -> None:
        codec, key = self._codecs.of(bucket), (group, bucket.id)
        if codec is None or not self._differences:
            return
        stream = self._streams.get(key)
        # These values travel as they are. The differences after them refer to them.
        if stream is None or anew:
            self._new_stream(group, bucket).restart(values)
            self._coded.discard(key)
        else:
            stream.encode(values, self._coded_values(group, bucket))
            self._coded.add(key)

    def difference(self, group: int, bucket: Bucket) -> torch.Tensor | None:
        return self._coded_values(group, bucket) if (group, bucket.id) in self._coded else None

    def _new_stream(self, group: int, bucket: Bucket) -> DeltaStream:
        held = self._flats.view(f"shown {group}", bucket)
        stream = self._streams[group, bucket.id] = DeltaStream(_codec(self._codecs, bucket), held)
        return stream

    def _coded_values(self, group: int, bucket: Bucket) -> torch.Tensor:
        return self._codecs.buffer(f"coded values {group}", bucket)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        means = {
            (group, number): sender.state_dict()
            for group, senders in self._means.items()
            for number, sender in senders.items()
        }
        # Other workers of the group may still be sent the last difference.
        coded = {(group, number): self._coded_values(group, self._buckets[number]) for group, number in self._coded}
        shown = {key: stream.state_dict() for key, stream in self._streams.items()}
        return {"taken": self._taken, "means": means, "shown": shown, "coded": coded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._taken = dict(state["taken"])
        for (group, number), sender in state["means"].items():
            bucket = self._buckets[number]
            dtype = sender["feedback"]["residual"].dtype
            self._sender(group, bucket, _codec(self._codecs, bucket), dtype).load_state_dict(sender)
        for (group, number), stream in state["shown"].items():
            self._new_stream(group, self._buckets[number]).load_state_dict(stream)
        for (group, number), data in state["coded"].items():
            restore_tensor(self._coded_values(group, self._buckets[number]), data)
        self._coded = set(state["coded"])


def _differences(cluster: Cluster) -> bool:
    """Workers that change their parameters themselves cannot add differences to them."""
    return cluster.n_push == cluster.n_fetch == 1


def _codec(codecs: _Codecs, bucket: Bucket) -> Codec:
    codec = codecs.of(bucket)
    assert codec is not None
    return codec


def _decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    try:
        codec.decode(data, out)
    except ValueError as error:
        raise _not_decoded(error) from error


def _not_decoded(error: ValueError) -> ProtocolError:
    return ProtocolError(f"not an encoding: {error}")
