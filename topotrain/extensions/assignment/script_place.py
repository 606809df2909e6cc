"""The place of an assignment in the script, by which a repeated one is known."""

from typing import cast

from topotrain.extensions.checkpointing.checkpoint_reader import Manifest
from topotrain.training.context import Context
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.worker import Worker


class ScriptPlace:
    """Numbers the assignments of one process.

    Args:
        here: the job. None: the loader and earlier starts are not known.
        worker: the worker.
    """

    def __init__(self, here: Context | None, worker: Worker) -> None:
        self._here, self._worker = here, worker
        self._at, self._number = (0, 0), 0

    def next(self) -> tuple[int, int, int, bool]:
        """Return stream, batch, number and `repeated` as in `Assignment`."""
        at = self._place()
        self._number = self._number + 1 if at == self._at else 0
        self._at = at
        return *at, self._number, at[0] < 0 and self._is_in_snapshot(-1 - at[0])

    def _place(self) -> tuple[int, int]:
        last, loader = self._worker.batches.last, None if self._here is None else self._here.loader
        if loader is None:
            # The batches of such a script are not known. Its assignments count from the begin of the process.
            return (-1, 0) if last is None else last
        if last is not None and loader.under_way and last[0] >> 32 == loader.passes - 1:
            return last
        return -1 - loader.passes, 0

    def _is_in_snapshot(self, passes: int) -> bool:
        """Whether the snapshot from which the job goes on has steps of this pass, or a later one."""
        past = None if self._here is None else cast("Manifest | None", self._here.resumed)
        if self._here is None or past is None:
            return False
        loader, position = self._here.loader, self._here.continuing
        if not isinstance(loader, ShardedLoader):
            return position is None or not position.in_epochs
        return passes < (past.first_epoch or 0) or passes < past.closed or bool(past.runs(passes))
