"""The place in the log of steps at which a shard freezes for a snapshot."""

from collections.abc import Sequence

from topotrain.core import protocol as m
from topotrain.core.server.component_state import DeclaredState
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import StepResult
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots
from topotrain.extensions.checkpointing.shard_snapshot import ValueChanger
from topotrain.extensions.checkpointing.snapshot_coordinator import SnapshotSchedule


class FreezeMoment(DeclaredState):
    """Decides behind which step, or before which commit, a shard freezes.

    A script that goes on from a snapshot begins where it has asked for a batch. So all that it does with one batch
    belongs to one moment: the steps of several optimizers, and what it changes behind a step (`tt.assign`).

    Args:
        server: the server of the shard.
        snapshots: its part of snapshots.
        changers: extensions by which scripts change values.
        schedule: of the coordinator.
        synced: the freezes of several server groups belong together, and none waits.
    """

    STATE = ("_waits", "_frozen_behind")

    def __init__(
        self,
        server: Server,
        snapshots: ServerSnapshots,
        changers: Sequence[ValueChanger],
        schedule: SnapshotSchedule | None,
        synced: bool,
    ) -> None:
        self._server, self._snapshots, self._changers = server, snapshots, changers
        self._schedule, self._synced = schedule, synced
        # Scripts change values behind their steps, so that a snapshot waits for the next one.
        self._waits = False
        # The worker group with the last step, if the shard was frozen behind it.
        self._frozen_behind = -1

    def is_before(self, group: int, first: m.Commit) -> bool:
        """Whether to freeze before this commit of a group."""
        return self._snapshots.due > 0 and not self._belongs_to_last_batch(group, first)

    def _belongs_to_last_batch(self, group: int, first: m.Commit) -> bool:
        """Whether the script has read no batch between its last step and this.

        The script would not repeat what this commit changes.
        """
        if not first.counts:
            return any(changer.follows_step(group) for changer in self._changers)
        # With one optimizer a step is the end of a batch, and with several an assignment or a step may follow.
        return self._waits_for_batch and not first.marks and bool(self._server.steps.batches.counts())

    @property
    def _waits_for_batch(self) -> bool:
        model = self._server.state.model
        return model is not None and self._snapshots.waits_for_batch(model.optimizers > 1)

    def is_behind(self, result: StepResult) -> bool:
        """Whether to freeze behind this step, if a snapshot is due."""
        if not result.counts:
            self._note_change(result.group)
            return False
        if self._waits_for_batch:
            return False
        self._frozen_behind = result.group if self._snapshots.due else -1
        return not self._waits

    def _note_change(self, group: int) -> None:
        """A group has changed values between two steps."""
        # With several optimizers the freeze waits for the next batch, behind which nothing of this one follows.
        if self._synced or self._waits_for_batch or not any(changer.follows_step(group) for changer in self._changers):
            return
        # Once seen it is to be expected behind every step. All shards see it at the same place of the log.
        if not self._waits and self._frozen_behind == group and self._schedule is not None:
            self._schedule.take_again("a script has changed parameters behind its step (tt.assign)")
        self._waits = True
