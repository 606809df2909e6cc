"""The command that asks for a last snapshot before a job ends.

The unit sends it to the process of the job's first server. It may arrive before there is anything to save, and on the
channel's own thread. Each command gets a reply, because the launcher waits for it before the job ends.
"""

from collections.abc import Callable, Mapping
from typing import Any

from topotrain.core.events import Event, Unsaved
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotWriter

SNAPSHOT = "snapshot"


class FinalSnapshot:
    """Handles the command for a last snapshot.

    emit: sends an event to the unit. writer: writes snapshots; None if the job writes none.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self.emit: Callable[[Event], None] = lambda event: None
        self.writer: SnapshotWriter | None = None

    def hear(self, command: Mapping[str, Any]) -> None:
        """Reply with Saved or Unsaved.

        Other commands are ignored.
        """
        if command.get("command") != SNAPSHOT:
            return
        if self.writer is None:
            self.emit(Unsaved(self._who, "there are no values yet, or the job takes no snapshots"))
        else:
            self.writer.end()
