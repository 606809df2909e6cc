"""Groups of several workers with an outer optimizer: one replica, and the bits of a program in plain PyTorch."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process_job import Cnn, cross_entropy, images, mlp, run_hosted, run_local, share_of, vectors
from test_fragments import CASES, Islands
from test_fragments import expected as trained_by_hand
from test_group_quorum import STEPS, Cells, exact
from test_same_bits import adamw, assert_same_bits, building, expected, job, script
from torch import nn

from topotrain.config.job import Compression, Keep, Slicing, TransportChoice
from topotrain.core.client.client import JobError
from topotrain.extensions.outer_optimizer.groups.group_reduction import shares_of

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Case = tuple[int, int, int, Keep]


def mean_of(gradients: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
    """The sum in the order of the workers, divided by the samples."""
    if len(set(weights)) == 1:
        weights = [1] * len(gradients)
    else:
        gradients = [gradient * weight for gradient, weight in zip(gradients, weights, strict=True)]
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total / sum(weights)


class Groups(Islands):
    """Groups in one process: the gradient of a step is the mean of the workers' gradients."""

    workers = 2
    largest: float | None = None  # norm of a gradient

    def step(self, batches: Batches) -> None:
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            shares = [share_of(batch, index, self.workers) for index in range(self.workers)]
            found = [
                torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
                for (x, y), _ in shares
            ]
            for p, *each in zip(model.parameters(), *found, strict=True):
                p.grad = mean_of(each, [samples for _, samples in shares])
            if self.largest is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.largest)
            optimizer.step()


class Threes(Groups):
    workers = 3


class Clipped(Groups):
    largest = 0.05


def by_hand(case: Case, batches: Batches, groups: int = 2, make: type[Islands] = Groups) -> dict[str, torch.Tensor]:
    sync_freq, fragments, overlap, keep = case
    return trained_by_hand(batches, groups, sync_freq, fragments, overlap, keep, 0.25, make)


def pairs(case: Case, groups: int = 2, **more: Any) -> Any:
    """A job of some groups of two workers."""
    sync_freq, fragments, overlap, keep = case
    blend = {"blend": 0.25} if keep is Keep.kBlend else {}
    cluster = {"nworkers_per_group": 2} | more
    return job(groups, sync_freq, fragments=fragments, overlap=overlap, keep=keep, **blend, **cluster)


IN_STEP = (4, 1, 0, Keep.kAdd)


@pytest.mark.parametrize("steps", [17, 1])
@pytest.mark.parametrize("case", [IN_STEP, *CASES], ids=str)
def test_a_job_has_the_bits_of_a_program_in_plain_pytorch(case: Case, steps: int) -> None:
    batches = vectors(2 * steps)
    found = run_local(pairs(case), building(mlp, adamw), script(batches, 2))
    assert_same_bits(found.values, by_hand(case, batches))


@pytest.mark.parametrize(
    ("cluster", "groups", "make"),
    [
        ({"nservers_per_group": 3}, 2, Groups),
        ({"nservers_per_group": 2, "slicing": Slicing.kTensor}, 2, Groups),
        ({"nworkers_per_group": 3, "nservers_per_group": 2}, 2, Threes),
        ({"nservers_per_group": 2, "server_worker_separate": False}, 1, Groups),
        ({}, 3, Groups),
    ],
    ids=str,
)
def test_the_layout_changes_no_bit(cluster: dict[str, Any], groups: int, make: type[Islands]) -> None:
    batches = vectors(groups * 11)
    found = run_local(pairs((4, 2, 1, Keep.kAdd), groups, **cluster), building(mlp, adamw), script(batches, groups))
    assert_same_bits(found.values, by_hand((4, 2, 1, Keep.kAdd), batches, groups, make))


@pytest.mark.parametrize(
    ("transport", "case"), [(TransportChoice.kShm, IN_STEP), (TransportChoice.kTcp, CASES[1])], ids=str
)
def test_the_transport_changes_no_bit(transport: TransportChoice, case: Case, tmp_path: Path) -> None:
    batches = vectors(2 * 9)
    wanted = pairs(case, transport=transport, nservers_per_group=2)
    found = run_hosted(wanted, building(mlp, adamw), script(batches, 2), tmp_path)
    assert_same_bits(found.values, by_hand(case, batches))


def test_parts_of_unequal_size_are_weighed_by_their_samples() -> None:
    batches = vectors(2 * 9, size=11)
    found = run_local(pairs(IN_STEP), building(mlp, adamw), script(batches, 2))
    assert_same_bits(found.values, by_hand(IN_STEP, batches))


def test_the_script_clips_the_mean_of_its_group() -> None:
    batches = vectors(2 * 9)

    def run(t: Any) -> None:
        for batch in batches[t.me.group :: 2]:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), Clipped.largest)
            t.optimizer.step()

    found = run_local(pairs(IN_STEP), building(mlp, adamw), run)
    assert_same_bits(found.values, by_hand(IN_STEP, batches, make=Clipped))


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

    found = run_local(pairs((2, 1, 0, Keep.kAdd)), building(mlp, adamw), run)
    torch.manual_seed(1)
    groups = Groups(2, 1, "nesterov", Keep.kAdd, 0.5)
    for first in range(0, len(batches), 4):
        for group, (model, optimizer) in enumerate(zip(groups.models, groups.optimizers, strict=True)):
            optimizer.zero_grad()
            for batch in batches[first + group : first + 4 : 2]:
                shares = [share_of(batch, index, 2)[0] for index in range(2)]
                found_here = [
                    torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
                    for x, y in shares
                ]
                for p, *each in zip(model.parameters(), *found_here, strict=True):
                    mean = mean_of(each, [1, 1])
                    p.grad = mean if p.grad is None else p.grad + mean
            optimizer.step()
        if first % 8 == 4:
            groups.push()
            groups.take(False)
    assert_same_bits(found.values, dict(groups.agreed.named_parameters()))


def test_a_parameter_of_which_one_worker_has_a_gradient() -> None:
    """Its mean is over both, and both make its step."""
    batches = vectors(8)

    def run(t: Any) -> None:
        for x, y in batches:
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, x, y)
            t.backward([loss if t.me.index else t.model[2](torch.ones(3, 25)).sum() + 0 * loss.detach()])
            t.optimizer.step()
            assert all(p.grad is not None for p in t.model.parameters())

    found = run_local(pairs(IN_STEP, 1), building(mlp, adamw), run)
    first, second = (dict(handle.model.named_parameters()) for handle in found.workers)
    assert_same_bits(first, second)
    torch.manual_seed(1)
    assert not torch.equal(found.values["0.weight"], mlp().state_dict()["0.weight"])


def test_batch_norm_has_buffers_of_each_worker_as_in_any_group() -> None:
    batches = images(2 * 6)
    found = run_local(pairs(IN_STEP), building(Cnn, adamw), script(batches, 2))
    assert all(bool(torch.isfinite(value.double()).all()) for value in found.values.values())
    means = [handle.model.norm.running_mean for handle in found.workers]
    assert not torch.equal(means[0], means[1]), "each worker sees its part of the batch"


def test_groups_are_weighed_by_the_samples_of_all_their_workers() -> None:
    """Batches of 24 and of 12: the first group has four times the weight of the second."""
    rounds, steps = 2, 3
    large, small = vectors(rounds * steps, size=24), vectors(rounds * steps, size=12, seed=5)

    def run(t: Any) -> None:
        for batch in (large, small)[t.me.group]:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    found = run_local(pairs((steps, 1, 0, Keep.kAdd)), building(mlp, adamw), run)

    class Weighed(Groups):
        @torch.no_grad()
        def push(self, last: bool = False) -> None:
            own = [list(model.parameters()) for model in self.models]
            weights = [(steps * size) ** 2 / steps for size in (24, 12)]
            self.sent = own
            for i, agreed in enumerate(self.agreed.parameters()):
                first, second = (agreed - mine[i] for mine in own)
                agreed.grad = (first * weights[0] + second * weights[1]) / sum(weights)
            self.outer[0].step()

    groups = Weighed(2, 1, "nesterov", Keep.kAdd, 0.5)
    for number in range(rounds * steps):
        groups.step([large[number], small[number]])
        if number % steps == steps - 1:
            groups.push()
            groups.take(False)
    for name, value in groups.agreed.named_parameters():
        torch.testing.assert_close(found.values[name], value, rtol=1e-6, atol=1e-7)


# --- a quorum --------------------------------------------------------------------------------------------------------


class Watched:
    """Each group's script, which keeps the values of each worker behind each step."""

    def __init__(self, late: float = 0.0) -> None:
        self.seen: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
        self.lock = threading.Lock()

    def __call__(self, t: Any) -> None:
        kept = self.seen[t.me.group, t.me.index] = []
        for step in range(STEPS):
            t.optimizer.zero_grad()
            cell = t.me.group * STEPS + step
            # Both workers of the group have a sample: each adds a half.
            t.backward(t.losses(lambda model, _, cell=cell: 0.5 * model(cell), torch.zeros(2)))
            t.optimizer.step()
            kept.append([p.detach().clone() for p in t.model.cells.parameters()])

    def assert_alike(self) -> None:
        for (group, index), steps in self.seen.items():
            for number, (mine, first) in enumerate(zip(steps, self.seen[group, 0], strict=True)):
                assert all(map(torch.equal, mine, first)), (group, index, number)


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("quorum", [0, 1, 2, 3])
def test_each_step_of_a_group_counts_once_and_its_workers_take_the_same_values(quorum: int, fragments: int) -> None:
    """Values arrive at each worker at another time, and are taken behind the same step."""
    watched = Watched()
    wanted = exact(sync_freq=4, fragments=fragments, quorum=quorum, nworkers_per_group=2)
    found = run_local(wanted, lambda: (model := Cells(), torch.optim.SGD(model.parameters(), lr=1.0)), watched)
    assert all(bool((value == 1).all()) for value in found.values.values()), found.values
    watched.assert_alike()


def test_values_that_arrive_late_at_one_worker_are_taken_by_both_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 says for some steps that nothing has arrived."""
    watched, asked = Watched(), {0: 0, 1: 0}
    wanted = exact(sync_freq=2, quorum=1, nworkers_per_group=2)

    def run(t: Any) -> None:
        is_over = t.exchange.steps.is_over

        def delayed() -> bool:
            found = is_over()
            asked[t.me.index] += 1
            return found and (t.me.index == 0 or asked[1] % 5 == 0)

        monkeypatch.setattr(t.exchange.steps, "is_over", delayed)
        watched(t)

    found = run_local(wanted, lambda: (model := Cells(), torch.optim.SGD(model.parameters(), lr=1.0)), run)
    assert all(bool((value == 1).all()) for value in found.values.values()), found.values
    watched.assert_alike()


# --- gradients that are not finite, and scripts that differ -----------------------------------------------------------


def test_a_gradient_that_is_not_finite_in_one_worker_is_left_out_by_all_of_the_group() -> None:
    batches, sick = vectors(8), 3

    def run(t: Any) -> None:
        for number, batch in enumerate(batches):
            t.optimizer.zero_grad()
            bad = number == sick and t.me.index == 1
            t.backward([loss * (float("nan") if bad else 1.0) for loss in t.losses(cross_entropy, *batch)])
            t.optimizer.step()

    found = run_local(pairs((2, 1, 0, Keep.kAdd), 1, outer="mean"), building(mlp, adamw), run)
    skips = [handle.worker.tally.take_skips() for handle in found.workers]
    assert [[(skip.step, skip.by) for skip in mine] for mine in skips] == [[(4, "")], [(4, "worker 0/1")]]
    groups = Groups(1, 1, "mean", Keep.kAdd, 0.5)
    for number, batch in enumerate(batches):
        if number != sick:
            groups.step([batch])
    for name, value in groups.models[0].named_parameters():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=1e-6)


def test_a_scaler_takes_the_same_decisions_on_all_workers_of_a_group() -> None:
    batches, scales, values = vectors(8), {}, {}

    def run(t: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for number, batch in enumerate(batches):
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, *batch)
            if number == 2 and t.me.index == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(t.optimizer)
            scaler.update()
        scales[t.me.index] = scaler.get_scale()
        values[t.me.index] = {name: p.detach().clone() for name, p in t.model.named_parameters()}

    run_local(pairs(IN_STEP, 1), building(mlp, adamw), run)
    assert scales[0] == scales[1] == 1024.0 / 2 * 2, scales
    assert_same_bits(values[0], values[1])


@pytest.mark.parametrize(
    ("sync_freq", "change", "words"),
    [
        (8, "less", "unequal numbers of backwards in one step: worker"),
        (4, "less", "unequal numbers of backwards in one step: worker 1 of the group made 4 steps with 3 backwards"),
        (8, "more", "unequal numbers of backwards in one step: worker"),
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
        run_local(pairs((sync_freq, 1, 0, Keep.kAdd), 1), building(mlp, adamw), run)


@pytest.mark.parametrize("kind", [Compression.kInt8, Compression.kE3M0])
def test_compression_is_between_a_group_and_the_servers_only(kind: Compression) -> None:
    batches, case = vectors(2 * 40), (4, 2, 1, Keep.kAdd)
    exactly = run_local(pairs(case, outer="mean"), building(mlp, adamw), script(batches, 2))
    short = run_local(pairs(case, outer="mean", compression=kind), building(mlp, adamw), script(batches, 2))
    assert short.distance(exactly) < 0.02
    handles = [handle for handle in short.workers if handle.me.group == 1]
    first, second = (dict(handle.model.named_parameters()) for handle in handles)
    assert_same_bits(first, second)


def test_one_group_of_one_worker_is_as_before() -> None:
    batches = vectors(2 * 9)
    found = run_local(job(2), building(mlp, adamw), script(batches, 2))
    assert_same_bits(found.values, expected(batches, 2, 4))


# --- shares ----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 1000), max_size=60), workers=st.integers(1, 9))
def test_shares_are_consecutive_and_about_equal(sizes: list[int], workers: int) -> None:
    found = shares_of(sizes, workers)
    assert list(found) == sorted(found) and all(0 <= worker < workers for worker in found)
    for worker in range(workers):
        mine = sum(size for size, its in zip(sizes, found, strict=True) if its == worker)
        assert mine <= sum(sizes) / workers + max(sizes, default=0)


def test_each_bucket_is_pushed_once() -> None:
    """Three workers of a group, and fragments with fewer buckets than workers."""
    pushed: dict[int, frozenset[int]] = {}

    def run(t: Any) -> None:
        pushed[t.me.index] = t.notes["inner"]._group.pushed_share()
        script(vectors(4), 1)(t)

    found = run_local(pairs((4, 4, 0, Keep.kAdd), 1, nworkers_per_group=3), building(mlp, adamw), run)
    everything = sorted(number for share in pushed.values() for number in share)
    assert everything == list(range(len(found.workers[0].worker.map.buckets)))
