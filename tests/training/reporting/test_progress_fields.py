"""What `StepDone` and `Finished` say besides the step: waits, staleness, epoch, progress."""

from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process_job import mlp, sgd
from script_job import job as job
from script_job import loader, train

import topotrain as tt
from topotrain.core.events import Finished, ServerLoad, StepDone, Traffic
from topotrain.training.data.job_progress import EpochProgress, StepProgress
from topotrain.training.worker_stats import RECENT_S, RecentStaleness, StalenessCounts


def trained(job):
    here, model = job(), mlp()
    model, optimizer, batches = tt.prepare(model, sgd(model), loader())
    train(model, optimizer, batches)
    here.finish()
    return here


def test_a_loop_over_epochs_has_an_epoch_and_a_share_and_the_bytes_to_each_server(job) -> None:
    here = trained(job)
    steps, (done,) = here.heard(StepDone), here.heard(Finished)
    assert (steps[0].epoch, steps[0].progress, done.epoch, done.progress) == (0, 0.1, 1, 1.0)
    assert 0 < done.waited_s < 60 and done.staleness_p95 == 0.0
    # What was waited before the first step is not counted.
    assert steps[0].waited_s <= steps[0].time + 10
    # A sample has the recent staleness, and the end the whole.
    last = steps[-1]
    assert last.recent == (0.0, 0.0, 0.0)
    assert (last.staleness_mean, last.staleness_max) == (done.staleness_mean, done.staleness_max)
    assert here.heard(Traffic)[-1] == Traffic("worker 0/0", {"server 0/0": done.bytes_out})
    # The server is in another process of the job, as far as this worker knows.
    assert not here.heard(ServerLoad)


def test_of_another_loop_both_are_unknown(job) -> None:
    here, model = job(), mlp()
    model, optimizer, batches = tt.prepare(model, sgd(model), loader())
    for x, y in batches:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    here.finish()
    (done,) = here.heard(Finished)
    assert (done.epoch, done.progress) == (-1, -1.0)


class Reread:
    """Passes in which a batch is given a second time."""

    def __init__(self) -> None:
        self.share = 0.0

    def position(self) -> int:
        return 0

    def share_since(self, position: int) -> float:
        return self.share


def test_an_estimate_changes_no_share_of_the_script() -> None:
    loop, passes = EpochProgress(2), Reread()
    loop.begin(1, passes)
    passes.share = 0.5
    assert loop.estimate() == 0.75 and loop.epoch == 1
    passes.share = 0.25
    assert loop.share() == 0.625
    loop.begin(1, None)
    assert loop.estimate() == -1.0
    loop.end()
    assert (loop.estimate(), loop.epoch) == (1.0, 1)
    steps = StepProgress(10)
    steps.begin(5)
    assert (steps.estimate(), steps.epoch) == (0.5, -1)


# --- the counts of staleness -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 80) | st.integers(0, 1 << 40), max_size=60), st.integers(1, 4))
def test_a_share_of_the_staleness_is_exact_below_64_and_else_rounded_up_to_a_power_of_two(values, parts):
    """Also where the counts of several workers are added."""
    whole, added = StalenessCounts(), StalenessCounts()
    whole.add(values)
    for part in range(parts):
        counts = StalenessCounts()
        counts.add(values[part::parts])
        added.add_counts(counts)
    bounds = sorted(value if value < 64 else 1 << (value - 1).bit_length() for value in values)
    for share in (0.25, 0.5, 0.75, 0.95, 1.0):
        expected = bounds[ceil(share * len(bounds)) - 1] if bounds else 0.0
        assert whole.at_most(share) == added.at_most(share) == expected
    assert (added.mean, added.most, added.is_empty) == (whole.mean, whole.most, not values)


def test_the_recent_staleness_forgets_what_is_old() -> None:
    recent = RecentStaleness()
    assert recent.report(0.0).is_empty
    recent.add([9, 1])
    first = recent.report(1.0)
    assert (first.mean, first.at_most(0.95), first.most) == (5.0, 9.0, 9)
    recent.add([2] * 6)
    both = recent.report(2.0)
    assert (both.mean, both.most) == (22 / 8, 9)
    assert recent.report(1.0 + RECENT_S).most == 2
    # Without any update for long, the last ones are still the newest.
    assert recent.report(1000.0).most == 2
    recent.add([3, 100])
    last = recent.report(1001.0)
    assert (last.mean, last.at_most(0.95), last.most) == (51.5, 128.0, 100)
