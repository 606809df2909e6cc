"""Search of a placement that fits into the memory of all processes of a job."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from topotrain.config.job import Cluster, ConfigError, Schedule
from topotrain.parallel.api.split_costs import PlacementRequest, costs_of, needs_of
from topotrain.parallel.auto_placement.auto_modules import place
from topotrain.parallel.auto_placement.cost_model import USUAL, WorkerSpeeds
from topotrain.parallel.auto_placement.placement_choice import ChosenPlacement
from topotrain.parallel.estimate.memory_check import MemoryExcess, MemoryLimits, excesses
from topotrain.parallel.placement.assign_modules import Assignment

_COPIES = 3  # of parameters, in what placements are first compared by
_TRIES = 12


def placed(
    asked: PlacementRequest, here: MemoryLimits, times: Mapping[str, tuple[float, float]] | None = None
) -> tuple[Mapping[str, Assignment], ChosenPlacement]:
    """Place modules for a call that is known.

    The fastest placement is tried first. If it does not fit, the memory limits of its workers are lowered by the
    excess, and the fastest placement within the new limits is tried, until one fits.

    Args:
        here: the memory limits of this host and its processes.
        times: seconds of each module, forward and backward, where they were measured.

    Raises:
        ConfigError: no placement fits.
    """
    job, workers = asked.job, asked.topology.workers_per_group
    # Under k1F1B a worker keeps the activations of as many micro-batches as there are stages, at most.
    alive = min(1.0, workers / job.microbatches) if job.schedule is Schedule.k1F1B else 1.0
    limits: list[int] | None = None
    first: list[MemoryExcess] = []
    quickest = ""
    for _ in range(_TRIES):
        try:
            found, chosen = place(asked, limits, speeds_of(job.cluster), times, _COPIES, alive)
        except ConfigError:
            if first:  # the first excess is more useful than "no cut is small enough"
                raise first[0].error() from None
            raise
        planned = needs_of(asked, found, costs_of(asked, found))
        # All hosts are taken to be like this one, because all workers must choose the same placement.
        over = [excess for host in sorted({need.host for need in planned}) for excess in excesses(planned, here, host)]
        if not over:
            why = f"the fastest placement, {quickest}, does not: {first[0].who}: {first[0].words}" if first else ""
            return found, replace(chosen, tight=why)
        if not first:
            first, quickest = over, f"{chosen.way} of about {1000 * chosen.seconds:.3g} ms"
        if not all(any(need.workers for need in excess.needs) for excess in over):
            break  # servers alone have too much, wherever modules go
        limits = _tighter(limits or [max(chosen.memory)] * workers, chosen, over)
    raise first[0].error()


def _tighter(limits: Sequence[int], chosen: ChosenPlacement, over: Sequence[MemoryExcess]) -> list[int]:
    """Return the bytes that each worker may hold in the next try."""
    found = list(limits)
    for excess in over:
        mine = sorted({worker for need in excess.needs for worker in need.workers})
        held = sum(chosen.memory[worker] for worker in mine)
        for worker in mine:
            # Workers that exceed a limit give up the excess in proportion to the bytes that they hold.
            part = excess.nbytes * chosen.memory[worker] // max(1, held)
            # One byte less than held, so that the next try cannot choose the same placement.
            found[worker] = min(found[worker], max(0, chosen.memory[worker] - part - 1))
    return found


def speeds_of(cluster: Cluster) -> WorkerSpeeds:
    """Return the default speeds, with the link that the job emulates."""
    link = cluster.link
    if link is None:
        return USUAL
    rate = USUAL.link if link.bandwidth is None else link.bandwidth * 1e6 / 8
    return WorkerSpeeds(link=rate, delay=USUAL.delay + link.delay / 1000)
