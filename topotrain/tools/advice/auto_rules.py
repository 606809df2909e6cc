"""The fields that decide a layout, and what `cluster { auto: true }` excludes."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from topotrain.config.combinations import Combination
from topotrain.config.job import Cluster, Job, Placement

_ALONE = (
    *("nworker_groups", "nserver_groups", "nworkers_per_group", "nservers_per_group"),
    *("nworkers_per_procs", "nservers_per_procs", "server_worker_separate"),
    *("sync_freq", "shares", "max_staleness", "n_push", "n_fetch", "agreement"),
    *("engine", "algorithm", "compression", "compression_ratio", "replicas", "outer"),
)
LAYOUT_FIELDS = (
    *_ALONE,
    # Without one of the others these are refused in any case.
    *("moving_rate", "backup", "weigh", "fragments", "overlap", "keep", "blend", "quorum", "slack", "merge", "pace"),
)
"""Of a cluster block. The other fields say where and by which means a job runs, and stay as they are."""

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Cluster)}
_CHOSEN = "must be left out with auto: true, which chooses it"


def _chosen(name: str) -> Combination:
    """Refuse a field of the layout beside `auto`."""
    return Combination(f"cluster.{name}", lambda c: c.auto and getattr(c, name) != _DEFAULTS[name], _CHOSEN)


def _needs_layout(field: str, refused: Callable[[Any], object], accepted: str) -> Combination:
    """Refuse a field of the job that only makes sense for a layout that is known."""
    return Combination(field, lambda j: j.cluster.auto and refused(j), f"{accepted} with cluster.auto", "")


COMBINATIONS = (
    *map(_chosen, _ALONE),
    _needs_layout("partition", lambda j: j.partition, "must not be given"),
    _needs_layout("placement", lambda j: j.placement is not Placement.kManual, "must be kManual"),
    _needs_layout("start_groups", lambda j: j.start_groups, "must be 0"),
)


def without_layout(job: Job) -> Job:
    """Return a job with a cluster block that says nothing about the layout."""
    bare = replace(job.cluster, auto=False, **{name: _DEFAULTS[name] for name in LAYOUT_FIELDS})
    return replace(job, cluster=bare)
