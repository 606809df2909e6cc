"""The barrier between two attempts of a job over several units.

* No unit starts before all units have ended their processes.
* Unit 0 waits for a replacement of a vanished unit as long as units wait at the rendezvous. Then the job ends.
* Unit 0 chooses the snapshot, and each unit checks that it sees the same one. A workspace that is not shared is an
  error.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Notifier, Saved
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.multinode.control_connection import News, UnitMessage, UnitReturned, UnitVanished
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.multinode.node_membership import LeaderMembership, UnitMembership
from topotrain.launch.recovery.resume_point import SHARED, seal, seen


@dataclass(frozen=True, slots=True)
class RestartInfo:
    """The attempt that a unit begins, and the hosts of all units in it.

    job: the job, if it is not the first attempt. Its number of workers may have changed.
    """

    attempt: AttemptInfo
    hosts: HostMap
    job: Job | None = None


@dataclass(slots=True)
class RestartBarrier:
    """The units that are ready for the attempt after number `number`. It does no I/O.

    ranks: all units but 0. vacant: the units that would have no processes.
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
                "ready" in words and words.get("life") == self.number and rank not in self.back
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


def await_ready(
    barrier: RestartBarrier,
    unread: Iterable[News],
    membership: LeaderMembership,
    stop: StopSignals,
    notifier: Notifier,
    hint: str,
) -> bool:
    """Wait in unit 0 until all units are ready; False if the job ends instead."""
    reported: set[int] = set()
    news = list(unread)
    while True:
        for each in news:
            barrier.on_news(each, time.monotonic())
        # Before `missing`: a job that has ended begins no other attempt.
        if membership.over or stop.came:
            return False
        if not barrier.missing:
            return True
        if barrier.due is not None and time.monotonic() >= barrier.due:
            membership.on_not_replaced(barrier.gone[0], barrier.patience_s, hint)
            membership.wait(barrier.patience_s)
            return False
        for rank in set(barrier.gone) - reported:
            reported.add(rank)
            text = f"the job waits {barrier.patience_s:g} s for another `topotrain unit --rank {rank}`"
            notifier.notify(f"unit {rank} is gone: {text}")
        _sleep(membership, stop, barrier.due)
        news = membership.control.news()


def send_attempt(membership: LeaderMembership, barrier: RestartBarrier, begun: RestartInfo) -> None:
    """Send the next attempt from unit 0 to all units that are present."""
    attempt, hosts = begun.attempt, begun.hosts
    for rank, unit in barrier.back.items():  # before `expect`: the silence of the former process must not count
        membership.control.open(rank, unit.word)
    membership.expect(hosts, barrier.there)
    # The seal lets each unit check that it sees the same snapshot under this name.
    words: dict[str, Any] = {"name": Path(attempt.resume).name, "seal": seal(attempt.resume)}
    words |= {"absent": sorted(attempt.absent), "hosts": asdict(hosts), "why": attempt.why}
    words |= {} if begun.job is None else {"job": job_file.dumps(begun.job)}
    for rank in sorted(barrier.there):
        membership.control.send(rank, {"life": attempt.number, "begin": words})


def await_begin(
    unread: Iterable[News], membership: UnitMembership, stop: StopSignals, number: int, workspace: Path
) -> RestartInfo | None:
    """Wait in another unit for the attempt after number `number`.

    Returns None if the job ends instead. Raises ConfigError.
    """
    news = list(unread)
    while True:
        for each in news:
            # Numbers are compared: a repeated message about this or a former attempt begins nothing.
            if isinstance(each, UnitMessage) and "begin" in each.words and each.words["life"] > number:
                return _begun(each.words["life"], each.words["begin"], workspace)
            if isinstance(each, UnitMessage) and "outcast" in each.words:
                membership.exclude()
        if membership.over or stop.came:
            return None
        _sleep(membership, stop, None)
        news = membership.control.news()


def _begun(number: int, words: Mapping[str, Any], workspace: Path) -> RestartInfo:
    path = seen(workspace, words["name"], words["seal"])
    attempt = AttemptInfo(number, path, frozenset(words["absent"]), words.get("why", ""))
    job = job_file.loads(words["job"], "the job of unit 0") if "job" in words else None
    return RestartInfo(attempt, HostMap.of(words["hosts"]), job)


def check_found(resume: str, saved: Saved | None, job: Job) -> None:
    """Raise ConfigError where unit 0 does not see a snapshot that was taken."""
    if saved is not None and not resume:
        accepted = f"has no snapshot, though {saved.who} has taken number {saved.number}: {SHARED}"
        raise ConfigError("cluster.workspace", job.workspace, accepted)


def _sleep(membership: UnitMembership, stop: StopSignals, due: float | None) -> None:
    """Wait until something arrives, or `due` is reached."""
    with DefaultSelector() as selector:
        for number in (membership.fileno(), membership.control.fileno(), stop.woken.fileno()):
            selector.register(number, EVENT_READ)
        ready = selector.select(None if due is None else max(0.0, due - time.monotonic()))
        if not membership.over and any(key.fd == membership.fileno() for key, _ in ready):
            membership.clear_wakeup()  # a request for a last snapshot, but no processes are running
