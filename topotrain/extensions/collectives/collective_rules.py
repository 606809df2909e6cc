"""Combinations of job fields that collectives exclude: `engine` and `algorithm`."""

from topotrain.config.combinations import Combination
from topotrain.config.job import FOREIGN, Algorithm, Apply, all_reduces

_BESIDE = (
    "needs nworker_groups = nserver_groups = 1, as many servers as workers (per group and per unit) "
    "and server_worker_separate: false"
)

COMBINATIONS = (
    Combination(
        "apply",
        lambda j: j.apply is Apply.kOnArrival and j.cluster.engine in FOREIGN,
        "needs engine kOwn: torch.distributed hands over no bucket before all are added up",
    ),
    Combination("cluster.engine", lambda c: c.engine in FOREIGN and not all_reduces(c), _BESIDE),
    Combination(
        "cluster.engine",
        lambda c: c.engine in FOREIGN and c.link is not None,
        "must be kAuto or kOwn with a link: torch.distributed cannot be sent over an emulated network",
    ),
    Combination("cluster.algorithm", lambda c: c.algorithm is not Algorithm.kAuto and not all_reduces(c), _BESIDE),
    Combination(
        "cluster.algorithm",
        lambda c: c.algorithm is not Algorithm.kAuto and c.engine in FOREIGN,
        "must be kAuto with engine kGloo or kNccl, which choose their own",
    ),
)
