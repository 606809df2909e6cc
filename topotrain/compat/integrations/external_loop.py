"""topotrain inside the loop of another library, which reads ahead, logs and saves.

The library sees one ordinary process. A batch counts for a step when it is given to the model, not when the library has
drawn it: many libraries draw one batch more than they use, to know which is the last.

In a fresh process the script runs again from its first line, and the library's loop goes on by the library's own means
of resuming. Its state is saved with that of the script (`LoopState`). How far the loop has come is known from the
servers: a step that was applied counts, also if the process died right after it.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from typing import Any

from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import ConfigError, Shard
from topotrain.core.events import Unrepeatable
from topotrain.extensions.assignment.parameter_assignment import assign
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.data.script_position import ScriptPosition
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


class LoopState(ABC):
    """The state of a library's loop, saved as that of an object of `tt.keep`."""

    def __init__(self) -> None:
        self.restored: dict[str, Any] | None = None
        """The state that an earlier process has saved."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state of the loop, between two steps: numbers, texts, lists, dicts, tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for the moment at which the library takes it."""
        self.restored = state


class ExternalAccounting(BatchAccounting):
    """The accounting of a loader with read-ahead: draws are noted when used.

    position: that of the script. None: the loop does not go on in a fresh process.
    """

    def __init__(self, ledger: BatchAccounting, position: ScriptPosition | None = None) -> None:
        self._ledger, self._position = ledger, position
        # Batches that the library has read ahead, oldest first.
        self._drawn: deque[tuple[int, int, float | None, int, int]] = deque()
        # So many of them were announced by `begin_step`.
        self._begun = 0

    def drawn(self, stream: int, seq: int, weight: float | None, samples: int, made: int = 0) -> None:
        self._drawn.append((stream, seq, weight, samples, made))

    def left_early(self, epoch: int, batches: int) -> None:
        # The library has drawn these and never used them, so they must not count for the next step.
        self._drawn.clear()
        self._begun = 0
        self._ledger.left_early(epoch, batches)

    def over(self) -> None:
        self._ledger.over()

    def lost(self, stream: int, batches: int) -> None:
        self._ledger.lost(stream, batches)

    def first_uncounted(self, epoch: int) -> int:
        drawn = (stream >> 32 for stream, *_ in self._drawn)
        return min([self._ledger.first_uncounted(epoch), *drawn])

    def begin_step(self, batches: int) -> None:
        """The library begins a step with so many of the drawn batches.

        It has done nothing for this step yet. The state of the script is saved here, if it has to be. Without this
        call it is saved when a batch is handed on.
        """
        if self._position is not None:
            self._begun += batches
            for _ in range(batches):
                self._position.use()

    def hand_on(self) -> float:
        """Note that a drawn batch goes to the model. Returns its weight (0: a spare one)."""
        if not self._drawn:
            return 0.0
        if self._begun:
            self._begun -= 1
        elif self._position is not None:
            self._position.use()
        stream, seq, weight, samples, made = self._drawn.popleft()
        self._ledger.drawn(stream, seq, weight, samples, made)
        return 1.0 if weight is None else weight


def tie(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loader: Any,
    counted: bool = False,
    state: LoopState | None = None,
    unrepeatable: str = "",
    ahead: bool = True,
) -> tuple[Any, ExternalAccounting]:
    """Prepare for a library that reads ahead; return its loader and accounting.

    This is `topotrain.prepare`, and works only in a job, which begins.

    Args:
        counted: the library takes `len(loader)` as the length of an epoch, and validates, or ends, by it.
        state: that of the library's loop. None: the loop is the script's own.
        unrepeatable: why the loop cannot go on in a fresh process. "": it can.
        ahead: the library draws batches before it begins the step that uses them.

    Raises:
        ConfigError: as `prepare`, and with `counted` for leases, and for a group without a batch.
    """
    here = process.current()
    assert here is not None
    groups = here.place.topology.worker_groups
    if here.worker is not None:
        # The position in a second one is not known to the servers.
        unrepeatable = unrepeatable or "the script trains more than once with the library's loop"
        # An average, say, or weights that the library has loaded since the last step.
        with writing():
            pass
    # A group with fewer batches than `len(loader)` would neither validate nor end, so each group gets a fixed part.
    if counted and groups > 1 and here.place.job.shard is Shard.kLease:
        accepted = "must be kAuto or kStatic: the library's loop counts an epoch's batches before it begins"
        raise ConfigError("shard", Shard.kLease.value, accepted)
    if counted and length_hint(loader, -1) < 0:
        unrepeatable = "the library's loop counts batches, and the loader has no length"
    if unrepeatable and is_restarted(here):
        raise ConfigError("restart", str(here.me), f"must not happen here: {unrepeatable}")
    if unrepeatable:
        # After a death the launcher ends the job with this text instead of a restart.
        here.emit(Unrepeatable(str(here.me), unrepeatable, job=True))
    here.count_by_length(counted)
    if state is not None:
        # The name cannot be one of `tt.keep`, which are Python names without a space.
        here.kept["loop of the library"] = state
    api.prepare(model, *optimizers)
    share = divided(loader)
    accounting = account(share, not unrepeatable, ahead)
    # A stream may have no length, and then this is not known.
    if counted and length_hint(share, 1) == 0:
        raise ConfigError("len(loader)", 0, f"must be at least {groups} batches, one for each worker group")
    return share, accounting


def divided(loader: Any) -> ShardedLoader:
    """Prepare a library's loader, of which this worker gets its share.

    Raises:
        ConfigError: as `prepare`, and for backup workers.
    """
    here = process.current()
    assert here is not None
    refuse("cluster.backup", here.place.job.cluster.backup, "must be 0: the library counts its batches")
    here.refuse_repeats("the loop is another library's, which counts its batches and steps")
    share = api.prepare(loader)
    assert isinstance(share, ShardedLoader)
    return share


def renewed(optimizer: Optimizer) -> Optimizer:
    """The job's optimizer in the place of one that a library has made to train again.

    Raises:
        ConfigError: the job has none of this kind over the same parameters.
    """
    here = process.current()
    if here is None or here.worker is None or optimizer in here.adopted:
        return optimizer
    for known in here.worker.optimizers:
        pairs = zip(known.param_groups, optimizer.param_groups, strict=False)
        same = all(list(map(id, one["params"])) == list(map(id, other["params"])) for one, other in pairs)
        if type(known) is type(optimizer) and len(known.param_groups) == len(optimizer.param_groups) and same:
            known.load_state_dict(optimizer.state_dict())
            # The groups are one object, for a scheduler writes to them; a state that is loaded brings others.
            known.param_groups = optimizer.param_groups
            known.register_load_state_dict_post_hook(lambda it: setattr(optimizer, "param_groups", it.param_groups))
            return known
    accepted = (
        "must be of the kind and with the parameters of the first training: a stage with others is a job of its own"
    )
    raise ConfigError("optimizer of a further training", type(optimizer).__name__, accepted)


def account(share: ShardedLoader, repeatable: bool = True, ahead: bool = True) -> ExternalAccounting:
    """Begin the job, and note the batches of this loader when they are used.

    repeatable: the loop can go on in a fresh process. ahead: as for `tie`.
    """
    here = process.current()
    assert here is not None
    # The library asks at once for the position of the script.
    process.use()
    position = here.continuing if repeatable else None
    if position is None:
        # `prepare` may have set a position. This loop cannot go on from one.
        here.resume_at(None)
    elif ahead:
        position.read_ahead()
    # An earlier loop has an accounting of its own.
    ledger = share.accounting if here.worker is None else here.worker
    accounting = ExternalAccounting(ledger, position if ahead else None)
    share.account_to(accounting)
    return accounting


def is_restarted(here: process.Context) -> bool:
    """Whether this process goes on where an earlier one has ended."""
    return here.resumed is not None or here.place.identity.incarnation > 0


def going_on() -> ScriptPosition | None:
    """The position at which the loop of this process goes on. None: it begins."""
    here = process.current()
    return here.continuing if here is not None and is_restarted(here) else None


def keeps_its_batches() -> bool:
    """Whether this worker reads the rest of what an earlier process had to read.

    Where a job with several groups starts again, what is left of an epoch is divided among the groups anew.
    """
    here = process.current()
    return here is None or here.resumed is None or here.place.topology.worker_groups == 1


def weight_given() -> bool:
    """Whether the script has called `tt.weight` for the present batch."""
    here = process.current()
    return here is not None and here.worker is not None and here.worker.batches.weight_given


def steps_so_far() -> int:
    """The steps of this worker, in this process and in earlier ones."""
    here = process.current()
    return 0 if here is None or here.worker is None else here.worker.tally.steps


def writing() -> AbstractContextManager[None]:
    """A block in which the library writes parameters, alike on all workers."""
    here = process.current()
    # On an island a worker's values are its own until the next round.
    island = here is not None and here.worker is not None and here.worker.runs_optimizers
    return nullcontext() if island else assign()


def refuse(field: str, value: object, accepted: str) -> None:
    """Raise ConfigError in a job if `value`, a feature of the library, is on."""
    if value and process.current() is not None:
        raise ConfigError(field, value, accepted)


def with_final_values(saving: WorkerExtension) -> None:
    """Let worker (0,0) save the result at the job's end, if groups end one by one."""
    here = process.current()
    if here is not None and here.is_main and here.worker is not None and here.place.topology.worker_groups > 1:
        here.worker.attach(saving)
