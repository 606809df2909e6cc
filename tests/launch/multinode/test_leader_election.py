"""Who leads: one unit in a term, and a unit again soon after the last one has gone, whatever the order of events."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from topotrain.launch.multinode.election.leader_election import LeaderElection, LeaderRecord, Proposal

LEASE_S, BEAT_S = 4.0, 1.0
WORD = "0123456789abcdef"


def unit(rank: int, leads: bool = False, now: float = 0.0) -> LeaderElection:
    return LeaderElection(rank, WORD[rank], LEASE_S, leads, now)


def opened() -> tuple[LeaderElection, bytes]:
    """Unit 0, which leads, and its record."""
    made = unit(0, leads=True)
    proposal = made.proposal("u0", False, 0.0)
    assert proposal is not None and proposal.expected is None
    assert not made.on_written(proposal, 0.1), "it led before"
    return made, proposal.record.dumped()


def campaign(made: LeaderElection, now: float) -> Proposal:
    proposal = made.proposal("u", True, now)
    assert proposal is not None
    return proposal


def test_a_lease_expires_by_the_clock_of_the_reader_alone() -> None:
    _, raw = opened()
    other = unit(1, now=5000.0)
    assert not other.on_read(raw, 5000.0)
    assert other.proposal("u1", True, 5000.0 + LEASE_S - 0.01) is None
    proposal = campaign(other, 5000.0 + LEASE_S)
    assert (proposal.expected, proposal.record) == (raw, LeaderRecord(2, 1, "1", "u"))
    assert other.on_written(proposal, 5004.5)
    assert (other.leads, other.term, other.leader) == (True, 2, 1)


def test_a_renewed_record_and_a_store_that_was_away_give_the_leader_its_time_again() -> None:
    first, raw = opened()
    other = unit(1)
    other.on_read(raw, 0.0)
    renewal = first.proposal("u0", False, 3.0)
    assert renewal is not None
    other.on_read(renewal.record.dumped(), 3.5)
    assert other.proposal("u1", True, LEASE_S + 1) is None
    other.on_failure()
    assert other.proposal("u1", True, 100.0) is None
    other.on_read(renewal.record.dumped(), 101.0)  # the leader could not renew it meanwhile
    assert other.proposal("u1", True, 101.0 + LEASE_S - 0.1) is None
    assert other.proposal("u1", False, 101.0 + LEASE_S) is None, "something arrives from the leader"
    campaign(other, 101.0 + LEASE_S)


def test_a_leader_that_finds_a_successor_follows_it_and_never_returns_to_a_lower_term() -> None:
    first, raw = opened()
    assert first.on_read(LeaderRecord(2, 1, "1", "u").dumped(), 9.0)
    assert (first.leads, first.term, first.leader) == (False, 2, 1)
    assert not first.holds_lease(0.0) and not first.may_decide(0.0)
    assert not first.on_read(raw, 9.5)
    assert (first.term, first.leader) == (2, 1)


def test_a_leader_decides_only_with_its_lease_or_without_a_store() -> None:
    first, _ = opened()
    assert first.holds_lease(2.9) and not first.holds_lease(3.0)
    assert not first.may_decide(3.0), "it may have been stopped for a while, and has to look first"
    first.on_failure()
    assert first.may_decide(3.0) and not first.holds_lease(3.0)


def test_a_write_whose_reply_was_lost_counts_when_it_is_read() -> None:
    _, raw = opened()
    other = unit(1)
    other.on_read(raw, 0.0)
    proposal = campaign(other, LEASE_S)
    other.on_failure()
    assert other.on_read(proposal.record.dumped(), LEASE_S + 5)
    assert other.leads and not other.holds_lease(LEASE_S + 5), "from when it was asked"


def test_after_the_end_of_the_job_nobody_is_elected() -> None:
    first, _ = opened()
    ended = first.proposal("u0", False, 1.0, "end")
    assert ended is not None and ended.record.end == "end"
    other = unit(1)
    other.on_read(ended.record.dumped(), 1.5)
    assert other.end == "end" and other.proposal("u1", True, 100.0) is None


def test_two_leaders_of_one_term_after_a_loss_of_the_stores_data_do_not_share_units() -> None:
    a, b, c = unit(1), unit(2), unit(3)
    for each in (a, b, c):
        each.on_read(None, 0.0)
    one, two = campaign(a, LEASE_S), campaign(b, LEASE_S)
    a.on_written(one, LEASE_S)
    c.on_read(one.record.dumped(), LEASE_S)
    b.on_written(two, LEASE_S)  # the record of the other one was wiped out
    assert c.leader == 1 and not c.on_read(two.record.dumped(), LEASE_S + 1)
    assert a.on_read(two.record.dumped(), LEASE_S + 1) and not a.leads


@pytest.mark.parametrize("raw", [b"", b"x", b"[]", b"{}", b'{"term": 1}', LeaderRecord(1, 0, "a", "u").dumped()[:-1]])
def test_what_is_no_record_is_none(raw: bytes) -> None:
    assert LeaderRecord.loaded(raw) is None
    assert LeaderRecord.loaded(replace(LeaderRecord(1, 0, "a", "u"), term="1").dumped()) is None  # type: ignore[arg-type]


# --- simulated units and a simulated store --------------------------------------------------------------------------


@dataclass
class Host:
    """A unit in the simulation, with a clock of its own."""

    election: LeaderElection
    skew_s: float
    pace: float
    stopped_until: float = 0.0  # it is frozen: nothing happens in it
    dead: bool = False
    cut_until: float = 0.0  # its requests to the store fail

    def clock(self, now: float) -> float:
        return self.skew_s + self.pace * now


@dataclass
class World:
    """Units that look at one record, by the same steps as `UnitMembership`, in an order that a seed decides."""

    rng: random.Random
    hosts: list[Host]
    slow_s: float
    raw: bytes | None = None
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    leaders: dict[int, set[int]] = field(default_factory=dict)
    overlaps: list[tuple[float, list[int]]] = field(default_factory=list)
    store_away_until: float = 0.0
    _count: int = 0

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, act))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.queue and self.queue[0][0] <= until:
            self.now, _, act = heapq.heappop(self.queue)
            act()
            self.check()
        self.now = until

    def check(self) -> None:
        holding = []
        for rank, host in enumerate(self.hosts):
            if host.election.leads:
                self.leaders.setdefault(host.election.term, set()).add(rank)
            if not host.dead and host.election.holds_lease(host.clock(self.now)):
                holding.append(rank)
        if len(holding) > 1:
            self.overlaps.append((self.now, holding))

    def on(self, host: Host, act: Callable[[], None]) -> None:
        """Do this in a unit, later if it is stopped, and never if it is dead."""
        if host.dead:
            return
        if host.stopped_until > self.now:
            self.after(host.stopped_until - self.now + 0.01 * self.rng.random(), lambda: self.on(host, act))
            return
        act()

    def request(self, host: Host, effect: Callable[[], object], then: Callable[[object], None]) -> None:
        """An operation of the store: its effect comes some time later, and the reply again later, or is lost."""
        away = max(self.store_away_until, host.cut_until) > self.now
        delay = self.rng.random() * self.slow_s

        def fail() -> None:
            host.election.on_failure()
            self.after(BEAT_S * self.rng.uniform(0.5, 1.5), lambda: self.on(host, lambda: self.look(host)))

        def arrive() -> None:
            found = effect()
            if self.rng.random() < 0.03:  # the reply is lost
                self.after(0.5, lambda: self.on(host, fail))
            else:
                self.after(self.rng.random() * self.slow_s, lambda: self.on(host, lambda: then(found)))

        self.after(delay, (lambda: self.on(host, fail)) if away else arrive)

    def look(self, host: Host) -> None:
        self.request(host, lambda: self.raw, lambda raw: self.on_read(host, raw))  # type: ignore[arg-type]

    def on_read(self, host: Host, raw: bytes | None) -> None:
        election, now = host.election, host.clock(self.now)
        again = BEAT_S * self.rng.uniform(0.8, 1.2)
        proposal = None if election.on_read(raw, now) else election.proposal("url", self.silent(host), now)
        if proposal is None:
            self.after(again, lambda: self.on(host, lambda: self.look(host)))
            return

        def effect() -> bool:
            written = self.raw == proposal.expected
            if written:
                self.raw = proposal.record.dumped()
            return written

        def then(written: object) -> None:
            if written:
                election.on_written(proposal, host.clock(self.now))
            else:
                election.on_refused()
            self.after(again, lambda: self.on(host, lambda: self.look(host)))

        self.request(host, effect, then)

    def silent(self, host: Host) -> bool:
        """Whether nothing arrives from the leader; at times also from one that is well."""
        leader = host.election.leader
        there = 0 <= leader < len(self.hosts) and not self.hosts[leader].dead
        return not (there and self.hosts[leader].stopped_until <= self.now) or self.rng.random() < 0.3


def world(seed: int) -> World:
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    hosts = []
    for rank in range(count):
        skew, pace = rng.uniform(-1e6, 1e6), rng.uniform(0.95, 1.05)
        hosts.append(Host(LeaderElection(rank, WORD[rank], LEASE_S, rank == 0, skew), skew, pace))
    made = World(rng, hosts, rng.choice((0.0, 0.05, 0.5, 2.0)))
    for host in hosts:
        made.after(rng.random(), lambda host=host: made.look(host))  # type: ignore[misc]
    return made


@pytest.mark.parametrize("block", range(8))
def test_never_two_leaders_in_a_term_and_a_leader_while_there_is_a_store(block: int) -> None:
    elected = 0
    for seed in range(block * 50, block * 50 + 50):
        made = world(seed)
        rng, hosts = made.rng, made.hosts
        for _ in range(rng.randint(1, 6)):
            made.run(rng.uniform(0.0, 12.0))
            host = rng.choice(hosts)
            match rng.randrange(4):
                case 0 if sum(not each.dead for each in hosts) > 1:
                    host.dead = True
                case 1:
                    host.stopped_until = made.now + rng.uniform(0.5, 15.0)
                case 2:
                    made.store_away_until = made.now + rng.uniform(0.5, 10.0)
                case _:
                    host.cut_until = made.now + rng.uniform(0.5, 15.0)
        made.run(90.0)
        assert all(len(ranks) == 1 for ranks in made.leaders.values()), f"seed {seed}: {made.leaders}"
        assert not made.overlaps, f"seed {seed}: two hold the lease: {made.overlaps[0]}"
        living = [host for host in hosts if not host.dead]
        leading = [host for host in living if host.election.leads]
        assert len(leading) == 1, f"seed {seed}: {len(leading)} lead at the end"
        assert all(host.election.term == leading[0].election.term for host in living), f"seed {seed}"
        elected += leading[0].election.term > 1
    assert elected > 10, "the seeds must let leaders go"
