"""`placement: kAuto` in a job: what the forward is called with comes from the loader, the rest from the job alone."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from topotrain.front.inputs import Inputs, inputs_of
from topotrain.job import Cluster, Job, Road, Schedule
from topotrain.sampling import cut
from topotrain.split.assign import Assignment
from topotrain.split.auto import Chosen
from topotrain.split.bill import held_bytes
from topotrain.split.capture import Captured
from topotrain.split.division import Division
from topotrain.split.placing import Call, place
from topotrain.split.room import COPIES, Need, check, limit, room
from topotrain.split.tasks import USUAL, Speeds

_BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)


def place_modules(
    job: Job, model: nn.Module, captured: Captured, found: Mapping[str, Assignment], loader: Any
) -> tuple[Mapping[str, Assignment], Chosen]:
    """`placement: kAuto` in a job: where modules go that nobody has placed, the same on all workers of a group.

    Args:
        found: what the conf and the script say, by `assign.assignments`.
        loader: the script's, before it is divided.

    Raises:
        ConfigError: shapes are not known, or nothing fits.
    """
    given = inputs_of(model, loader, job.schedule is Schedule.k1F1B)
    return placed(job, model, captured, found, call_of(job, model, given), None)


def placed(
    job: Job,
    model: nn.Module,
    captured: Captured,
    found: Mapping[str, Assignment],
    call: Call,
    times: Mapping[str, tuple[float, float]] | None,
) -> tuple[Mapping[str, Assignment], Chosen]:
    """The same for a known call; `times` by module, where they were measured."""
    bound = limit()
    limits = None if bound is None else [bound] * len(call.shares)
    return place(model, captured, found, job.partition, call, job.microbatches, limits, speeds_of(job.cluster), times)


def call_of(job: Job, model: nn.Module, given: Inputs) -> Call:
    """A call for a group's batch, and each worker's part of it; a worker without samples repeats one."""
    cluster, workers = job.cluster, job.cluster.nworkers_per_group
    batch = given.samples * (workers if job.per_worker_batch else 1)
    least = 2 if any(isinstance(module, _BATCH_NORM) for module in model.modules()) else 1
    shares = [high - low for low, high in cut(batch, workers, cluster.shares, least)]
    return Call(given.args, given.kwargs, given.samples, tuple(max(1, share) for share in shares))


def speeds_of(cluster: Cluster) -> Speeds:
    """The usual speeds, with the link that the job pretends."""
    link = cluster.link
    if link is None:
        return USUAL
    rate = USUAL.link if link.bandwidth is None else link.bandwidth * 1e6 / 8
    return Speeds(link=rate, delay=USUAL.delay + link.delay / 1000)


def check_room(job: Job, model: nn.Module, division: Division, worker: int) -> None:
    """Refuse, before anything is made, what a worker of a split model cannot hold; activations are not counted.

    Args:
        model: as the script has made it; what is of other workers will be given back.

    Raises:
        ConfigError: with what is needed, and what there is.
    """
    need = Need(COPIES * held_bytes(division, worker), shared=job.cluster.road is not Road.kTcp)
    here = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    check(need, room(job.cluster.nworkers_per_procs), f"worker {worker}", freed=here)
