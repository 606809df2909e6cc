"""Steps that are lost in an exchange: they count in no weight, and in the report."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process_job import cross_entropy, mlp, run_local, vectors
from test_same_bits import adamw, building, job, script

from topotrain.config.job import Keep, Weigh
from topotrain.extensions.outer_optimizer.inner_optimizer import DifferencePath, InnerOptimizer
from topotrain.extensions.outer_optimizer.rounds import Learned, UntoldSteps


@given(
    fragments=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    events=st.lists(st.one_of(st.just("step"), st.just("push"), st.just("take")), max_size=60),
)
def test_each_step_is_told_or_here_or_lost(fragments: int, share: float, events: list[str]) -> None:
    untold, pushes, told = UntoldSteps(fragments), 0, 0.0
    for event in events:
        if event == "step":
            untold.step()
        elif event == "take":
            untold.keep(pushes % fragments, share)
        else:
            told += untold.push(pushes % fragments).steps / fragments
            pushes += 1
        assert told + untold.pending_steps + untold.dropped == pytest.approx(untold.made)


def test_samples_are_lost_with_their_steps() -> None:
    untold = UntoldSteps(2)
    for read in (8, 16):
        untold.step()
        untold.read(read)
    untold.keep(0, 0.25)
    assert untold[0] == Learned(0.5, 4) and untold[1] == Learned(2, 16)
    assert untold[0].weight(Weigh.kSamples) == 0.25 * untold[1].weight(Weigh.kSamples)
    untold.read(16)
    assert untold[0].samples == 4, "the samples of these steps were read before"
    untold.keep(1, 0.0)
    assert untold[1].weight(Weigh.kSamples) == 0 == untold[1].weight(Weigh.kEqual)
    assert untold.dropped == (1.5 + 2) / 2


def weights_of(monkeypatch: pytest.MonkeyPatch, keep: Keep, steps: int, **cluster: Any) -> tuple[list[float], float]:
    """The weights of one worker's pushes, of steps with 12 samples each, and its lost steps."""
    found: list[float] = []
    inner: list[InnerOptimizer] = []
    push = DifferencePath.at_step

    def at_step(self: Any, step: int, optimizer: int = 0) -> Any:
        found.append(self._inner.weight())
        inner[:] = [self._inner]
        return push(self, step, optimizer)

    monkeypatch.setattr(DifferencePath, "at_step", at_step)
    run_local(job(1, outer="mean", keep=keep, **cluster), building(mlp, adamw), script(vectors(steps), 1))
    return found, inner[0].untold.dropped


CLUSTER = {"sync_freq": 6, "overlap": 2}


def test_all_steps_count_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 samples a step: 12 * 12 for each step. The third round has the 3 steps that are left."""
    assert weights_of(monkeypatch, Keep.kAdd, 15, **CLUSTER) == ([6 * 144, 6 * 144, 3 * 144], 0.0)


def test_dropped_steps_have_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each push two steps are dropped, and four or one stay."""
    assert weights_of(monkeypatch, Keep.kDrop, 15, **CLUSTER) == ([6 * 144, 4 * 144, 1 * 144], 4.0)


def test_blended_steps_have_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    blended = weights_of(monkeypatch, Keep.kBlend, 15, blend=0.25, **CLUSTER)
    assert blended == ([6 * 144, 4.5 * 144, 1.5 * 144], 3.0)


def test_steps_of_a_push_count_as_lost_with_their_worker_until_its_round_is_known_to_be_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New values are taken two steps behind each push."""
    opened: list[InnerOptimizer] = []
    open_inner = InnerOptimizer.open

    def note(self: InnerOptimizer, *arguments: Any) -> Any:
        opened.append(self)
        return open_inner(self, *arguments)

    monkeypatch.setattr(InnerOptimizer, "open", note)
    found = []

    def run(t: Any) -> None:
        for batch in vectors(9):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()
            found.append(opened[0].unsure_steps)

    run_local(job(1, outer="mean", **CLUSTER), building(mlp, adamw), run)
    assert found == [1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert opened[0].unsure_steps == 0, "the rest is told at the end"


def test_in_fragments_a_step_is_lost_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments are pushed behind steps 3, 6, 9 and 12, each 6 steps after its last push, of which one is dropped."""
    weights, dropped = weights_of(monkeypatch, Keep.kDrop, 12, sync_freq=6, fragments=2, overlap=1)
    assert weights == [3 * 144, 6 * 144, 5 * 144, 5 * 144, 2 * 144]
    assert dropped == 3 / 2
