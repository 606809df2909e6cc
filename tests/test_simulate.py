"""The rehearsal itself: what it finds, that it is the same twice, and that a schedule is made as short as it can be."""

import os

import pytest

from topotrain.consistency import ApplyOrder, DecisionLog
from topotrain.job import Cluster, ConfigError, Job, Placement
from topotrain.leases import LeaseBook, _Epoch
from topotrain.server import Server
from topotrain.simulate import LAYOUTS, chosen, many, prepared, rehearse, scheduled, shrunk
from topotrain.snapshotting import Snapshots

pytestmark = pytest.mark.simulated


@pytest.fixture(autouse=True)
def on_one_core():
    """Of all threads one runs at a time: on one core the turn is handed over several times as fast."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("part", range(4))
def test_every_seed_counts_every_batch_once(part):
    kills = snapshots = 0
    for verdict in many(range(50 * part, 50 * part + 50)):
        assert not verdict.wrong, f"topotrain simulate --seed {verdict.seed}: {verdict.wrong}"
        kills += verdict.kills
        snapshots += verdict.snapshots
    assert kills >= 25 and snapshots


def test_a_seed_is_one_rehearsal():
    one, two = (next(many([29])) for _ in range(2))
    assert one == two and one.messages > 50


def greedy(patch):
    """A batch that was given back is handed out, and stays in the queue."""
    take = _Epoch.take

    def keeps(self, length):
        freed = list(self.freed)
        run = take(self, length)
        self.freed = freed
        return run

    patch.setattr(_Epoch, "take", keeps)


def test_a_schedule_is_shrunk_to_what_is_needed(monkeypatch):
    nobody_is_awaited(monkeypatch)
    job, name = LAYOUTS["downpour"], "downpour"
    found = rehearse(job, name, 7, scheduled(job, name, 7))
    shortest, kept = shrunk(job, found)
    assert found.wrong and shortest.wrong
    assert rehearse(job, name, 7, chosen(found.schedule, kept)) == shortest
    for leave in kept:
        fewer = [at for at in kept if at != leave]
        assert not rehearse(job, name, 7, chosen(found.schedule, fewer)).wrong


def test_only_what_has_a_ledger_is_rehearsed():
    with pytest.raises(ConfigError, match="gradients go straight to servers"):
        prepared(Job(cluster=Cluster(nworkers_per_group=3), placement=Placement.kAuto), "split.conf")


def test_a_snapshot_counts_leases_that_were_told_when_a_group_was_gone():
    """What the dead give back goes to those who have asked already, without another question."""
    verdict = next(many([1123]))
    assert verdict.kills and verdict.snapshots and not verdict.wrong


def test_a_snapshot_leaves_out_epochs_that_are_over():
    verdict = next(many([11618]))
    assert verdict.schedule.epochs == 2 and verdict.snapshots > 1 and not verdict.wrong


# --- rules left out ----------------------------------------------------------------------------------------------
#
# As in test_sim_regroup, whose mutants are about groups that come back; these are about everything else.


def twice(patch):
    """A decision that is said again is carried out again."""
    arrive = ApplyOrder.arrive
    patch.setattr(ApplyOrder, "arrive", lambda self, a: [a] if a.index < self.next else arrive(self, a))


def without_one(patch):
    """All shards but one are enough for a decision."""
    patch.setattr(
        DecisionLog,
        "ready",
        lambda self: sorted(key for key, vote in self._votes.items() if len(vote.shards) >= max(1, self._shards - 1)),
    )


def votes_counted(patch):
    """A vote that is said again is another vote."""
    staged = DecisionLog.staged

    def counted(self, shard, message):
        vote = self._votes.get((message.group, message.step))
        if vote is not None and shard in vote.shards:
            vote.shards.add(-len(vote.shards))
        staged(self, shard, message)

    patch.setattr(DecisionLog, "staged", counted)


def nobody_is_awaited(patch):
    """An epoch is over when its queue is empty."""
    patch.setattr(LeaseBook, "_is_done", lambda self, epoch, group: True)


def frozen_late(patch):
    """One shard freezes a step later than the others."""
    freeze = Snapshots.freeze

    def late(self, model, facts, counts):
        if self._due and self._me.index and not getattr(late, "waited", False):
            late.waited = True
            return
        late.waited = False
        freeze(self, model, facts, counts)

    patch.setattr(Snapshots, "freeze", late)


def silent_leases(patch):
    """A snapshot knows only of leases that were told in answer to a question."""
    patch.setattr(Server, "_send", _without_noting(Server._send))


def _without_noting(send):
    def quiet(self, to, message):
        position = self.snapshots.position
        self.snapshots.position = _Deaf(position)
        try:
            send(self, to, message)
        finally:
            self.snapshots.position = position

    return quiet


class _Deaf:
    def __init__(self, position):
        self._position = position

    def leased(self, *_):
        pass


MUTANTS = [
    (twice, "downpour of pairs", 5),
    (without_one, "downpour on three shards", 0),
    (votes_counted, "downpour on three shards", 0),
    (greedy, "downpour", 0),
    (nobody_is_awaited, "downpour", 7),
    (frozen_late, "downpour on three shards", 14),
    (silent_leases, "downpour", 7),
]


@pytest.mark.parametrize(("mutant", "name", "seed"), MUTANTS, ids=[row[0].__name__ for row in MUTANTS])
def test_each_rule_is_needed(mutant, name, seed, monkeypatch):
    """The seed is one that is known to show it; where the code has changed, another one will."""
    mutant(monkeypatch)
    job = LAYOUTS[name]
    seeds = (seed, *range(40))
    assert any(rehearse(job, name, each, scheduled(job, name, each)).wrong for each in seeds), "it makes no difference"
