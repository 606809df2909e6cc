"""Inner products of tensors that are merged radially and lie on several servers.

The average of a tensor needs the inner products of what the groups have pushed, over all of its elements. Every shard
adds up those of its part when it votes for a step. The coordinator puts what all shards have measured into its
decision, as it does with the norm of a clipped gradient. So each shard knows the products before it changes a value,
and no further message is sent.

A vote has the products with all groups that are staged by then. Of two groups, the vote that a shard made later has
their product.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topotrain.config.job import ConfigError, Merge
from topotrain.config.sharding import Bucket
from topotrain.core.message_limits import MAX_META
from topotrain.core.optim.adapter import OptimizerSpec
from topotrain.core.protocol import ProtocolError
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.extensions.outer_optimizer.radial.radial_average import Products, exact_sum
from topotrain.extensions.outer_optimizer.radial.radial_marks import MERGE

NOTHING = (-1, -1)
"""In the place of a staged step."""


class RadialTensors:
    """The tensors of a model that are merged radially, by their numbers.

    Args:
        model: of one shard.
        groups: the number of worker groups.

    Raises:
        ConfigError: a message could not have the inner products of this model.
    """

    def __init__(self, model: ParameterShard, groups: int) -> None:
        self._parameters = parameters = model.map.parameters
        spec = OptimizerSpec.from_text(model.schema.optimizer)
        marked = {group for group, settings in enumerate(spec.groups) if settings.get(MERGE) == Merge.kRadial.value}
        radial = [index for index, group in enumerate(spec.assignment) if group in marked]
        self._places: dict[int, list[tuple[Bucket, int]]] = {index: [] for index in radial}
        self._inside: dict[int, list[tuple[int, int]]] = {bucket.id: [] for bucket in model.buckets}
        for bucket in model.buckets:
            for at, piece in enumerate(bucket.pieces):
                tensor = model.map.segments[piece.segment].parameter
                if tensor in self._places:
                    self._places[tensor].append((bucket, at))
                    self._inside[bucket.id].append((tensor, at))
        self._here: list[list[int]] = [[] for _ in range(model.optimizers)]
        self._divided: list[dict[int, list[int]]] = [{} for _ in range(model.optimizers)]
        for tensor in radial:
            if self._places[tensor]:
                self._here[parameters[tensor].optimizer].append(tensor)
            shards = sorted({segment.shard for segment in model.map.segments_of_parameter(tensor)})
            for shard in shards if len(shards) > 1 else ():
                self._divided[parameters[tensor].optimizer].setdefault(shard, []).append(tensor)
        for fragment in range(model.optimizers):
            self._check(fragment, groups)

    def _check(self, fragment: int, groups: int) -> None:
        found = [len(tensors) for tensors in self._divided[fragment].values()]
        # Half of a message for its other fields.
        if sum(_size(groups, count) for count in found) > MAX_META // 2:
            accepted = f"must be kMean where {len(found)} servers divide tensors of {groups} worker groups"
            raise ConfigError("cluster.merge", Merge.kRadial, f"{accepted}, or use cluster {{ slicing: kTensor }}")

    def here(self, fragment: int) -> Sequence[int]:
        """Return the tensors of a fragment with elements on this shard."""
        return self._here[fragment]

    def places(self, tensor: int) -> Sequence[tuple[Bucket, int]]:
        """Return the buckets with elements of a tensor, and the numbers of their pieces."""
        return self._places[tensor]

    def inside(self, bucket: Bucket) -> Sequence[tuple[int, int]]:
        """Return the tensors in a bucket of this shard, with the numbers of their pieces."""
        return self._inside[bucket.id]

    def dtype(self, tensor: int) -> str:
        """Return the dtype of a tensor by torch's name."""
        return self._parameters[tensor].dtype

    def divided(self, fragment: int) -> Mapping[int, Sequence[int]]:
        """Return the tensors of a fragment that lie on several shards, by shard.

        Shards without any are left out.
        """
        found = self._divided[fragment]
        return {shard: found[shard] for shard in sorted(found)}


@dataclass(frozen=True, slots=True)
class ProductRow:
    """The measures of one shard of one group's staged step.

    Attributes:
        staged: of each group what was staged then: the number of its resets on this shard, and the step.
        products: of each divided tensor of the shard, the inner product with the tensor of each group.
    """

    staged: tuple[tuple[int, int], ...]
    products: tuple[tuple[float, ...], ...]

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        numbers = (number for pair in self.staged for number in pair)
        values = (value for row in self.products for value in row)
        return _layout(len(self.staged), len(self.products)).pack(*numbers, *values)


def unpack_rows(measured: bytes, groups: int, divided: Mapping[int, Sequence[int]]) -> dict[int, ProductRow]:
    """Return the rows of all shards about one step, by shard.

    divided: as `RadialTensors.divided` of the step's fragment.

    Raises:
        ProtocolError: these are not the rows of these tensors.
    """
    if len(measured) != sum(_size(groups, len(tensors)) for tensors in divided.values()):
        raise ProtocolError(f"{len(measured)} bytes of inner products, of {len(divided)} shards and {groups} groups")
    found, at = {}, 0
    for shard, tensors in divided.items():
        numbers = _layout(groups, len(tensors)).unpack_from(measured, at)
        at += _size(groups, len(tensors))
        staged, values = numbers[: 2 * groups], numbers[2 * groups :]
        rows = (values[first : first + groups] for first in range(0, len(values), groups))
        found[shard] = ProductRow(tuple(zip(staged[::2], staged[1::2], strict=True)), tuple(rows))
    return found


def joined_products(
    rows: Mapping[int, Mapping[int, ProductRow]], groups: Sequence[int], divided: Mapping[int, Sequence[int]]
) -> dict[int, Products]:
    """Return the inner products over all shards, by tensor.

    Args:
        rows: of each group of a round, its rows by shard.
        groups: all groups, in the order of the rows' numbers.
        divided: as `RadialTensors.divided` of the round's fragment.
    """
    place = {group: at for at, group in enumerate(groups)}
    parts: dict[int, dict[tuple[int, int], list[float]]] = {}
    for shard, tensors in divided.items():
        for at, tensor in enumerate(tensors):
            found = parts.setdefault(tensor, {})
            for a, b in ((a, b) for a in sorted(rows) for b in sorted(rows) if a <= b):
                first, second = rows[a][shard], rows[b][shard]
                # What a vote says about a group that has been started again since is void.
                is_known = first.staged[place[b]] == second.staged[place[b]]
                value = first.products[at][place[b]] if is_known else second.products[at][place[a]]
                found.setdefault((a, b), []).append(value)
    # Exactly, so that the order of the shards does not matter.
    return {tensor: {pair: exact_sum(values) for pair, values in found.items()} for tensor, found in parts.items()}


def _size(groups: int, tensors: int) -> int:
    return _layout(groups, tensors).size


def _layout(groups: int, tensors: int) -> struct.Struct:
    return struct.Struct(f"<{2 * groups}q{groups * tensors}d")
