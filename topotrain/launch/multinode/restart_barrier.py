"""The barrier between two attempts of a job over several units.

* No unit starts before all units have ended their processes.
* The leader waits for a replacement of a vanished unit as long as units wait at the rendezvous. Then the job ends.
* A unit that is there, and does not end its processes or join a new leader, ends the job after that time, too.
* The leader chooses the snapshot, and each unit checks that it sees the same one. A workspace that is not shared is an
  error.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Notifier, Saved
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.multinode.control_connection import (
    LeaderChanged,
    LeaderElected,
    News,
    UnitMessage,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.election.decision_log import Decision, LogParts, parts_of
from topotrain.launch.multinode.election.succession import Takeover
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.multinode.node_membership import LeaderMembership
from topotrain.launch.multinode.node_rendezvous import QUIET_S
from topotrain.launch.multinode.unit_membership import UnitMembership
from topotrain.launch.recovery.resume_point import SHARED, seal, seen

LATE_S = 30.0
"""The least time for such a unit. It may need some seconds to kill its processes."""
_LOOK_S = 1.0  # between two looks whether the leader is silent


@dataclass(frozen=True, slots=True)
class RestartInfo:
    """The attempt that a unit begins, and the hosts of all units in it.

    job: the job, if it is not the first attempt. Its number of workers may have changed.
    """

    attempt: AttemptInfo
    hosts: HostMap
    job: Job | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """The leader's message that an attempt begins. decisions: all of the job."""

    info: RestartInfo
    decisions: Sequence[Decision]


@dataclass(slots=True)
class RestartBarrier:
    """The units that are ready for the attempt after number `number`. It does no I/O.

    ranks: all units but the leader. vacant: the units that would have no processes.
    patience_s: seconds to wait for a vanished unit.
    """

    number: int
    ranks: Collection[int]
    vacant: Collection[int]
    patience_s: float
    back: dict[int, NodeInfo] = field(default_factory=dict)
    _ready: set[int] = field(default_factory=set)
    _gone: dict[int, float] = field(default_factory=dict)

    def on_news(self, news: News, now: float) -> None:
        """Record news. Messages about a former attempt are ignored."""
        match news:
            case UnitMessage(rank, words) if (
                # A replacement is ready at once, and its predecessor's word no longer counts.
                # A unit that joins a new leader may not have begun the last attempt.
                "ready" in words and ("joins" in words or words.get("life") == self.number) and rank not in self.back
            ):
                self._ready.add(rank)
                self._gone.pop(rank, None)
            case UnitReturned(rank, unit):
                self.back[rank] = unit
                self._ready.add(rank)
                self._gone.pop(rank, None)
            # A replacement counts from its return on, whatever its silent predecessor does.
            case UnitVanished(rank, _) if rank not in self.back:
                self._ready.discard(rank)
                self._gone.setdefault(rank, now)
            case _:
                pass

    @property
    def there(self) -> set[int]:
        """The units that are not gone."""
        return set(self.ranks) - self._gone.keys()

    @property
    def missing(self) -> set[int]:
        """The units that the barrier waits for."""
        return set(self.ranks) - self._ready - (self._gone.keys() & set(self.vacant))

    @property
    def gone(self) -> list[int]:
        """The vanished units that the barrier waits for."""
        return sorted(self._gone.keys() & self.missing)

    @property
    def due(self) -> float | None:
        """The time at which the first of them has been waited for long enough."""
        return min((self._gone[rank] + self.patience_s for rank in self.gone), default=None)


class _LongWait:
    """A wait of the leader for a unit that is there.

    It is shown after QUIET_S, and ends the job after `seconds`, but not before LATE_S.
    """

    def __init__(self, membership: UnitMembership, notifier: Notifier, seconds: float) -> None:
        self._membership, self._notifier, self._seconds = membership, notifier, max(seconds, LATE_S)
        self._began, self._shown = time.monotonic(), False

    @property
    def due(self) -> float:
        """The time of the next look."""
        return self._began + (self._seconds if self._shown else min(QUIET_S, self._seconds))

    def is_over(self, rank: int, what: str) -> bool:
        """Show the wait, or end the job, when it is due; return whether the wait is over."""
        now, leader = time.monotonic(), self._membership.leader
        if now >= self.due and not self._shown:
            self._shown = True
            self._notifier.notify(f"the job waits for unit {rank} to {what}, for at most {self._seconds:g} s")
        over = now >= self._began + self._seconds
        if over and leader is not None:
            why = f"answers, and did not {what} within {self._seconds:g} s: is its launcher or its disk hung?"
            leader.end_without(rank, why)
            self._membership.wait(self._seconds)
        return over


def await_ready(
    barrier: RestartBarrier,
    unread: Iterable[News],
    membership: UnitMembership,
    stop: StopSignals,
    notifier: Notifier,
    hint: str,
) -> LeaderElected | LeaderChanged | bool | None:
    """Wait in the leader until all units are ready.

    Returns None if the job ends instead, or the news that another unit leads.
    """
    reported, wait = set[int](), _LongWait(membership, notifier, barrier.patience_s)
    news = list(unread)
    while True:
        for number, each in enumerate(news):
            if isinstance(each, LeaderElected | LeaderChanged):
                membership.control.queue.put_back(news[number + 1 :])
                return each
            barrier.on_news(each, time.monotonic())
        # Before `missing`: a job that has ended begins no other attempt.
        if membership.over or stop.came:
            return None
        if not barrier.missing:
            return True
        leader = membership.leader
        if leader is not None and barrier.due is not None and time.monotonic() >= barrier.due:
            why = f"vanished without a word, and within {barrier.patience_s:g} s no replacement was started{hint}"
            leader.end_without(barrier.gone[0], why)
            membership.wait(barrier.patience_s)
            return None
        late = sorted(barrier.missing - set(barrier.gone)) if leader is not None else []
        if late and wait.is_over(late[0], "end its processes"):
            return None
        for rank in set(barrier.gone) - reported:
            reported.add(rank)
            text = f"the job waits {barrier.patience_s:g} s for another `topotrain unit --rank {rank}`"
            notifier.notify(f"unit {rank} is gone: {text}")
        _sleep(membership, stop, min(filter(None, (barrier.due, wait.due if late else None)), default=None))
        news = membership.control.news()


def await_joins(
    takeover: Takeover, membership: UnitMembership, stop: StopSignals, notifier: Notifier, patience_s: float
) -> bool:
    """Wait in a new leader until all units have joined or are lost.

    Returns False if the job ends, or another unit leads instead.
    """
    wait = _LongWait(membership, notifier, patience_s)
    while takeover.missing:
        if membership.over or stop.came or wait.is_over(min(takeover.missing), "join the unit that leads"):
            return False
        _sleep(membership, stop, wait.due)
        news = membership.control.news()
        for number, each in enumerate(news):
            if isinstance(each, LeaderChanged):
                membership.control.queue.put_back(news[number:])
                return False
            takeover.on_news(each)
    return True


def await_leader(
    unread: Sequence[News], membership: UnitMembership, stop: StopSignals, patience_s: float
) -> LeaderElected | LeaderChanged | None:
    """Wait for news about the leader; None if the job ends, or this unit without one."""
    news, until = list(unread), time.monotonic() + max(patience_s, LATE_S)
    while not (membership.over or stop.came):
        for number, each in enumerate(news):
            if isinstance(each, LeaderElected | LeaderChanged):
                membership.control.queue.put_back(news[number + 1 :])
                return each
        if time.monotonic() >= until:
            membership.give_up_waiting(max(patience_s, LATE_S))
            break
        _sleep(membership, stop, until)
        news = membership.control.news()
    return None


def send_attempt(
    leader: LeaderMembership, barrier: RestartBarrier, begun: RestartInfo, decisions: Sequence[Decision] = ()
) -> None:
    """Send the next attempt from the leader to all units that are present."""
    attempt, hosts = begun.attempt, begun.hosts
    for rank, unit in barrier.back.items():  # before `expect`: the silence of the former process must not count
        leader.control.open(rank, unit.word)
    leader.expect(hosts, barrier.there)
    # The seal lets each unit check that it sees the same snapshot under this name.
    words: dict[str, Any] = {"name": Path(attempt.resume).name, "seal": seal(attempt.resume)}
    *first, last = parts_of(decisions)
    words |= {"absent": sorted(attempt.absent), "hosts": asdict(hosts), "why": attempt.why, **last}
    words |= {} if begun.job is None else {"job": job_file.dumps(begun.job)}
    for rank in sorted(barrier.there):
        for part in first:
            leader.control.send(rank, {"life": attempt.number, "part": part})
        leader.control.send(rank, {"life": attempt.number, "begin": words})


def await_begin(
    unread: Iterable[News],
    membership: UnitMembership,
    stop: StopSignals,
    number: int,
    workspace: Path,
    patience_s: float,
) -> Begin | LeaderElected | LeaderChanged | None:
    """Wait in a unit that follows for the attempt after number `number`.

    Returns None if the job ends instead, or the news that this unit leads or has another leader. The unit ends when it
    has heard of no leader for `patience_s` longer than it would in an attempt. Raises ConfigError.
    """
    news = list(unread)
    alone_since: float | None = None
    parts = LogParts()
    while True:
        for at, each in enumerate(news):
            found = _begun(each, number, workspace, parts)
            if found is not None:
                membership.control.queue.put_back(news[at + 1 :])
                return found
            if isinstance(each, UnitMessage) and "outcast" in each.words:
                membership.exclude()
        if membership.over or stop.came:
            return None
        now = time.monotonic()
        alone_since = (alone_since or now) if membership.control.alone else None
        if alone_since is not None and now - alone_since > patience_s:
            membership.give_up_waiting(patience_s)
            return None
        _sleep(membership, stop, now + _LOOK_S)
        news = membership.control.news()


def _begun(news: News, number: int, workspace: Path, parts: LogParts) -> Begin | LeaderElected | LeaderChanged | None:
    """Return what these news begin, if anything."""
    if isinstance(news, LeaderElected | LeaderChanged):
        return news
    # Numbers are compared: a repeated message about this or a former attempt begins nothing.
    if not isinstance(news, UnitMessage) or news.words.get("life", 0) <= number:
        return None
    if "part" in news.words:
        parts.add(news.words["part"])
    if "begin" not in news.words:
        return None
    words = news.words["begin"]
    path = seen(workspace, words["name"], words["seal"])
    attempt = AttemptInfo(news.words["life"], path, frozenset(words["absent"]), words["why"])
    job = job_file.loads(words["job"], "the job of the leader") if "job" in words else None
    return Begin(RestartInfo(attempt, HostMap.of(words["hosts"]), job), parts.add(words))


def check_found(resume: str, saved: Saved | None, job: Job) -> None:
    """Raise ConfigError where the leader does not see a snapshot that was taken."""
    if saved is not None and not resume:
        accepted = f"has no snapshot, though {saved.who} has taken number {saved.number}: {SHARED}"
        raise ConfigError("cluster.workspace", job.workspace, accepted)


def _sleep(membership: UnitMembership, stop: StopSignals, due: float | None) -> None:
    """Wait until something arrives, or `due` is reached."""
    with DefaultSelector() as selector:
        for number in (membership.fileno(), membership.control.fileno(), stop.woken.fileno()):
            selector.register(number, EVENT_READ)
        ready = selector.select(None if due is None else max(0.0, due - time.monotonic()))
        stop.clear_wakeup()
        if not membership.over and any(key.fd == membership.fileno() for key, _ in ready):
            membership.clear_wakeup()  # a request for a last snapshot, but no processes are running
