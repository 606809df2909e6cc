"""The time for which a round stays open when it has its quorum. Pure.

A worker takes new values at the first step at which they are there, and pushes again after a fixed number of steps. So
new values are early enough if they are there when the first of the round's workers would push again. The wait for more
workers uses a share of this free time (Decoupled DiLoCo, 2026):

    free = min over the groups of the round (push + interval - exchange) - now
    window = min(slack * free, step)

push: when the group's push was here. interval: the time between two pushes of the group. exchange: how long the push
and the new values are on their way. now: the quorum is there, so `now - push` is the time in which it was reached.
step: the time of a step of the fastest of these groups, which bounds how much older its values become.
"""

from collections.abc import Collection

from topotrain.config.job import Cluster

_SHARE = 0.25
"""The share of the last measurement in a moving average."""
_MOST_RISE = 2.0
"""A longer interval, of a worker that was stopped or made an evaluation, counts as so many usual ones."""


def has_windows(cluster: Cluster) -> bool:
    """Whether rounds of a job stay open when they have their quorum."""
    return cluster.outer is not None and 0 < cluster.quorum < cluster.nworker_groups and cluster.slack > 0


class GraceWindow:
    """Measures the groups' pushes and exchanges, and computes the window of a round.

    All times are seconds of one clock.

    Args:
        slack: the share of the free time.
        steps: those of a worker between two pushes.
    """

    def __init__(self, slack: float, steps: int) -> None:
        self._slack, self._steps = slack, steps
        self._pushed: dict[int, tuple[int, float]] = {}  # group -> number and time of its last push
        self._held: dict[int, tuple[int, float]] = {}  # group -> number of a push, and the wait for its round
        self._interval: dict[int, float] = {}
        self.exchange_s: dict[int, float] = {}
        """The mean time of an exchange of each group that was measured."""

    def pushed(self, group: int, number: int, now: float) -> None:
        """A push of a group is here. The second call for a push changes nothing."""
        before, then = self._pushed.get(group, (-1, now))
        if number == before:
            return
        self._pushed[group] = number, now
        if before < 0:
            return
        known = self._interval.get(group, now - then)
        self._interval[group] = _average(known, min(now - then, _MOST_RISE * known))

    def answered(self, group: int, number: int, now: float) -> None:
        """The round of a push is over."""
        known, then = self._pushed.get(group, (-1, now))
        if known == number:
            self._held[group] = number, now - then

    def exchanged(self, group: int, number: int, seconds: float) -> None:
        """A worker has waited so long from a push until the new values were there."""
        known, held = self._held.get(group, (-1, 0.0))
        if known == number:
            on_the_way = max(0.0, seconds - held)
            self.exchange_s[group] = _average(self.exchange_s.get(group, on_the_way), on_the_way)

    def forget(self, group: int) -> None:
        """The group has new processes."""
        for known in (self._pushed, self._held, self._interval, self.exchange_s):
            known.pop(group, None)

    def seconds(self, groups: Collection[int], now: float) -> float:
        """Return how long a round of these groups stays open. 0 until all were measured."""
        if not all(group in self._interval for group in groups):
            return 0.0
        free = min(self._pushed[g][1] + self._interval[g] - self.exchange_s.get(g, 0.0) for g in groups) - now
        step = min(self._interval[group] for group in groups) / self._steps
        return max(0.0, min(self._slack * free, step))


def _average(known: float, last: float) -> float:
    return known + _SHARE * (last - known)
