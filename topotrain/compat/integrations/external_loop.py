"""topotrain inside the loop of another library, which reads ahead, logs and saves.

The library sees one ordinary process. A batch counts for a step when it is given to the model, not when the library has
drawn it: many libraries draw one batch more than they use, to know which is the last.
"""

import os
from collections import deque
from operator import length_hint
from typing import Any

from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import ConfigError, Shard
from topotrain.core.events import Unrepeatable
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.worker_extension import WorkerExtension
from topotrain.training.worker_stats import BatchAccounting

# The variables of torchrun, MPI and Slurm for the processes that they have started; a worker is not one of those.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)


def hide_launcher() -> None:
    """Hide from the library, in a job, how this process's unit was started."""
    if process.current() is not None:
        for name in LAUNCHER_VARIABLES:
            # The library would wait for processes of its own.
            os.environ.pop(name, None)


def missing(library: str, extra: str) -> ImportError:
    return ImportError(f"{library} is not installed: pip install 'topotrain[{extra}]'")


class ExternalAccounting(BatchAccounting):
    """The accounting of a loader with read-ahead: draws are noted when used."""

    def __init__(self, ledger: BatchAccounting) -> None:
        self._ledger = ledger
        # Batches that the library has read ahead, oldest first.
        self._drawn: deque[tuple[int, int, float, int, int]] = deque()

    def drawn(self, stream: int, seq: int, weight: float, samples: int, made: int = 0) -> None:
        self._drawn.append((stream, seq, weight, samples, made))

    def left_early(self, epoch: int, batches: int) -> None:
        # The library has drawn these and never used them, so they must not count for the next step.
        self._drawn.clear()
        self._ledger.left_early(epoch, batches)

    def lost(self, stream: int, batches: int) -> None:
        self._ledger.lost(stream, batches)

    def hand_on(self) -> float:
        """Note that a drawn batch goes to the model. Returns its weight (0: a spare one)."""
        if not self._drawn:
            return 0.0
        stream, seq, weight, samples, made = self._drawn.popleft()
        self._ledger.drawn(stream, seq, weight, samples, made)
        return weight


def tie(model: nn.Module, optimizer: Optimizer, loader: Any, counted: bool = False) -> tuple[Any, ExternalAccounting]:
    """Prepare for a library that reads ahead; return its loader and accounting.

    This is `topotrain.prepare`, and works only in a job.

    Args:
        counted: the library takes `len(loader)` as the length of an epoch, and validates, or ends, by it.

    Raises:
        ConfigError: as `prepare`, and with `counted` for leases, and for a group without a batch.
    """
    here = process.current()
    assert here is not None
    groups = here.place.topology.worker_groups
    # A group with fewer batches than `len(loader)` would neither validate nor end, so each group gets a fixed part.
    if counted and groups > 1 and here.place.job.shard is Shard.kLease:
        accepted = "must be kAuto or kStatic: the library's loop counts an epoch's batches before it begins"
        raise ConfigError("shard", Shard.kLease.value, accepted)
    refuse("cluster.backup", here.place.job.cluster.backup, "must be 0: the library counts its batches")
    if here.resumed is not None or here.place.identity.incarnation:
        accepted = "must not happen here: the library's loop has a state of its own, and would start from the beginning"
        raise ConfigError("restart", str(here.me), accepted)
    # After a death the launcher ends the job with this text instead of a restart.
    here.emit(Unrepeatable(str(here.me), "the loop is another library's, and its state cannot be restored", job=True))
    here.count_by_length(counted)
    _, _, share = api.prepare(model, optimizer, loader)
    assert isinstance(share, ShardedLoader)
    # `prepare` has set a position. The library's loop cannot go on from one.
    here.resume_at(None)
    # A stream may have no length, and then this is not known.
    if counted and length_hint(share, 1) == 0:
        raise ConfigError("len(loader)", 0, f"must be at least {groups} batches, one for each worker group")
    accounting = ExternalAccounting(share.accounting)
    share.account_to(accounting)
    return share, accounting


def refuse(field: str, value: object, accepted: str) -> None:
    """Raise ConfigError in a job if `value`, a feature of the library, is on."""
    if value and process.current() is not None:
        raise ConfigError(field, value, accepted)


def has_final_values_only_at_the_end() -> bool:
    """Whether groups go on without each other, so that the result comes at the end."""
    here = process.current()
    return here is not None and here.worker is not None and here.place.topology.worker_groups > 1


def with_final_values(saving: WorkerExtension) -> None:
    """Let worker (0,0) save the job's result at its end."""
    here = process.current()
    assert here is not None
    if here.is_main and here.worker is not None:
        here.worker.attach(saving)
