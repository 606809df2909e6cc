"""The place of an assignment in the script, by which a repeated one is known."""

from collections.abc import Mapping
from typing import Any

from topotrain.extensions.assignment.assignment_client import AssignmentPlace
from topotrain.training.context import Context
from topotrain.training.worker import Worker


class ScriptPlace:
    """Numbers the assignments of one worker.

    A fresh process repeats those from before the pass that was under way. Its state has their numbers, as an object of
    `tt.keep`. The servers know the last one within a pass.

    Args:
        here: the job. None: the loader is not known.
        worker: the worker.
    """

    def __init__(self, here: Context | None, worker: Worker) -> None:
        self._here, self._worker = here, worker
        self._at, self._number = (0, 0), 0
        self._between: dict[str, int] = {}  # place between two passes -> assignments of this process
        self._earlier: Mapping[str, int] = {}  # the same of earlier processes, as far as their state counts

    def next(self) -> AssignmentPlace:
        """Return the place of the next assignment."""
        at = self._place()
        self._number = self._number + 1 if at == self._at else 0
        self._at = at
        if at[0] >= 0:
            return AssignmentPlace(*at, self._number)
        key = str(at[0])
        self._between[key] = self._number + 1
        return AssignmentPlace(*at, self._number, self._number < self._earlier.get(key, 0))

    def _place(self) -> tuple[int, int]:
        last, loader = self._worker.batches.last, None if self._here is None else self._here.loader
        if loader is None:
            # The batches of such a script are not known. Its assignments count from the begin of the process.
            return (-1, 0) if last is None else last
        if last is not None and loader.under_way and last[0] >> 32 == loader.passes - 1:
            return last
        return -1 - loader.passes, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of assignments between two passes."""
        places = self._between.keys() | self._earlier.keys()
        return {"between": {at: max(self._between.get(at, 0), self._earlier.get(at, 0)) for at in sorted(places)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier process."""
        self._earlier = dict(state["between"])
