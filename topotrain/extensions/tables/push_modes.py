"""Modes of table pushes: with their step, together with all workers, or at once.

All shards decide alike, because every worker sends each of its pushes to every shard, also without rows for it.
"""

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address
from topotrain.core.optim.adapter import OptimizerSpec
from topotrain.core.protocol import Commit, ProtocolError
from topotrain.core.server.nonfinite import all_finite
from topotrain.core.server.ordered_sum import ScratchBuffers, Tree, canonical_mean
from topotrain.extensions.tables.row_optimizers import (
    Clip,
    RowOptimizer,
    SparseOptimizer,
    check_optimizer,
    make_optimizer,
)
from topotrain.extensions.tables.row_storage import RowStorage
from topotrain.extensions.tables.table_spec import Ids, TableSpec

# Pushes of one worker that are not complete, or belong to a step that is not over.
_MOST_OPEN = 64
# Bytes of the rows of one worker that a shard keeps until their push is applied.
_MOST_KEPT = 1 << 32
# Optimizer settings that a group has sent for future turns, and their characters.
_MOST_RULES, _MOST_RULE_TEXT = 1 << 12, 1 << 22


@dataclass(slots=True)
class PendingPush:
    """Parts received of a worker's push, or of its pushes in one step: (ids, rows)."""

    parts: list[tuple[Ids, torch.Tensor]] = field(default_factory=list)
    nbytes: int = 0

    def joined(self, width: int, dtype: torch.dtype) -> tuple[Ids, torch.Tensor]:
        """Return the whole push, each row once, ascending. Equal rows are added up."""
        if not self.parts:
            return np.empty(0, dtype=np.int64), torch.empty(0, width, dtype=dtype)
        ids = np.concatenate([part for part, _ in self.parts])
        rows = self.parts[0][1] if len(self.parts) == 1 else torch.cat([rows for _, rows in self.parts])
        # Ascending ids are unique. This is the usual case, a push of one part, and it needs no copy.
        if (np.diff(ids) > 0).all():
            return ids, rows
        known, place = np.unique(ids, return_inverse=True)
        return known, torch.zeros(len(known), width, dtype=dtype).index_add_(0, torch.from_numpy(place), rows)


class TableShard:
    """One shard of a table. Subclasses implement the modes.

    Args:
        workers: all workers of the job, in rank order.
        clip: bounds of every element of a gradient of a step.
        most: this number of consecutive changes that are not finite is an error, and fewer are left out. 0: all are
            applied.
    """

    def __init__(
        self,
        spec: TableSpec,
        shard: int,
        shards: int,
        workers: Sequence[Address],
        import_module: str,
        clip: Clip,
        most: int,
    ) -> None:
        self.spec = spec
        self.restored = False
        """Whether its rows were restored from a snapshot."""
        self._most, self._left_out = most, 0
        self.rows = RowStorage(spec, shard, shards)
        self._workers = workers
        # The clipping of the job's updater is for steps of the model. Other pushes have no step.
        self._import, self._clip = import_module, clip if spec.mode == "step" else None
        self._pushes: dict[tuple[Address, int], PendingPush] = {}
        self._kept: Counter[Address] = Counter()  # bytes of rows by worker
        self._rules: dict[
            int, list[tuple[int, str]]
        ] = {}  # group -> (turn, optimizer), the present one and future ones
        self._rule: RowOptimizer | None = None
        self._text = ""
        self._use_optimizer(spec.optimizer)

    # --- messages of workers -------------------------------------------------------------------------------------

    def push(self, sender: Address, turn: int, last: bool, ids: Ids, rows: torch.Tensor | None) -> None:
        """Receive a part of a push.

        Raises LookupError if a row must be given a value first, ConfigError if the optimizer refuses the push.
        """
        # A correct worker has few pushes under way, and each of them holds memory.
        if (sender, turn) not in self._pushes and sum(worker == sender for worker, _ in self._pushes) >= _MOST_OPEN:
            raise ProtocolError(f"{sender} begins push {turn} of table {self.spec.name!r} before it ends others")
        push = self._pushes.setdefault((sender, turn), PendingPush())
        if rows is not None:
            push.parts.append((ids, rows))
            push.nbytes += ids.nbytes + rows.nbytes
            self._keep(sender, ids.nbytes + rows.nbytes)
        if last:
            self._complete(sender, turn)

    def set_optimizer(self, sender: Address, since: int, text: str) -> None:
        """Set the optimizer of pushes from turn `since` on. Raises ConfigError."""
        check_optimizer(self.spec, text, self._import)
        known = self._rules.setdefault(self._group(sender), [])
        if len(known) >= _MOST_RULES or sum(len(rule) for _, rule in known) > _MOST_RULE_TEXT:
            raise ProtocolError(f"{sender} sets the optimizer of table {self.spec.name!r} for too many future turns")
        # Sorted by turn alone. Of several settings for one turn, the last to arrive comes last and counts.
        insort(known, (self._since(since), text), key=itemgetter(0))

    def may_read(self, sender: Address, seen: int) -> bool:
        """Return whether `seen` turns of the sender are applied."""
        return True

    def ended(self, sender: Address) -> str:
        """Handle a worker that pushes no more. Returns which worker waits in vain, or ""."""
        return ""

    # --- snapshots (`table_snapshot`) ---------------------------------------------------------------------------------

    @property
    def snapshot_obstacle(self) -> str:
        """Why a snapshot cannot contain the table, or ""."""
        return f"pushes of table {self.spec.name!r} belong to no step of the model"

    @property
    def optimizer(self) -> str:
        return self._text

    @property
    def pushes(self) -> int:
        """Number of pushes that the optimizer of a sparse table has applied."""
        return self._rule.pushes if isinstance(self._rule, SparseOptimizer) else 0

    def restore(self, optimizer: str, pushes: int) -> None:
        """Continue from the rows and state of a snapshot. Raises ConfigError."""
        # Only the kind must be the same. The settings are those of the script, as for the model's own optimizer.
        then, now = (OptimizerSpec.from_text(text).name for text in (optimizer, self._text))
        if then != now or not isinstance(self._rule, SparseOptimizer):
            raise ConfigError("resume", f"table {self.spec.name}", f"is updated by {now} now, but was by {then}")
        self._rule.restore(pushes)
        self.restored = True

    # --- for the modes -------------------------------------------------------------------------------------------

    def _group(self, sender: Address) -> int:
        return 0

    def _complete(self, sender: Address, turn: int) -> None:
        raise NotImplementedError

    def _since(self, turn: int) -> int:
        return turn

    def _use_optimizer_of(self, group: int, turn: int) -> None:
        # Settings for later turns may be here already: a fast worker of the group sends them ahead of its pushes.
        known = self._rules.get(group, [])
        while len(known) > 1 and known[1][0] <= turn:
            del known[0]
        # The last setting for this turn or an earlier one.
        self._use_optimizer(known[0][1] if known and known[0][0] <= turn else self.spec.optimizer)

    def _use_optimizer(self, text: str) -> None:
        # `set` keeps the state of the rows. Another class begins without state.
        if text and text != self._text and (self._rule is None or not self._rule.set(text)):
            self._rule = make_optimizer(self.rows, text, self._import, self._clip)
        self._text = text or self._text

    def _joined(self, sender: Address, turn: int) -> tuple[Ids, torch.Tensor]:
        push = self._pushes.pop((sender, turn), PendingPush())
        self._kept[sender] -= push.nbytes
        return push.joined(self.spec.width, self.spec.torch_dtype)

    def _keep(self, sender: Address, nbytes: int) -> None:
        """Count bytes that wait for other messages. Raises ProtocolError for too many."""
        self._kept[sender] += nbytes
        if self._kept[sender] > _MOST_KEPT:
            waiting = f"{sender} has {self._kept[sender]:,} bytes of rows of table {self.spec.name!r} waiting"
            raise ProtocolError(f"{waiting}, at most {_MOST_KEPT:,}")

    def apply(self, ids: Ids, rows: torch.Tensor, adds: bool) -> None:
        """Change rows. No other code changes them.

        adds: without an optimizer, add the rows instead of assigning them. Raises LookupError if a row must be given a
        value first, or too many pushes were not finite.
        """
        if self._most and not all_finite(rows.reshape(-1)):
            self._left_out += 1
            if self._left_out >= self._most:
                often = f"{self._left_out} pushes in a row" if self._most > 1 else "a push"
                raise LookupError(f"table {self.spec.name!r}: {often} not finite (nonfinite: kAllow would apply that)")
            return
        # Only consecutive changes count: a single bad batch does not end the job.
        self._left_out = 0
        slots = self.rows.slots(ids)
        if self._rule is not None:
            self._rule.apply(slots, rows)
        elif len(ids):
            self.rows.scatter(slots, self.rows.gather(slots).add_(rows) if adds else rows)

    @property
    def state_bytes(self) -> int:
        return 0 if self._rule is None else self._rule.state_bytes


class AsyncTable(TableShard):
    """Applies each push when it is complete."""

    def _since(self, turn: int) -> int:
        # Turns of different workers have no order, so the last setting counts.
        return 0

    def _complete(self, sender: Address, turn: int) -> None:
        self._use_optimizer_of(0, 0)
        self.apply(*self._joined(sender, turn), adds=True)


class SyncTable(TableShard):
    """Adds up the n-th pushes of all workers in rank order, and applies the sum once."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._turns: dict[int, dict[Address, tuple[Ids, torch.Tensor]]] = {}
        self._applied = 0
        self._ended: dict[Address, int] = {}  # worker -> its pushes, when it has ended
        self._counts: dict[Address, int] = dict.fromkeys(self._workers, 0)

    def may_read(self, sender: Address, seen: int) -> bool:
        return self._applied >= seen

    def _complete(self, sender: Address, turn: int) -> None:
        # The client numbers the pushes of a table from 1.
        if turn != self._counts[sender] + 1:
            raise ProtocolError(f"push {turn} of table {self.spec.name!r}, {self._counts[sender] + 1} was due")
        self._counts[sender] = turn
        found = self._turns.setdefault(turn, {})[sender] = self._joined(sender, turn)
        self._keep(sender, found[1].nbytes)
        # A fast worker may have pushed several turns ahead of the slowest one.
        while len(self._turns.get(self._applied + 1, {})) == len(self._workers):
            self._use_optimizer_of(0, self._applied + 1)
            turns = self._turns.pop(self._applied + 1)
            self._kept.subtract({worker: rows.nbytes for worker, (_, rows) in turns.items()})
            self.apply(*self._sum(turns), adds=False)
            self._applied += 1

    def _sum(self, parts: Mapping[Address, tuple[Ids, torch.Tensor]]) -> tuple[Ids, torch.Tensor]:
        ordered = [parts[worker] for worker in self._workers]
        first, rows = ordered[0]
        # Workers that push a whole key name the same rows. Then no union of the ids is needed.
        if all(np.array_equal(ids, first) for ids, _ in ordered[1:]):
            for _, more in ordered[1:]:
                # In place: the rows of a push belong to this shard, and are not used again.
                rows.add_(more)
            return first, rows
        # In rank order, so that the bits of the sum do not depend on the order of arrival.
        union = np.unique(np.concatenate([ids for ids, _ in ordered]))
        total = torch.zeros(len(union), self.spec.width, dtype=self.spec.torch_dtype)
        for ids, more in ordered:
            total.index_add_(0, torch.from_numpy(np.searchsorted(union, ids)), more)
        return union, total

    def ended(self, sender: Address) -> str:
        # Workers that push more often than it did would wait for ever.
        self._ended[sender] = self._counts[sender]
        return self.waits_in_vain()

    def waits_in_vain(self) -> str:
        """Return, in words, which worker waits for a worker that has ended, or ""."""
        for worker, pushes in self._ended.items():
            for other, count in self._counts.items():
                if count > pushes:
                    return (
                        f"table {self.spec.name!r} is sync: {worker} ended after {pushes} pushes, while {other} made "
                        f"{count}; all workers of the job must push it equally often"
                    )
        return ""


class StepTable(TableShard):
    """Applies or drops pushes together with their step of the worker group."""

    @property
    def snapshot_obstacle(self) -> str:
        # Rows of a dense table have state outside of the columns that snapshots store.
        return f"table {self.spec.name!r} is dense" if self.spec.dense else ""

    def _group(self, sender: Address) -> int:
        return sender.group

    def _complete(self, sender: Address, turn: int) -> None:
        """Do nothing: a step may have several pushes, and its commit completes them."""

    def mean(
        self, group: int, step: int, commits: Mapping[int, Commit], tree: Tree, divide: bool
    ) -> tuple[Ids, torch.Tensor] | None:
        """Return the group's mean (or sum) of a step, or None without any push.

        As for dense gradients: a row that a worker has not pushed counts as zero.
        """
        pushed = {
            key[0].index: self._joined(*key) for key in list(self._pushes) if key[0].group == group and key[1] == step
        }
        if not pushed:
            return None
        # The mean of one worker is its own push.
        # Weight 0: the worker had no batch, and its rows must not count.
        if len(commits) == 1 and commits[0].weight > 0:
            return pushed[0]
        union = np.unique(np.concatenate([ids for ids, _ in pushed.values()]))
        parts: dict[int, tuple[float, torch.Tensor | None]] = {}
        for index, commit in commits.items():
            parts[index] = (commit.weight, self._spread(union, *pushed[index]) if index in pushed else None)
        mean = torch.empty(len(union) * self.spec.width, dtype=self.spec.torch_dtype)
        # In the order of the layout, as for parameters, so that the bits do not depend on the order of arrival.
        canonical_mean(parts, tree, mean, ScratchBuffers(), divide)
        return union, mean.view(len(union), self.spec.width)

    def _spread(self, union: Ids, ids: Ids, rows: torch.Tensor) -> torch.Tensor:
        # Unique ids out of the union, and as many: they are the union.
        if len(ids) == len(union):
            return rows.reshape(-1)
        spread = torch.zeros(len(union), self.spec.width, dtype=self.spec.torch_dtype)
        return spread.index_copy_(0, torch.from_numpy(np.searchsorted(union, ids)), rows).view(-1)

    def apply_step(self, group: int, step: int, found: tuple[Ids, torch.Tensor], factor: float) -> None:
        """Apply a step: its gradient times `factor`."""
        self._use_optimizer_of(group, step)
        ids, rows = found
        self.apply(ids, rows if factor == 1.0 else rows * factor, adds=True)

    def drop(self, group: int, step: int) -> None:
        """Drop the pushes of a step that is over."""
        for key in [key for key in self._pushes if key[0].group == group and key[1] <= step]:
            self._kept[key[0]] -= self._pushes.pop(key).nbytes


KINDS: Mapping[str, type[TableShard]] = {"async": AsyncTable, "sync": SyncTable, "step": StepTable}
