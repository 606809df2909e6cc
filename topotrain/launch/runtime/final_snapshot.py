"""What a unit says to the process of its job's first server when the job is to end: take one more snapshot.

Rule: the command may come before there is anything to save, and on the channel's own thread; it is answered in any
case, for somebody waits with the end of the job.
"""

from collections.abc import Callable, Mapping
from typing import Any

from topotrain.core.events import Event, Unsaved
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotWriter

SNAPSHOT = "snapshot"


class FinalSnapshot:
    """See above. `hear` takes a command; `emit` tells the unit, `writer` writes snapshots, if there is one."""

    def __init__(self, who: str) -> None:
        self._who = who
        self.emit: Callable[[Event], None] = lambda event: None
        self.writer: SnapshotWriter | None = None

    def hear(self, command: Mapping[str, Any]) -> None:
        """Answered by Saved or Unsaved; commands of others are none of ours."""
        if command.get("command") != SNAPSHOT:
            return
        if self.writer is None:
            self.emit(Unsaved(self._who, "nothing is there yet, or the job wants no snapshots"))
        else:
            self.writer.end()
