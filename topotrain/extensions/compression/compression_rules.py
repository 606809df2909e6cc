"""Combinations of job fields that compression excludes."""

from topotrain.config.combinations import Combination
from topotrain.config.job import FOREIGN, UNSHARED, Algorithm, Compression, shares_values

COMBINATIONS = (
    Combination(
        "cluster.compression",
        lambda c: (
            c.compression is not Compression.kNone and (c.engine in FOREIGN or c.algorithm is not Algorithm.kAuto)
        ),
        "needs engine and algorithm kAuto (or engine kOwn): what lies between is summed uncompressed",
    ),
    Combination("cluster.compression", lambda c: c.compression is not Compression.kNone and shares_values(c), UNSHARED),
)
