"""The rehearsal itself: what it finds, that it is the same twice, and that a schedule is made as short as it can be."""

import pytest
import torch
from batch_counts import InvariantViolated
from cell_observers import CellObserver
from fault_schedule import ANY, Fault, FaultKind, FaultSchedule
from fault_trial import Trial
from living_objects import living
from seeded_runs import LAYOUTS, chosen, prepared, run_seeds, run_trial, schedule_of, shrink
from seeds import SOAK

from topotrain.config.job import Cluster, ConfigError, Job, Placement
from topotrain.core import protocol as m
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.server.consistency import ApplyOrder, DecisionLog
from topotrain.core.server.group_sync import MasterSync
from topotrain.core.server.server_context import ShardState
from topotrain.core.server.startup import ModelStart
from topotrain.extensions.assignment.assignment_server import AssignmentServer, MadeAssignments
from topotrain.extensions.checkpointing import snapshot_coordinator
from topotrain.extensions.checkpointing.checkpoint_extension import CheckpointExtension
from topotrain.extensions.checkpointing.cross_group_cut import CrossGroupCut
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots
from topotrain.tools.simulator.sim_network import Deadlock
from topotrain.training.data.lease_queue import LeaseQueue, _Epoch, _over

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("on_one_core")]


def test_every_seed_counts_every_batch_once():
    """One seed of each layout, and 200 of all in `make soak`."""
    kills = snapshots = moves = 0
    happened = set()
    for verdict in run_seeds(range(200 if SOAK else len(LAYOUTS))):
        assert not verdict.wrong, f"tests/support/simulate.py --seed {verdict.seed}: {verdict.wrong}"
        kills += verdict.kills
        snapshots += verdict.snapshots
        moves += verdict.moves
        came = [fault for fault, at in zip(verdict.schedule.faults, verdict.moments, strict=True) if at is not None]
        happened |= {fault.what for fault in came} | {fault.what.value for fault in came if fault.incarnation == ANY}
    assert kills >= 25 and snapshots and moves
    assert happened >= {FaultKind.FORK, "kill", "crash"}
    assert verdict == next(run_seeds([verdict.seed])) and verdict.messages > 50


def test_nothing_is_left_of_a_seed():
    """Thousands run in one process. torch keeps an error that ends a worker in its backward."""
    name, kinds = "islands of pairs", ("IslandTrial", "Client", "Simulation")
    before = living(*kinds)
    verdicts = list(run_seeds(range(4), LAYOUTS[name], name))
    assert sum(verdict.kills for verdict in verdicts) >= 3
    assert living(*kinds) <= before


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
    found = run_trial(job, name, 7, schedule_of(job, name, 7))
    shortest, kept = shrink(job, found)
    assert found.wrong and shortest.wrong
    assert run_trial(job, name, 7, chosen(found.schedule, kept)) == shortest
    for leave in kept:
        fewer = [at for at in kept if at != leave]
        assert not run_trial(job, name, 7, chosen(found.schedule, fewer)).wrong


def test_only_what_has_a_ledger_is_rehearsed():
    with pytest.raises(ConfigError, match="gradients go directly to servers"):
        prepared(Job(cluster=Cluster(nworkers_per_group=3), placement=Placement.kAuto), "split.conf")


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("downpour of pairs", 1123),  # what the dead give back goes to those who have asked already
        ("in step", 4896),  # shards have their first values between different decisions
        ("warming up", 11332),  # a group came back before the common start, and left before it
        ("downpour on three shards", 11618),  # a snapshot leaves out epochs that are over
    ],
)
def test_seeds_that_have_been_wrong(name, seed):
    verdict = next(run_seeds([seed], name=name))
    assert verdict.kills or verdict.snapshots > 1
    assert not verdict.wrong


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ([1.0, 0.0, 2.0], "cell 2 of p0 as 2, where 0 or 1 is right"),
        ([0.0, 1.0, 1.0], "cell 0 of p0 as 0, which was 1 before"),
        ([1.0, 0.0, 0.0], "cell 1 of p0 as 0, which its group has made"),
    ],
)
def test_a_worker_is_shown_its_own_work_and_never_less_than_before(now, text):
    witness = CellObserver("worker 0/0", 3)
    witness.check([torch.tensor([1.0, 0.0, 0.0, 7.0])])
    witness.check([torch.tensor([1.0, 0.0, 1.0, 7.0])])
    if "made" in text:
        witness.made([1])
    else:
        witness.check([torch.tensor([1.0, 1.0, 1.0, 7.0])])
    with pytest.raises(InvariantViolated, match=f"worker 0/0 has {text}"):
        witness.check([torch.tensor(now)])


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
        lambda self, *_: sorted(
            key for key, vote in self._votes.items() if len(vote.shards) >= max(1, self._shards - 1)
        ),
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
    """An epoch is over, and forgotten, when its queue is empty."""
    patch.setattr(LeaseQueue, "_is_done", lambda self, epoch, group: True)
    close = _Epoch.close

    def forget(self, groups):
        self.tables.clear()
        return close(self, groups)

    # Otherwise a group that restarts is given again what it has not read.
    patch.setattr(_Epoch, "close", forget)


def frozen_late(patch):
    """One shard freezes a step later than the others."""
    freeze = ServerSnapshots.freeze

    def late(self, model, facts, counts):
        if self._me.index and not getattr(late, "waited", False):
            late.waited = True
            return
        late.waited = False
        freeze(self, model, facts, counts)

    patch.setattr(ServerSnapshots, "freeze", late)


def silent_leases(patch):
    """A snapshot knows only of leases that were told in answer to a question."""
    patch.setattr(CheckpointExtension, "on_sent", lambda self, to, message: None)


def in_any_order(patch):
    """Decisions are carried out as they come."""

    def arrive(self, apply):
        known = vars(self).setdefault("known", set())
        new = apply.index not in known
        known.add(apply.index)
        while self.next in known:
            self.next += 1
        return [apply] if new else []

    patch.setattr(ApplyOrder, "arrive", arrive)


def decided_forgotten(patch):
    """A vote about a step that is decided opens another vote."""
    staged = DecisionLog.staged

    def counted(self, shard, message):
        decided, self._decided = self._decided, {}
        try:
            staged(self, shard, message)
        finally:
            self._decided = decided

    patch.setattr(DecisionLog, "staged", counted)


def beginning_again(patch):
    """The first values are taken whenever they are said."""
    init = ModelStart.init

    def again(self, sender, message):
        if self._state.complete:
            self._state.known.values(message.bucket).copy_(self._state.known.body(message))
        init(self, sender, message)

    patch.setattr(ModelStart, "init", again)


def unasked_values(patch):
    """A worker takes values that it does not wait for."""

    def any_round(method):
        def taken(self, sender, message, *more):
            asked = self._round
            if isinstance(message, m.Values):
                self._round = message.round
            try:
                return method(self, sender, message, *more)
            finally:
                self._round = asked

        return taken

    patch.setattr(ValuePull, "on_values", any_round(ValuePull.on_values))
    patch.setattr(ValuePull, "place", any_round(ValuePull.place))


def begun_alone(patch):
    """A group that goes on from a snapshot has its values, and does not wait for those of group 0."""
    opened = ShardState.open

    def at_once(self, model):
        opened(self, model)
        if self.start.resumed:
            self._initialised = {bucket.id for bucket in model.buckets}

    patch.setattr(ShardState, "open", at_once)


def final_values_counted(patch):
    """A snapshot takes for an update of a group's own whatever has changed in its values."""

    def remainders(self):
        for bucket, master in self._masters.items():
            since = self._sent[bucket] if bucket in self._waiting else self._snap[bucket]
            yield master, bucket, self._round[bucket], self._view(bucket) - since

    patch.setattr(MasterSync, "remainders", remainders)


def nothing_held(patch):
    """What a group adds behind its cut is taken by a master that is before its own."""
    patch.setattr(CrossGroupCut, "_is_early", lambda self, message: False)


def late_left_out(patch):
    """What was on its way at the cut is in nobody's part of it."""
    patch.setattr(CrossGroupCut, "exchanged", lambda self, message, body: self._report_if_complete())


def complete_too_soon(patch):
    """A master does not wait for what was on its way."""
    patch.setattr(CrossGroupCut, "complete", property(lambda self: self._sent.keys() == self._wanted))


def over_for_all(patch):
    """An epoch of which nobody has read anything for a while is over."""
    patch.setattr(snapshot_coordinator, "STATIC", 0)


def assigned_twice(patch):
    """A fresh process assigns again what its group has assigned before it died."""
    patch.setattr(MadeAssignments, "make", lambda self, head: True)


def assigned_too_soon(patch):
    """An assignment is decided before all of it is on every shard."""
    patch.setattr(AssignmentServer, "may_stage", lambda self, group, step: True)


MUTANTS = [
    (twice, "downpour of pairs", 5),
    (without_one, "downpour on three shards", 0),
    (votes_counted, "downpour on three shards", 0),
    (greedy, "downpour", 0),
    (nobody_is_awaited, "downpour", 7),
    (frozen_late, "downpour on three shards", 14),
    (silent_leases, "downpour", 7),
    (in_any_order, "downpour on three shards", 50),
    (decided_forgotten, "downpour of pairs", 6),
    (beginning_again, "downpour of pairs", 6),
    (unasked_values, "downpour of pairs", 6),
    (final_values_counted, "hogwild of pairs", 10),
    (nothing_held, "hogwild of pairs", 59),
    (late_left_out, "hogwild of pairs", 0),
    (complete_too_soon, "hogwild of pairs", 15),
    (assigned_twice, "sandblaster", 0),
    (assigned_too_soon, "sandblaster", 87),
]


@pytest.mark.parametrize(("mutant", "name", "seed"), MUTANTS, ids=[row[0].__name__ for row in MUTANTS])
def test_each_rule_is_needed(mutant, name, seed, monkeypatch):
    """The seed is one that is known to show it; where the code has changed, another one will."""
    mutant(monkeypatch)
    job = LAYOUTS[name]
    seeds = (seed, *range(40))
    assert any(run_trial(job, name, each, schedule_of(job, name, each)).wrong for each in seeds), (
        "it makes no difference"
    )


def ended_when_empty(patch):
    """Whoever finds the queue empty leaves the epoch, though others may still die."""
    answer = LeaseQueue._reply_to

    def ends(self, epoch, sender, ask):
        found = answer(self, epoch, sender, ask)
        return _over(ask) if found is None else found

    patch.setattr(LeaseQueue, "_reply_to", ends)


def drained_at_once(patch):
    """A server group is drained when its workers have ended, whatever is under way to the masters."""
    patch.setattr(MasterSync, "drained", lambda self: self._draining)


def slow_and_dead():
    """A group is slow with its first batch, and dies at its second, when nothing is left in the queue but for that."""
    slow = Fault(1, kind=m.Commit, after=0, away=0.5, what=FaultKind.PAUSE)
    return Trial(
        LAYOUTS["downpour"],
        2,
        FaultSchedule("calm", 40, 1, "lease", True, (slow, Fault(1, kind=m.Commit, after=1, away=9.0))),
    )


def deaf_at_the_end():
    """Group 0 has asked for the result, and its server hears late what the others do until their end."""
    slow = Fault(1, at=0.02, away=0.1, what=FaultKind.PAUSE)
    deaf = Fault(0, kind=m.FinalRequest, after=0, what=FaultKind.PAUSE, server=0, away=1.0)
    return Trial(LAYOUTS["hogwild"], 0, FaultSchedule("calm", 12, 1, "static", True, (slow, deaf)))


def late_at_the_next_start():
    """After a crash the servers of group 2 come up when group 1 has long been there."""
    crash = Fault(0, at=0.5, away=0.0, what=FaultKind.CRASH)
    return Trial(LAYOUTS["hogwild of three"], 6, FaultSchedule("calm", 12, 1, "lease", True, (crash,), 0.01, 0.4))


def slow_from_the_start():
    """When all of the job dies, two groups have read their parts of the epoch, and one has read nothing."""
    slow = Fault(1, kind=m.Commit, after=0, away=1.0, what=FaultKind.PAUSE)
    crash = Fault(0, at=0.15, away=0.0, what=FaultKind.CRASH)
    return Trial(
        LAYOUTS["downpour on three shards"], 0, FaultSchedule("views", 2, 1, "static", True, (slow, crash), 0.03)
    )


def right_and_in_time(trial):
    """The result is right, and nothing of it has waited for a group that is away."""
    try:
        while trial.run().crashed:
            trial = trial.again()
    except Deadlock:
        return False
    return not trial.wrong() and max(moment for each in trial.commits.values() for moment in each) < 5.0


@pytest.mark.parametrize(
    ("mutant", "place"),
    [
        (ended_when_empty, slow_and_dead),
        (drained_at_once, deaf_at_the_end),
        (begun_alone, late_at_the_next_start),
        (over_for_all, slow_from_the_start),
    ],
)
def test_each_rule_is_needed_in_a_place_that_was_made_for_it(mutant, place, monkeypatch):
    assert right_and_in_time(place())
    mutant(monkeypatch)
    assert not right_and_in_time(place()), "it makes no difference"
