"""Simulated workers with rounds of their own: what seeds find, and rules that are left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_schedule import Fault, FaultKind
from island_trial import IslandTrial, trains_alone
from pairwise import case_id
from seeded_runs import LAYOUTS, TrialVerdict, prepared, run_trial, schedule_of
from seeds import seeds
from soak_cases import soaked

from topotrain.config.job import Keep
from topotrain.core.protocol import StepDecision
from topotrain.core.server.step_execution import StepExecution
from topotrain.extensions.outer_optimizer.groups.group_optimizer import GroupOptimizer
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.extensions.outer_optimizer.local_values import LocalValues, TakeRule
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds
from topotrain.training.data.lease_queue import _Epoch
from topotrain.training.worker import Worker

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


# --- rules left out ----------------------------------------------------------------------------------------------


def sent_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The values at the push are not kept, so that steps made meanwhile are those of the exchange."""

    def take(
        self: TakeRule, own: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> None:
        for mine, new in zip(own, received, strict=True):
            mine.copy_(new)

    patch.setattr(TakeRule, "take", take)


def late_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """What was pushed to older values than those of now is added once more."""
    update = StepExecution._update

    def twice(self: StepExecution, steps: Sequence[Any]) -> None:
        update(self, steps)
        late = [step for step in steps if step.staleness]
        if late:
            for _ in self._applied(late):
                pass

    patch.setattr(StepExecution, "_update", twice)


def nobody_awaited(patch: pytest.MonkeyPatch) -> None:
    """A round without a quorum is over with the first push."""
    patch.setattr(OuterRounds, "updates", lambda self, steps: [(step,) for step in steps])


def other_members_on_a_shard(patch: pytest.MonkeyPatch) -> None:
    """The second shard makes the outer step without the last group of the round."""
    joint = OuterRounds.joint_gradient

    def fewer(self: OuterRounds, sources: Mapping[int, Any]) -> Any:
        if self._server.me.index:
            sources = {group: sources[group] for group in sorted(sources)[:-1]}
        return joint(self, sources)

    patch.setattr(OuterRounds, "joint_gradient", fewer)


def base_not_moved(patch: pytest.MonkeyPatch) -> None:
    """A worker subtracts its values from the first ones that it has received."""
    write = LocalValues._write_difference

    def from_the_first(self: LocalValues, fragments: Any) -> None:
        flats = self._buffers.flats
        kept = {space.index: flats.flat("params", space.index).clone() for space in self._spaces}
        for number in kept:
            flats.flat("params", number).zero_()
        write(self, fragments)
        for number, values in kept.items():
            flats.flat("params", number).copy_(values)

    patch.setattr(LocalValues, "_write_difference", from_the_first)


def shards_in_any_order(patch: pytest.MonkeyPatch) -> None:
    """A shard makes an update of each decided step, also of those that are one round."""
    carry_out = StepExecution.carry_out

    def alone(self: StepExecution, decisions: Sequence[StepDecision]) -> None:
        for decision in decisions[-1:] if self._state.me.index else decisions:
            carry_out(self, [decision])

    patch.setattr(StepExecution, "carry_out", alone)


def taken_by_each_worker_when_it_has_them(patch: pytest.MonkeyPatch) -> None:
    """A worker of a group does not ask whether the others have the new values, too."""
    patch.setattr(GroupOptimizer, "settles", InnerOptimizer.settles)


def pushed_by_each_worker(patch: pytest.MonkeyPatch) -> None:
    """Each worker of a group pushes the whole difference, and the servers add them up."""
    share = GroupReduction.pushed_share
    patch.setattr(GroupReduction, "pushed_share", lambda self: share(self) | {b.id for b in self._buckets})


def next_fragment_as_each_worker_knows_it(patch: pytest.MonkeyPatch) -> None:
    """A worker of a group pushes the fragment that the coordinator has named to itself."""
    patch.setattr(GroupOptimizer, "named", InnerOptimizer.named)


def means_of_others_left_out(patch: pytest.MonkeyPatch) -> None:
    """A worker takes the sums that it has made itself, and not those of the others of its group."""
    wait = GroupReduction.wait_means

    def waiting(self: GroupReduction) -> Any:
        means, written = wait(self)
        mine = {number for number, adder in enumerate(self._adder) if adder == self._me.index}
        return {number: each for number, each in means.items() if number in mine}, written

    patch.setattr(GroupReduction, "wait_means", waiting)


def state_not_held_back(patch: pytest.MonkeyPatch) -> None:
    """A worker saves the state of an epoch although batches of the one before do not count yet."""
    patch.setattr(Worker, "first_uncounted", lambda self, epoch: epoch)


def epoch_forgotten_when_read(patch: pytest.MonkeyPatch) -> None:
    """The leases of an epoch are forgotten when all of its batches have been read."""
    close = _Epoch.close

    def forget(self: _Epoch, groups: int) -> Any:
        self.tables.clear()
        return close(self, groups)

    patch.setattr(_Epoch, "close", forget)


MUTANTS = [
    (taken_by_each_worker_when_it_has_them, "islands of pairs"),
    (pushed_by_each_worker, "islands of pairs in step"),
    (next_fragment_as_each_worker_knows_it, "islands of pairs"),
    (means_of_others_left_out, "islands of pairs that wait"),
    (base_not_moved, "islands in step"),
    (sent_forgotten, "islands that wait"),
    (late_counted_twice, "islands"),
    (nobody_awaited, "islands in step"),
    (other_members_on_a_shard, "islands of a quorum"),
    (shards_in_any_order, "islands in step"),
    (state_not_held_back, "islands that wait"),
    (epoch_forgotten_when_read, "islands that wait"),
]


MORE = [
    (pushed_by_each_worker, "islands of three"),
    (base_not_moved, "islands of pairs"),
    (sent_forgotten, "islands of a quorum"),
    (other_members_on_a_shard, "islands of pairs in step"),
]


@pytest.mark.parametrize(("mutant", "name"), soaked(MUTANTS, MORE), ids=case_id)
def test_each_rule_of_rounds_is_needed(
    mutant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    run = short_epochs if "epoch" in str(mutant.__doc__) else verdict_of
    assert any(run(name, seed).wrong for seed in range(20)), "it makes no difference"


def test_blended_steps_are_no_ledger() -> None:
    """The simulation replaces settings by which a step counts as another number than 1."""
    job = LAYOUTS["islands that wait"]
    cluster = replace(job.cluster, keep=Keep.kBlend, blend=0.25, sync_freq=12, fragments=6, overlap=1)
    used = prepared(replace(job, cluster=cluster), "some.conf")
    assert (used.cluster.keep, used.cluster.blend, used.cluster.fragments) == (Keep.kAdd, 0.5, 4)
    assert not run_trial(used, "some.conf", 0, schedule_of(used, "some.conf", 0)).wrong
