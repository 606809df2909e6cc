"""The bytes of encoded bodies, by arithmetic.

`codecs` and a plan need the same, and a plan loads no torch.
"""

from math import ceil

from topotrain.config.job import Cluster, Compression

SMALL_BLOCK = 256
"""Elements that share a scale in kE3M0. The scales add 0.4 % of the bytes of float32."""
BLOCK = 512
"""Elements that share a scale in kInt8. The scales add 0.8 % to the bytes."""
_FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def of_replies(cluster: Cluster) -> Compression:
    """Return the compression of means and values, which servers send."""
    kind = cluster.compression
    # Workers go on from the values of a round. Of all but the largest changes they would know many rounds later.
    if kind is Compression.kTopK and cluster.outer is not None:
        return Compression.kNone
    # All workers read them, and an error of a half would be that of all.
    return Compression.kBf16 if kind is Compression.kE3M0 else kind


def has_codec(kind: Compression, dtype: str) -> bool:
    """Whether bodies of this dtype are encoded. A cast leaves 2 bytes as they are."""
    if kind is Compression.kNone or dtype not in _FLOATS:
        return False
    return kind not in (Compression.kFp16, Compression.kBf16) or _FLOATS[dtype] > 2


def int8_bytes(numel: int) -> int:
    """Return the bytes of kInt8: a byte for each element, and the scales."""
    return 4 * -(-numel // BLOCK) + numel


def e3m0_bytes(numel: int) -> int:
    """Return the bytes of kE3M0: half a byte for each element, and the scales."""
    return 4 * -(-numel // SMALL_BLOCK) + (numel + 1) // 2


def kept(ratio: float, numel: int) -> int:
    """Return how many elements kTopK sends."""
    return min(numel, max(1, ceil(ratio * numel)))


def encoded_bytes(kind: Compression, numel: int, ratio: float) -> int:
    """Return the bytes of so many elements of a dtype that `has_codec`."""
    match kind:
        case Compression.kInt8:
            return int8_bytes(numel)
        case Compression.kE3M0:
            return e3m0_bytes(numel)
        case Compression.kTopK:
            return 8 * kept(ratio, numel)
    return 2 * numel
