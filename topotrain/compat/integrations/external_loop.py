"""topotrain inside the loop of another library, which reads ahead, logs and saves on its own.

Rule: the library sees one ordinary process. A batch counts for a step when it is handed to the model, not when the
library has drawn it: many draw one batch more than they use, to know which is the last.
"""

import os
from collections import deque
from collections.abc import Callable
from operator import length_hint
from typing import Any

from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import ConfigError, Shard
from topotrain.core.events import Unrepeatable
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.data.distributed_loader import BatchAccounting, ShardedLoader

# What torchrun, MPI and Slurm say of the processes that they have started; a worker is none of those.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)


def hide_launcher() -> None:
    """In a job: forget how this process's unit was started, or the library would wait for processes of its own."""
    if process.current() is not None:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)


def missing(library: str, extra: str) -> ImportError:
    """What is raised where the library is not installed."""
    return ImportError(f"{library} is not installed: pip install 'topotrain[{extra}]'")


class ExternalAccounting:
    """The ledger of a loader that somebody reads ahead: a draw is noted once its batch is handed on.

    Args:
        ledger: where draws are noted.
    """

    def __init__(self, ledger: BatchAccounting) -> None:
        self._ledger = ledger
        self._drawn: deque[tuple[int, int, float, int]] = deque()

    def drawn(self, stream: int, seq: int, weight: float, samples: int) -> None:
        """The library has drawn a batch."""
        self._drawn.append((stream, seq, weight, samples))

    def left_early(self, epoch: int, batches: int) -> None:
        """The library has left the loop; what it had drawn and not used is void."""
        self._drawn.clear()
        self._ledger.left_early(epoch, batches)

    def lost(self, stream: int, batches: int) -> None:
        """As the loader tells it."""
        self._ledger.lost(stream, batches)

    def hand_on(self) -> float:
        """The first of the drawn batches goes to the model now. Returns its weight; 0: it is there to keep in step."""
        if not self._drawn:
            return 0.0
        stream, seq, weight, samples = self._drawn.popleft()
        self._ledger.drawn(stream, seq, weight, samples)
        return weight


def tie(model: nn.Module, optimizer: Optimizer, loader: Any, counted: bool = False) -> tuple[Any, ExternalAccounting]:
    """`topotrain.prepare`, for a library that reads ahead: (the worker's share of the loader, its handing).

    Only in a job. counted: the library takes `len(loader)` for what an epoch has, and validates, or ends, by it. A
    group that got fewer batches than that, or none, would do neither; so each group gets a fixed part.

    Raises ConfigError as `prepare` does; and with `counted` for leases, and for a group without a batch.
    """
    here = process.current()
    assert here is not None
    groups = here.place.topology.worker_groups
    if counted and groups > 1 and here.place.job.shard is Shard.kLease:
        accepted = "must be kAuto or kStatic: the library's loop counts an epoch's batches before it begins"
        raise ConfigError("shard", Shard.kLease.value, accepted)
    refuse("cluster.backup", here.place.job.cluster.backup, "must be 0: the library counts its batches")
    if here.resumed is not None or here.place.identity.incarnation:
        accepted = "must not happen here: the library's loop has a state of its own, and would begin anew"
        raise ConfigError("restart", str(here.me), accepted)
    here.emit(Unrepeatable(str(here.me), "the loop is another library's, whose state nobody could put back", job=True))
    here.counted = counted
    _, _, share = api.prepare(model, optimizer, loader)
    assert isinstance(share, ShardedLoader)
    share.memory = here.continuing = None
    if counted and length_hint(share, 1) == 0:  # a stream may have no length
        raise ConfigError("len(loader)", 0, f"must be at least {groups} batches, one for each worker group")
    return share, share.note_through(ExternalAccounting)


def refuse(field: str, value: object, accepted: str) -> None:
    """Raise ConfigError in a job if `value` is true: the library would do something that does not hold there."""
    if value and process.current() is not None:
        raise ConfigError(field, value, accepted)


def has_final_values_only_at_the_end() -> bool:
    """Whether groups go on without each other, so that the job's result is known when all have ended."""
    here = process.current()
    return here is not None and here.worker is not None and here.place.topology.worker_groups > 1


def with_final_values(save: Callable[[], object]) -> None:
    """On worker (0,0): call `save` once more when the job has ended and its result stands in the model."""
    here = process.current()
    assert here is not None
    before = here.finishing

    def finishing() -> None:
        save()
        if before is not None:
            before()

    if here.is_main:
        here.finishing = finishing
