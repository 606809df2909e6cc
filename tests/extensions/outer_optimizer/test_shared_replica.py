"""Groups of several workers with an outer optimizer: one replica, whatever the script does with the gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process_job import cross_entropy, run_local, vectors
from island_jobs import Islands, assert_near, assert_same_bits, building, job, script

from topotrain.core.client.client import JobError
from topotrain.extensions.outer_optimizer.groups.group_reduction import shares_of


def pairs(groups: int = 2, sync_freq: int = 4, **cluster: Any) -> Any:
    return job(groups, sync_freq, **({"nworkers_per_group": 2} | cluster))


def of_group(result: Any, group: int) -> list[dict[str, torch.Tensor]]:
    """The parameters of each worker of a group."""
    return [dict(handle.model.named_parameters()) for handle in result.workers if handle.me.group == group]


def test_the_script_clips_the_mean_of_its_group() -> None:
    islands, batches = Islands(2, workers=2, largest=0.05), vectors(2 * 9)

    def clip(t: Any) -> None:
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.05)

    found = run_local(pairs(), building(), script(batches, 2, clip))
    assert_same_bits(found.values, islands.train(batches))


def test_several_backwards_of_a_step_add_up_and_a_private_one_stays_here() -> None:
    batches = vectors(2 * 8)

    def run(t: Any) -> None:
        for number, batch in enumerate(batches[t.me.group :: 2]):
            if number % 2 == 0:
                with t.local():
                    t.backward([loss * 7 for loss in t.losses(cross_entropy, *batch)])
                t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            if number % 2 == 1:
                t.optimizer.step()

    found = run_local(pairs(2, 2), building(), run)
    islands = Islands(2, workers=2)
    for number, first in enumerate(range(0, len(batches), 4)):
        islands.add_gradients(batches[first : first + 2])
        islands.step(batches[first + 2 : first + 4])
        if number % 2:
            islands.push()
            islands.take()
    assert_same_bits(found.values, islands.values)


def test_a_parameter_of_which_one_worker_has_a_gradient() -> None:
    """Its mean is over both, and both make its step."""

    def run(t: Any) -> None:
        for x, y in vectors(8):
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, x, y)
            t.backward([loss if t.me.index else t.model[2](torch.ones(3, 25)).sum() + 0 * loss.detach()])
            t.optimizer.step()
            assert all(p.grad is not None for p in t.model.parameters())

    found = run_local(pairs(1), building(), run)
    assert_same_bits(*of_group(found, 0))
    assert not torch.equal(found.values["0.weight"], Islands().values["0.weight"])


def test_groups_are_weighed_by_the_samples_of_all_their_workers() -> None:
    """Batches of 24 and of 12: the first group has four times the weight of the second."""
    large, small = vectors(6, size=24), vectors(6, size=12, seed=5)
    batches = [batch for both in zip(large, small, strict=True) for batch in both]
    found = run_local(pairs(2, 3), building(), script(batches, 2))
    islands = Islands(2, 3, workers=2, weights=[(3 * size) ** 2 / 3 for size in (24, 12)])
    assert_near(found.values, islands.train(batches), 1e-6, 1e-7)


# --- gradients that are not finite, and scripts that differ -----------------------------------------------------------


def test_a_gradient_that_is_not_finite_in_one_worker_is_left_out_by_all_of_the_group() -> None:
    batches, sick = vectors(8), 3

    def run(t: Any) -> None:
        for number, batch in enumerate(batches):
            t.optimizer.zero_grad()
            bad = number == sick and t.me.index == 1
            t.backward([loss * (float("nan") if bad else 1.0) for loss in t.losses(cross_entropy, *batch)])
            t.optimizer.step()

    found = run_local(pairs(1, 2, outer="mean"), building(), run)
    skips = [handle.worker.tally.take_skips() for handle in found.workers]
    assert [[(skip.step, skip.by) for skip in mine] for mine in skips] == [[(4, "")], [(4, "worker 0/1")]]
    islands = Islands(1, 2, outer="mean", workers=2)
    islands.train(batches[:sick] + batches[sick + 1 :])
    assert_near(found.values, {name: p.detach() for name, p in islands.models[0].named_parameters()})


def test_a_scaler_takes_the_same_decisions_on_all_workers_of_a_group() -> None:
    scales: dict[int, float] = {}

    def run(t: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for number, batch in enumerate(vectors(8)):
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, *batch)
            if number == 2 and t.me.index == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(t.optimizer)
            scaler.update()
        scales[t.me.index] = scaler.get_scale()

    found = run_local(pairs(1), building(), run)
    assert scales[0] == scales[1] == 1024.0 / 2 * 2, scales
    assert_same_bits(*of_group(found, 0))


@pytest.mark.parametrize(
    ("sync_freq", "change", "words"),
    [
        (8, "less", "unequal numbers of backwards in one step: worker"),
        (4, "less", "unequal numbers of backwards in one step: worker 1 of the group made 4 steps with 3 backwards"),
        (4, "more", "unequal numbers of backwards in one step: worker"),
        (100, "skip", r"workers \d and \d of a group take different batches into step 4: .*tt\.weight\(0\)"),
        (100, "noise", r"workers \d and \d of a group disagree about what the script made of the gradients in step 4"),
        (100, "own", r"workers \d and \d of a group disagree about what the script made .*tt\.clip_grad_norm_"),
        (100, "end", "worker 1 ended its script after 3 steps while others of its group go on"),
    ],
)
def test_scripts_that_differ_are_told_so(sync_freq: int, change: str, words: str) -> None:
    batches, exchanges = vectors(8), {}

    def train(t: Any) -> None:
        for number, batch in enumerate(batches):
            here = t.me.index == 1 and number == 3
            if here and change == "end":
                t.notes["inner"].leave()
                return
            t.optimizer.zero_grad()
            losses = t.losses(cross_entropy, *batch)
            if here and change == "skip":
                continue
            if change == "own":
                for p, g in zip(t.model.parameters(), torch.autograd.grad(losses, list(t.model.parameters()))):
                    p.grad = g.mul_(0.5)
            elif not (here and change == "less"):
                t.backward(losses)
            if here and change == "more":
                t.backward(t.losses(cross_entropy, *batch))
            if here and change == "noise":
                t.model[2].bias.grad.add_(1e-3)
            t.optimizer.step()

    def run(t: Any) -> None:
        exchanges[t.me.index] = t.exchange
        try:
            train(t)
        except JobError:
            # The other worker waits for the servers, which end the job.
            exchanges[1 - t.me.index].lost(t.exchange.channel.servers[0], "the job has failed")
            raise

    with pytest.raises(JobError, match=words):
        run_local(pairs(1, sync_freq), building(), run)


# --- shares ----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 1000), max_size=60), workers=st.integers(1, 9))
def test_shares_are_consecutive_and_about_equal(sizes: list[int], workers: int) -> None:
    found = shares_of(sizes, workers)
    assert list(found) == sorted(found) and all(0 <= worker < workers for worker in found)
    for worker in range(workers):
        mine = sum(size for size, its in zip(sizes, found, strict=True) if its == worker)
        assert mine <= sum(sizes) / workers + max(sizes, default=0)
