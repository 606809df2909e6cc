"""The bytes that a plan counts are those of the codecs."""

import pytest
import torch

from topotrain.config.job import ChangeMethod, Cluster, Compression, LRGen, Updater, UpdaterType
from topotrain.extensions.compression.encoded_sizes import encoded_bytes, has_codec, of_replies
from topotrain.extensions.compression.error_feedback import codec_for


@pytest.mark.parametrize("kind", list(Compression))
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "complex64"])
def test_sizes_are_those_of_the_codecs(kind: Compression, dtype: str) -> None:
    codec = codec_for(kind, getattr(torch, dtype), 0.03)
    assert (codec is not None) == has_codec(kind, dtype)
    for numel in (1, 2, 255, 256, 257, 511, 512, 513, 100_001):
        assert codec is None or codec.size(numel) == encoded_bytes(kind, numel, 0.03)


def test_only_pushes_have_four_bits() -> None:
    kinds = {kind: of_replies(Cluster(compression=kind)) for kind in Compression}
    assert kinds.pop(Compression.kE3M0) is Compression.kBf16
    assert all(kind is replies for kind, replies in kinds.items())


def test_values_of_a_round_are_not_thinned_out() -> None:
    outer = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(ChangeMethod.kFixed, base_lr=1.0))
    kinds = {kind: of_replies(Cluster(compression=kind, outer=outer)) for kind in Compression}
    assert (kinds[Compression.kTopK], kinds[Compression.kE3M0]) == (Compression.kNone, Compression.kBf16)
    assert kinds[Compression.kInt8] is Compression.kInt8
