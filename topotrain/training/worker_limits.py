"""The largest number of workers that a script's batches and model allow."""

from typing import Any

from torch import nn

from topotrain.core.events import Bounded
from topotrain.training.context import Context
from topotrain.training.data.distributed_loader import most_workers


def bound(here: Context, model: nn.Module, loader: Any, cut: bool) -> None:
    """Worker (0,0) reports the limit, if there is one.

    Args:
        cut: the model is split over the workers of the group.
    """
    if not here.is_main:
        return
    job, most = here.place.job, 0
    # `will_split` is false for a group of one, although a script that names workers would split with more of them.
    alone = here.place.topology.workers_per_group == 1
    if cut or job.splits or (alone and here.names_workers(model)):
        text = "one model is split over the workers of the group, and a snapshot has the parts of just these"
    elif loader is None:
        text = "the script divides its data itself, so the rest of an epoch is not known"
    else:
        found = most_workers(loader, job.per_worker_batch)
        most = found or 0
        text = "" if found is None else f"an epoch has one batch for each of {most} workers at most (per_worker_batch)"
    if text:
        here.emit(Bounded(str(here.me), most, text))
