"""Between two lives of a job over several units: all units come together, and begin the next one from one snapshot.

Rule: no unit begins before all have ended their processes. Who has vanished is waited for, so long as units wait for
each other at the start; then the job ends. Unit 0 chooses the snapshot, and each unit looks whether it sees the same
one: a workspace that is not shared is told, and not trained on.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Saved
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.multinode.mailbox import Mailbox, News, UnitMessage, UnitReturned, UnitVanished
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.multinode.node_membership import NodeMembership
from topotrain.launch.recovery.resume_point import SHARED, seal, seen


@dataclass(frozen=True, slots=True)
class RestartInfo:
    """What a unit begins: the life of the job, and where all units are in it."""

    life: AttemptInfo
    hosts: HostMap


@dataclass(slots=True)
class RestartBarrier:
    """Who is ready for the life after number `life`; pure.

    ranks: of all units but 0. vacant: those where nobody would live. patience_s: for a unit that has vanished.
    """

    life: int
    ranks: Collection[int]
    vacant: Collection[int]
    patience_s: float
    back: dict[int, NodeInfo] = field(default_factory=dict)
    _ready: set[int] = field(default_factory=set)
    _gone: dict[int, float] = field(default_factory=dict)

    def heard(self, news: News, now: float) -> None:
        """Take news; what belongs to a life that is over says nothing here."""
        match news:
            case UnitMessage(rank, words) if (
                "ready" in words and words.get("life") == self.life and rank not in self.back
            ):
                self._ready.add(rank)
                self._gone.pop(rank, None)
            case UnitReturned(rank, unit):
                self.back[rank] = unit
                self._ready.add(rank)
                self._gone.pop(rank, None)
            case UnitVanished(rank, _) if rank not in self.back:
                self._ready.discard(rank)
                self._gone.setdefault(rank, now)
            case _:
                pass

    @property
    def there(self) -> set[int]:
        """Who is not gone."""
        return set(self.ranks) - self._gone.keys()

    @property
    def missing(self) -> set[int]:
        """Who is waited for."""
        return set(self.ranks) - self._ready - (self._gone.keys() & set(self.vacant))

    @property
    def gone(self) -> list[int]:
        """Who has vanished and is waited for."""
        return sorted(self._gone.keys() & self.missing)

    @property
    def due(self) -> float | None:
        """When the first of them has been waited for long enough."""
        return min((self._gone[rank] + self.patience_s for rank in self.gone), default=None)


def muster(
    made: RestartBarrier,
    unread: Iterable[News],
    company: NodeMembership,
    heard: StopSignals,
    tell: Callable[[str], None],
    hint: str,
) -> bool:
    """By unit 0: return when all are ready; False: the job ends instead."""
    post = _post(company)
    told: set[int] = set()
    news = list(unread)
    while True:
        for each in news:
            made.heard(each, time.monotonic())
        if company.over or heard.came:
            return False
        if not made.missing:
            return True
        if made.due is not None and time.monotonic() >= made.due:
            company.nobody_came(made.gone[0], made.patience_s, hint)
            company.wait(made.patience_s)
            return False
        for rank in set(made.gone) - told:
            told.add(rank)
            tell(f"unit {rank} is gone: the job waits {made.patience_s:g} s for another `topotrain unit --rank {rank}`")
        _sleep(company, post, heard, made.due)
        news = post.news()


def begin_anew(company: NodeMembership, made: RestartBarrier, hosts: HostMap, life: AttemptInfo) -> None:
    """By unit 0: tell all who are there what they begin."""
    post = _post(company)
    company.expect(hosts, made.there)
    for rank, unit in made.back.items():
        post.open(rank, unit.word)
    words: dict[str, Any] = {"name": Path(life.resume).name, "seal": seal(life.resume)}
    words |= {"absent": sorted(life.absent), "hosts": asdict(hosts)}
    for rank in sorted(made.there):
        post.say(rank, {"life": life.number, "begin": words})


def await_begin(
    unread: Iterable[News], company: NodeMembership, heard: StopSignals, life: int, workspace: Path
) -> RestartInfo | None:
    """By another unit: wait for the life after number `life`; None: the job ends instead. Raises ConfigError."""
    post = _post(company)
    news = list(unread)
    while True:
        for each in news:
            if isinstance(each, UnitMessage) and "begin" in each.words and each.words["life"] > life:
                return _begun(each.words["life"], each.words["begin"], workspace)
            if isinstance(each, UnitMessage) and "outcast" in each.words:
                company.cast_out()
        if company.over or heard.came:
            return None
        _sleep(company, post, heard, None)
        news = post.news()


def _begun(number: int, words: Mapping[str, Any], workspace: Path) -> RestartInfo:
    path = seen(workspace, words["name"], words["seal"])
    return RestartInfo(AttemptInfo(number, path, frozenset(words["absent"])), HostMap.of(words["hosts"]))


def check_found(resume: str, saved: Saved | None, job: Job) -> None:
    """Raise ConfigError where a snapshot was taken that cannot be seen by unit 0."""
    if saved is not None and not resume:
        accepted = f"has no snapshot, though {saved.who} has taken number {saved.number}: {SHARED}"
        raise ConfigError("cluster.workspace", job.workspace, accepted)


def _post(company: NodeMembership) -> Mailbox:
    assert company.post is not None
    return company.post


def _sleep(company: NodeMembership, post: Mailbox, heard: StopSignals, due: float | None) -> None:
    """Until something has come, or it is time."""
    with DefaultSelector() as selector:
        for number in (company.fileno(), post.fileno(), heard.woken.fileno()):
            selector.register(number, EVENT_READ)
        ready = selector.select(None if due is None else max(0.0, due - time.monotonic()))
        if not company.over and any(key.fd == company.fileno() for key, _ in ready):
            company.heard()  # a last snapshot is asked for, of processes that are not there
