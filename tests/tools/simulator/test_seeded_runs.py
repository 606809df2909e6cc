"""Seeded simulations: what they find, that a seed is one run, and that a schedule is made as short as it can be."""

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
from topotrain.training.data.lease_queue import LeaseQueue, _Epoch

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
    assert happened >= {*FaultKind} - {FaultKind.LAG}
    assert happened >= {"kill", "crash"}, "at the messages of the end, too"
    assert verdict == next(run_seeds([verdict.seed])) and verdict.messages > 50


def test_nothing_is_left_of_a_seed():
    """Thousands run in one process. torch keeps an error that ends a worker in its backward."""
    name, kinds = "islands of pairs", ("IslandTrial", "Client", "Simulation")
    before = living(*kinds)
    verdicts = list(run_seeds(range(4), LAYOUTS[name], name))
    assert sum(verdict.kills for verdict in verdicts) >= 3
    assert living(*kinds) <= before


def test_a_schedule_is_shrunk_to_what_is_needed(monkeypatch):
    close = _Epoch.close

    def forget(self, groups):
        self.tables.clear()
        return close(self, groups)

    # An epoch is over, and forgotten, when its queue is empty.
    monkeypatch.setattr(LeaseQueue, "_is_done", lambda self, epoch, group: True)
    monkeypatch.setattr(_Epoch, "close", forget)
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


SHOWING = [
    ("downpour of pairs", 1123),  # what the dead give back goes to those who have asked already
    ("in step", 4896),  # shards have their first values between different decisions
    ("warming up", 11332),  # a group came back before the common start, and left before it
    ("downpour on three shards", 11618),  # a snapshot leaves out epochs that are over
    # These are wrong without one of the rules in tests/soak/mutants.txt.
    *(("downpour", seed) for seed in (0, 7)),
    *(("downpour of pairs", seed) for seed in (0, 5, 6, 12, 16, 21)),
    *(("downpour on three shards", seed) for seed in (0, 2, 5, 6, 14, 50)),
    *(("encoded", seed) for seed in (7,)),
    *(("hogwild", seed) for seed in (42,)),
    *(("hogwild of pairs", seed) for seed in (0, 1, 2, 10, 15, 59)),
    *(("sandblaster", seed) for seed in (0, 1, 8, 87)),
    *(("two with a bound", seed) for seed in (60,)),
    *(("three with a bound", seed) for seed in (53,)),
]


@pytest.mark.parametrize(("name", "seed"), SHOWING)
def test_seeds_that_show_a_rule(name, seed):
    verdict = next(run_seeds([seed], name=name))
    assert verdict.kills or verdict.snapshots or verdict.schedule.network != "calm"
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


@pytest.mark.parametrize("place", [slow_and_dead, deaf_at_the_end, late_at_the_next_start, slow_from_the_start])
def test_nothing_waits_for_a_group_that_is_away(place):
    trial = place()
    while trial.run().crashed:
        trial = trial.again()
    assert not trial.wrong()
    assert max(moment for each in trial.commits.values() for moment in each) < 5.0
