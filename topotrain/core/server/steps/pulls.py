"""Pulls: replies are held until the clock of the worker's group allows them."""

from collections.abc import Iterable

from topotrain.config.topology import Address
from topotrain.core.protocol import Fetch, Message, Values
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.server.shard_state import ShardState


class Pulls:
    """Sends held replies of one server once their groups may read.

    Args:
        state, groups, replies, queue, hooks: the parts of the server that it uses.
    """

    def __init__(
        self,
        state: ShardState,
        groups: WorkerGroups,
        replies: PullReplies,
        queue: MessageQueue,
        hooks: ExtensionHooks,
    ) -> None:
        self._hooks = hooks
        self._warms_up = state.job.warmup_steps if state.me.group == 0 else 0
        self._barrier = state.job.cluster.max_staleness == 0
        self._state, self._groups, self.replies, self._queue = state, groups, replies, queue

    def fetch(self, sender: Address, message: Fetch) -> None:
        """A worker asks for values."""
        self.replies.fetch(sender, message, self._state.known.staging[sender.group].step)
        self.release()

    def release(self) -> None:
        """Send the held replies of groups that may read."""
        state = self._state
        if state.model is not None:
            self.send(self.replies.release(state.model, state.version, self._may_read))

    def send(self, replies: Iterable[tuple[Address, Message]]) -> None:
        """Send replies; an extension may send values another way."""
        router = self._hooks.route_values
        for worker, reply in replies:
            if router is not None and isinstance(reply, Values):
                self._queue.send_all(router.route_values(worker, reply))
            else:
                self._queue.send(worker, reply)

    def _may_read(self, group: int) -> bool:
        clocks = self._groups.clocks
        if not self._state.common:
            return group == 0 and clocks.clock(0) < self._warms_up and self._state.complete
        # A barrier from the start: no group's first update may come before another group's first read.
        if self._barrier and not self.replies.asked.issuperset(clocks.live()):
            return False
        return clocks.may_start(group)
