"""Combinations of job fields that backup workers exclude."""

from collections.abc import Callable
from typing import Any

from topotrain.config.combinations import Combination
from topotrain.config.job import FOREIGN, Algorithm, Apply, Compression, Grads, Placement, Pull, Shard


def _refused_with_backup(field: str, refused: Callable[[Any], object], accepted: str) -> Combination:
    """Refuse values of a field with backup workers."""
    # Servers decide step by step which gradients count, so no process may have seen or used them before that.
    inside = "cluster" if field.startswith("cluster.") else ""
    count: Callable[[Any], int] = (lambda c: c.backup) if inside else (lambda j: j.cluster.backup)
    return Combination(field, lambda b: count(b) and refused(b), f"{accepted} with cluster.backup above 0", inside)


COMBINATIONS = (
    Combination(
        "cluster.backup",
        lambda c: c.backup and c.backup >= c.nworkers_per_group,
        "must be less than nworkers_per_group: at least one worker has to contribute to a step",
    ),
    Combination(
        "cluster.backup",
        lambda c: c.backup and not c.nworker_groups == c.nserver_groups == 1,
        "above 0 needs nworker_groups: 1 and nserver_groups: 1, a synchronous group that pushes to servers",
    ),
    _refused_with_backup("cluster.engine", lambda c: c.engine in FOREIGN, "must be kAuto or kOwn"),
    _refused_with_backup("cluster.algorithm", lambda c: c.algorithm is not Algorithm.kAuto, "must be kAuto"),
    _refused_with_backup("cluster.compression", lambda c: c.compression is not Compression.kNone, "must be kNone"),
    _refused_with_backup("grads", lambda j: j.grads is not Grads.kHidden, "must be kHidden"),
    _refused_with_backup("apply", lambda j: j.apply is Apply.kOnArrival, "must be kAtStep"),
    _refused_with_backup("pull", lambda j: j.pull is Pull.kLazy, "must be kStep"),
    _refused_with_backup("per_worker_batch", lambda j: not j.per_worker_batch, "must be true"),
    _refused_with_backup("shard", lambda j: j.shard is Shard.kLease, "must be kAuto or kStatic"),
    _refused_with_backup("partition", lambda j: j.partition, "must not be given"),
    _refused_with_backup("placement", lambda j: j.placement is Placement.kAuto, "must be kManual"),
    _refused_with_backup(
        "updater.clip_norm", lambda j: j.updater is not None and j.updater.clip_norm is not None, "must not be given"
    ),
)
