"""Grace windows: on the coordinator a round with its quorum waits for more.

The decision that a round is over follows from messages alone, so that a second copy makes the same: a window ends with
`WindowOver`, which the server's timer sends. The clock only decides when that message comes.
"""

from collections.abc import Mapping, Sequence

from topotrain.config.job import Cluster
from topotrain.config.topology import Address
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, StepResult, TimedExtension
from topotrain.extensions.outer_optimizer.grace.grace_window import GraceWindow
from topotrain.extensions.outer_optimizer.grace.window_messages import ExchangeTime, WindowOver

Steps = Sequence[tuple[int, int]]
"""(group, step) pairs."""


class RoundWindows(TimedExtension):
    """The windows of the rounds of one server group, on its coordinator."""

    STATE = ("_open", "_over", "_windows")

    messages = (WindowOver, ExchangeTime)

    def __init__(self, server: Server, cluster: Cluster) -> None:
        self._server = server
        self._grace = GraceWindow(cluster.slack, cluster.sync_freq // cluster.fragments)
        self._open: dict[int, int] = {}  # fragment -> number of its window
        self._over: set[int] = set()  # fragments with a window that has ended
        self._ends: dict[int, float] = {}  # fragment -> when its window is to end
        self._windows = 0

    def over(self, pushed: Steps, rounds: Mapping[int, Steps], all_here: bool) -> Mapping[int, Steps]:
        """Return the rounds that are over.

        pushed: all steps that are here. rounds: those with a quorum, by fragment. all_here: no other group could push.
        """
        now = self._server.timer.now()
        for group, step in pushed:
            self._grace.pushed(group, step, now)
        for fragment in [fragment for fragment in self._open if fragment not in rounds]:
            self._close(fragment)  # a worker of the round has died, and there is no quorum any more
        for fragment, steps in rounds.items():
            if not all_here and fragment not in self._over:
                self._keep_open(fragment, [group for group, _ in steps], now)
        found = {fragment: steps for fragment, steps in rounds.items() if all_here or fragment in self._over}
        for fragment in found:
            self._close(fragment)
        return found

    def _keep_open(self, fragment: int, groups: Sequence[int], now: float) -> None:
        seconds = self._grace.seconds(groups, now)
        if fragment not in self._open:
            self._windows += 1
            self._open[fragment] = self._windows
        # A group that has come in the window may need the values earlier than those before it.
        elif now + seconds >= self._ends.get(fragment, 0.0):
            return
        self._ends[fragment] = now + seconds
        self._server.timer.wake(seconds, WindowOver(fragment, self._open[fragment]))

    def _close(self, fragment: int) -> None:
        self._open.pop(fragment, None)
        self._ends.pop(fragment, None)
        self._over.discard(fragment)

    @property
    def exchange_s(self) -> Mapping[int, float]:
        """The mean time of an exchange of each group that was measured."""
        return self._grace.exchange_s

    # --- messages and hooks ----------------------------------------------------------------------------------------

    def handle(self, sender: Address, message: Message) -> Outbox:
        """A window has ended, or a worker tells how long an exchange took."""
        if isinstance(message, ExchangeTime):
            self._grace.exchanged(sender.group, message.step, message.seconds)
        elif isinstance(message, WindowOver) and self._open.get(message.fragment) == message.number:
            self._over.add(message.fragment)
            self._server.decisions.decide()
        return ()

    def on_timer(self) -> None:
        # The process of another copy has ended the windows, or is dead.
        for fragment, number in list(self._open.items()):  # the timer may end one on another thread
            self._server.timer.wake(0.0, WindowOver(fragment, number))

    def step_over(self, result: StepResult) -> Outbox:
        self._grace.answered(result.group, result.step, self._server.timer.now())
        return ()

    def reset_group(self, group: int, ended: bool) -> None:
        self._grace.forget(group)
