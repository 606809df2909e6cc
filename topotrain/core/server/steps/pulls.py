"""Pulls: replies are held until the clock of the worker's group allows them."""

from collections.abc import Iterable

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.protocol import Fetch, Message, Values
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.steps.step_policy import makes_partial_steps


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
        self._shows_early = state.job.cluster.max_staleness is None and not makes_partial_steps(state.job)
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

    def repeat(self, worker: Address, fetch: bool) -> bool:
        """Reply again to a commit of the last step that was applied.

        Returns False if no step of its group was applied.
        """
        repeats = self.replies.repeat(worker, fetch)
        if repeats:
            self.release()
        return repeats

    def show_early(self, group: int, bucket: Bucket, version: int) -> None:
        """Send a new bucket before the next one is computed.

        Only for a group that waits for no other group.
        """
        if self._shows_early and self._state.common:
            model = self._state.known
            self.send(self.replies.stream(model, group, bucket, model.staging[group].step, version))

    def _may_read(self, group: int) -> bool:
        clocks = self._groups.clocks
        if not self._state.common:
            return group == 0 and clocks.clock(0) < self._warms_up and self._state.complete
        # A barrier from the start: no group's first update may come before another group's first read.
        if self._barrier and not self.replies.asked.issuperset(clocks.live()):
            return False
        return clocks.may_start(group)
