"""The longest wait of a job in the user's words, from its events and the time.

A wait has a reason before it: a worker makes no step while its server is not there. So the phases of a job are looked
at in their order, and in the first one that is not over the process counts that it has waited for longest. This module
is pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from topotrain.config.job import Cluster
from topotrain.tools.recording.process_table import ProcessPhase, ProcessTrack

QUIET_S = 2.0
"""Seconds without a step after which a training job waits for something. Workers report steps four times a second."""
_NAMED = 2


@dataclass(frozen=True, slots=True)
class LongestWait:
    """A wait of the job.

    what: its subject, the same for the same wait. more: numbers that change.
    """

    what: str
    seconds: float
    more: str = ""

    def words(self) -> str:
        return f"waiting for {self.what}{self.more}, {self.seconds:.0f} s"


def longest(states: Sequence[ProcessTrack], cluster: Cluster, now: float) -> LongestWait | None:
    """Return what a job waits for; None while it trains, and at its end."""
    workers = [state for state in states if not state.is_server]
    # A unit of servers alone does not know when the workers have ended.
    if workers and all(state.phase is ProcessPhase.OVER for state in workers):
        left = [state for state in states if state.phase is not ProcessPhase.OVER]
        return _wait(left, now, "{} to end")
    absent = [state for state in states if state.phase is ProcessPhase.ABSENT]
    if absent:
        first = min(absent, key=lambda state: state.since)
        units = [replace(first, who=f"unit {number}") for number in sorted({state.unit for state in absent})]
        return _wait(units, now, "{} to load torch and start its processes")
    for is_server, phase, what in (
        (True, ProcessPhase.STARTED, "{} to open its addresses"),
        (False, ProcessPhase.STARTED, "{} to import the script, up to tt.prepare"),
        (False, ProcessPhase.CONNECTED, "the first step of {}"),
    ):
        found = [state for state in states if (state.is_server, state.phase) == (is_server, phase)]
        if found:
            return _wait(found, now, what)
    return _step(workers, cluster, now) if workers else None


def _step(workers: Sequence[ProcessTrack], cluster: Cluster, now: float) -> LongestWait | None:
    """Return the worker that has not made a step for longest, if that is long."""
    active = [state for state in workers if state.phase is ProcessPhase.TRAINING]
    quiet = [state for state in active if now - state.since >= QUIET_S]
    # A step with backup workers, and a round with a quorum, go on without the slowest worker.
    waiting = [] if cluster.backup or cluster.quorum else active
    behind = [(state, ahead) for state in quiet if (ahead := _ahead(state, waiting, cluster)) > state.step]
    if behind:
        slowest, ahead = min(behind, key=lambda each: (each[0].waits, each[0].since))
        return _wait([slowest], now, "{}, which is behind", f": step {slowest.step}, others {ahead}")
    if not active or len(quiet) < len(active):
        return None
    # Others have reported that they wait themselves.
    groups = {state.group for state in waiting if state.waits}
    bounded = bool(groups) and cluster.max_staleness is not None
    causes = [state for state in quiet if not state.waits and (bounded or state.group in groups)]
    if causes:
        return _wait(causes, now, "the next step of {}", ", for which the others wait")
    return _wait(quiet, now, "the next step of {}", f", after step {max(state.step for state in active)}")


def _ahead(state: ProcessTrack, waiting: Sequence[ProcessTrack], cluster: Cluster) -> int:
    """Return the furthest step of the workers that wait for this one; 0: none do."""
    # Workers that train alone wait for others only at the end of a round.
    alone = cluster.outer is not None
    steps = [other.step for other in waiting if other.group == state.group and (other.waits or not alone)]
    if cluster.max_staleness is not None:
        steps += [other.step for other in waiting if other.step - state.step >= max(1, cluster.max_staleness)]
    return max(steps, default=0)


def _wait(states: Collection[ProcessTrack], now: float, what: str, more: str = "") -> LongestWait | None:
    if not states:
        return None
    names = ", ".join(state.who for state in list(states)[:_NAMED])
    if len(states) > _NAMED:
        names += f" and {len(states) - _NAMED} more"
    return LongestWait(what.format(names), max(0.0, now - min(state.since for state in states)), more)
