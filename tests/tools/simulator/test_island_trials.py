"""Simulated workers with rounds of their own: what seeds find."""

from dataclasses import replace

import pytest
import torch
from fault_schedule import Fault, FaultKind
from island_trial import IslandTrial, trains_alone
from seeded_runs import LAYOUTS, TrialVerdict, prepared, run_trial, schedule_of
from seeds import seeds

from topotrain.config.job import Keep

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("on_one_core")]

ISLANDS = tuple(name for name, job in LAYOUTS.items() if trains_alone(job))
"""The layouts in which workers make several steps between two rounds."""


def verdict_of(name: str, seed: int) -> TrialVerdict:
    return run_trial(LAYOUTS[name], name, seed, schedule_of(LAYOUTS[name], name, seed))


def short_epochs(name: str, seed: int) -> TrialVerdict:
    """A worker makes two steps in an epoch, and three or more between two pushes."""
    job = LAYOUTS[name]
    schedule = replace(schedule_of(job, name, seed), batches=2 * job.cluster.nworker_groups, epochs=6)
    return run_trial(job, name, seed, schedule)


def test_no_step_is_lost_or_counted_twice_and_a_seed_is_one_run() -> None:
    counts, happened = [0, 0, 0], list[Fault]()
    for name in ISLANDS:
        for seed in seeds(40):
            verdict = verdict_of(name, seed)
            assert not verdict.wrong, f'tests/support/simulate.py --seed {seed} --layout "{name}": {verdict.wrong}'
            each = (verdict.kills, verdict.crashes, verdict.snapshots)
            counts = [before + more for before, more in zip(counts, each, strict=True)]
            moments = zip(verdict.schedule.faults, verdict.moments, strict=True)
            happened += [fault for fault, moment in moments if moment is not None]
        assert verdict == verdict_of(name, seed), "also where workers measure their steps"
    assert all(counts)
    # Single workers of groups lag, die, and lose each other.
    assert any(fault.what is FaultKind.LAG for fault in happened)
    assert any(fault.what is FaultKind.CUT and fault.peer >= 0 for fault in happened)
    assert any(fault.what is FaultKind.KILL and fault.index == 1 for fault in happened)
    for workers in (1, 2):
        clusters = [LAYOUTS[name].cluster for name in ISLANDS if LAYOUTS[name].cluster.nworkers_per_group >= workers]
        assert len({(each.quorum > 0, each.fragments > 1) for each in clusters}) == 4


def test_what_no_round_has_counted_is_read_again_in_the_epochs_behind() -> None:
    modes = set[str]()
    for name in ("islands of a quorum", "islands that wait", "islands of three", "islands of pairs that wait"):
        verdicts = [short_epochs(name, seed) for seed in seeds(12)]
        assert not any(verdict.wrong for verdict in verdicts), name
        assert sum(verdict.kills for verdict in verdicts), name
        modes |= {verdict.schedule.mode for verdict in verdicts}
    assert modes == {"lease", "static"}


@pytest.mark.parametrize("seed", [5726, 6014])
def test_an_epoch_is_not_over_in_a_snapshot_while_a_batch_of_it_does_not_count(seed: int) -> None:
    """A worker reads a lost batch of an epoch again, while others push batches of the next one."""
    verdict = verdict_of("islands of a quorum", seed)
    assert not verdict.wrong, verdict.wrong
    assert verdict.schedule.mode == "lease" and verdict.kills and verdict.crashes and verdict.snapshots >= 2


def test_a_batch_of_a_dead_worker_may_be_missing_in_a_fragment_and_in_no_other_case() -> None:
    job = LAYOUTS["islands"]
    trial = IslandTrial(job, 0, schedule_of(job, "islands", 0))
    trial.run()
    cells = trial.batches * trial.epochs
    trial.final = [torch.ones(cells) for _ in range(4)]
    assert trial.wrong() == []
    makers = [trial.worker_processes[worker] for worker in trial.workers]
    trial.final[1][0] = 0
    trial.made(0, makers[1])
    assert trial.wrong() == [(1, 0, 0.0)], "its maker has not died"


def test_blended_steps_are_no_ledger() -> None:
    """The simulation replaces settings by which a step counts as another number than 1."""
    job = LAYOUTS["islands that wait"]
    cluster = replace(job.cluster, keep=Keep.kBlend, blend=0.25, sync_freq=12, fragments=6, overlap=1)
    used = prepared(replace(job, cluster=cluster), "some.conf")
    assert (used.cluster.keep, used.cluster.blend, used.cluster.fragments) == (Keep.kAdd, 0.5, 4)
    assert not run_trial(used, "some.conf", 0, schedule_of(used, "some.conf", 0)).wrong
