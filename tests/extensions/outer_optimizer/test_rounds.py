"""Schedules, fragments and counts of one worker, and what is known of the rounds of a job."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process_job import cross_entropy, run_local, vectors
from island_jobs import building, job, script

from topotrain.config.job import Keep, Weigh
from topotrain.extensions.outer_optimizer.inner_optimizer import DifferencePath, InnerOptimizer
from topotrain.extensions.outer_optimizer.local_values import TakeRule
from topotrain.extensions.outer_optimizer.round_history import MOST_LISTED, RoundHistory
from topotrain.extensions.outer_optimizer.rounds import Learned, RoundSchedule, UntoldSteps, fragments_of


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60), data=st.data())
def test_every_parameter_is_in_a_fragment_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    found = fragments_of(sizes, count)
    assert set(found) == set(range(count))
    filled = [sum(size for size, its in zip(sizes, found, strict=True) if its == number) for number in range(count)]
    # What the largest one has more than the smallest is at most one parameter, the last that it got.
    assert max(filled) - min(filled) <= max(sizes)
    assert fragments_of(sizes, count) == found


@given(interval=st.integers(1, 9), fragments=st.integers(1, 6), data=st.data())
def test_each_fragment_is_exchanged_once_in_sync_freq_steps(interval: int, fragments: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, interval - 1))
    schedule = RoundSchedule(interval * fragments, fragments, overlap)
    pushed = [step for step in range(1, 3 * schedule.sync_freq + 1) if schedule.pushes(step)]
    assert len(pushed) == 3 * fragments
    # The new values come so many steps after the push, and before the next one.
    for step, following in pairwise(pushed):
        taken = [each for each in range(step, following) if schedule.takes(each)]
        assert taken == [step + overlap]


@given(
    fragments=st.integers(1, 4),
    events=st.lists(st.one_of(st.just("step"), st.integers(1, 8), st.just("push")), max_size=60),
)
def test_what_was_pushed_and_what_is_left_is_what_was_made(fragments: int, events: list[object]) -> None:
    untold, made, read, since, pushes = UntoldSteps(fragments), 0, 0, 0, 0
    told = [Learned()] * fragments
    for event in events:
        if event == "step":
            untold.step()
            made += 1
        elif event == "push":
            number, pushes, since = pushes % fragments, pushes + 1, 0
            part = untold.push(number)
            told[number] = Learned(told[number].steps + part.steps, told[number].samples + part.samples)
            assert untold[number] == Learned()
        elif isinstance(event, int):
            read, since = read + event, since + event
            untold.read(since)
        for number in range(fragments):
            left = untold[number]
            assert told[number].steps + left.steps == made
            assert told[number].samples + left.samples == read


def test_weights() -> None:
    assert Learned(10, 80).weight(Weigh.kSamples) == 640
    assert Learned(10, 80).weight(Weigh.kEqual) == 1
    assert Learned(10, 0).weight(Weigh.kSamples) == 10, "the script reads no loader of the job"
    assert Learned(0, 80).weight(Weigh.kSamples) == Learned(0, 80).weight(Weigh.kEqual) == 0, "nothing was learned"


# --- own values ------------------------------------------------------------------------------------------------------


def test_dropped_and_blended_steps() -> None:
    for keep, expected in ((Keep.kDrop, 10.0), (Keep.kBlend, 0.5 * 3 + 0.5 * 10)):
        own, sent, received = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([10.0])
        TakeRule(keep, 0.5).take([own], [sent], [received])
        assert own.item() == expected


# --- steps that are lost in an exchange: they count in no weight, and in the report ----------------------------------


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


CLUSTER = {"sync_freq": 6, "overlap": 2}


@pytest.mark.parametrize(
    ("cluster", "steps", "weights", "lost"),
    [
        # The last round has the steps that are left.
        ({**CLUSTER, "keep": Keep.kAdd}, 15, [6, 6, 3], 0.0),
        # Behind each push two steps are dropped, or have a share, and four or one stay.
        ({**CLUSTER, "keep": Keep.kDrop}, 15, [6, 4, 1], 4.0),
        ({**CLUSTER, "keep": Keep.kBlend, "blend": 0.25}, 15, [6, 4.5, 1.5], 3.0),
        # Fragments are pushed behind steps 3, 6, 9 and 12, each 6 steps after its last push, of which one is dropped.
        ({"sync_freq": 6, "overlap": 1, "fragments": 2, "keep": Keep.kDrop}, 12, [3, 6, 5, 5, 2], 3 / 2),
    ],
    ids=str,
)
def test_steps_that_are_lost_have_no_weight(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], steps: int, weights: list[float], lost: float
) -> None:
    """One worker with 12 samples in each step: a step weighs 12 * 12."""
    found: list[float] = []
    inner: list[InnerOptimizer] = []
    push = DifferencePath.at_step

    def at_step(self: Any, step: int, optimizer: int = 0) -> Any:
        found.append(self._inner.weight())
        inner[:] = [self._inner]
        return push(self, step, optimizer)

    monkeypatch.setattr(DifferencePath, "at_step", at_step)
    run_local(job(1, outer="mean", **cluster), building(), script(vectors(steps), 1))
    assert found == [144 * each for each in weights]
    assert inner[0].untold.dropped == lost


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

    run_local(job(1, outer="mean", **CLUSTER), building(), run)
    assert found == [1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert opened[0].unsure_steps == 0, "the rest is told at the end"


# --- what is known of the rounds of a job: how many, of which groups, and how old their pushes were ------------------


def test_a_late_group_is_as_old_as_the_rounds_that_it_has_missed() -> None:
    history = RoundHistory((0, 1, 2), (0,))
    for _ in range(3):
        history.add(0, (0, 1))
    history.add(0, (0, 2))
    assert history.age_max == 3, "its base were the first values"
    history.add(0, (0, 1))
    assert history.age_max == 3 and history.age_sum == 3 + 1
    assert history.members == {2: 5}


def test_a_group_that_came_later_has_no_age_at_first() -> None:
    history = RoundHistory((0, 1), (5,))
    history.add(0, (0,))
    history.forget(1)
    history.add(0, (0, 1))
    assert (history.ages, history.age_sum) == (2, 0)
    history.add(0, (0,))
    history.add(0, (1,))
    assert history.age_sum == 1 and history.made == [9]


def test_a_round_has_a_share_of_the_groups_that_there_are() -> None:
    history = RoundHistory(range(3), (0, 0))
    shares = [history.add(0, groups).share for groups in ((0,), (1,), (2,), (0, 1), (2,))]
    assert shares == [1 / 3, 1 / 3, 1 / 3, 2 / 3, 1 / 3], "one turn of all moves the values as far as a round of all"
    assert history.add(1, (0, 1, 2)).share == 1.0
    # Group 2 is slow.
    assert {history.add(0, (number % 2,)).share for number in range(20)} == {1 / 3}
    history.change(2, False)
    assert [history.add(0, groups).share for groups in ((1,), (0, 1))] == [1 / 2, 1.0]
    history.change(0, False)
    history.change(2, True)
    assert history.add(0, (1,)).share == 1 / 2
    assert history.add(0, (0,)).share == 1 / 3, "it came back before the start, without a decision"


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4), min_size=1)), max_size=150))
def test_each_round_is_counted_and_the_last_ones_are_listed(rounds: list[tuple[int, set[int]]]) -> None:
    history = RoundHistory(range(5), (0, 0, 0))
    made = [history.add(fragment, sorted(groups)) for fragment, groups in rounds]
    assert list(history.last) == made[-MOST_LISTED:]
    assert sum(history.members.values()) == len(rounds) == sum(history.made)
    assert history.ages == sum(len(groups) for _, groups in rounds)
    copy = RoundHistory((), (0,))
    copy.load_state_dict(history.state_dict())
    assert copy.state_dict() == history.state_dict()
