"""Combinations of job fields that are refused for a model split over a group."""

from collections.abc import Callable

from topotrain.config.combinations import Combination
from topotrain.config.job import FOREIGN, Algorithm, Apply, Job, Pull


def _refused_where_split(field: str, refused: Callable[[Job], object], accepted: str) -> Combination:
    why = "where one model is split over the workers of a group (partition, placement)"
    return Combination(field, lambda j: j.splits and refused(j), f"{accepted} {why}", inside="")


COMBINATIONS = (
    Combination(
        "partition.location",
        lambda p: p.location is not None and p.partition_dim != -1,
        "needs partition_dim: -1, a whole module on one worker",
    ),
    Combination(
        "partition",
        lambda j: any(p.location is not None and p.location >= j.cluster.nworkers_per_group for p in j.partition),
        "location must be the number of a worker of a group, below nworkers_per_group",
    ),
    _refused_where_split("apply", lambda j: j.apply is Apply.kOnArrival, "must be kAtStep"),
    _refused_where_split("pull", lambda j: j.pull is Pull.kLazy, "must be kStep"),
    _refused_where_split("cluster.n_push", lambda j: j.cluster.n_push > 1, "must be 1"),
    _refused_where_split("cluster.n_fetch", lambda j: j.cluster.n_fetch > 1, "must be 1"),
    _refused_where_split("cluster.engine", lambda j: j.cluster.engine in FOREIGN, "must be kAuto or kOwn"),
    _refused_where_split(
        "cluster.algorithm",
        lambda j: j.cluster.algorithm is not Algorithm.kAuto,
        "must be kAuto, straight to each server,",
    ),
)
