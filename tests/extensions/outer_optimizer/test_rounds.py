"""Schedules, fragments and counts of one worker, and its own values under any order of pushes and received values."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process_job import mlp
from test_same_bits import OUTER, adamw

from topotrain.config.job import Cluster, Keep, Weigh
from topotrain.config.sharding import cut
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.extensions.outer_optimizer.local_values import LocalValues, TakeRule
from topotrain.extensions.outer_optimizer.rounds import Learned, RoundSchedule, UntoldSteps, fragments_of
from topotrain.training.parameters.flat_parameters import ModelBuffers, describe_model


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60), data=st.data())
def test_every_parameter_is_in_a_fragment_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    found = fragments_of(sizes, count)
    assert set(found) == set(range(count))
    filled = [sum(size for size, its in zip(sizes, found, strict=True) if its == number) for number in range(count)]
    # What the largest one has more than the smallest is at most one parameter, the last that it got.
    assert max(filled) - min(filled) <= max(sizes)
    assert fragments_of(sizes, count) == found


def test_equal_parameters_are_dealt_out_in_turn() -> None:
    assert fragments_of([8] * 7, 3) == (0, 1, 2, 0, 1, 2, 0)


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


class Values:
    """The own values of a worker, with whole numbers in place of what it learns."""

    def __init__(self, fragments: int, overlaps: bool, keep: Keep = Keep.kAdd) -> None:
        self.model = mlp()
        cluster = Cluster(sync_freq=fragments, fragments=fragments, outer=OUTER["mean"][0])
        inner = InnerOptimizer(adamw(self.model.parameters()), cluster, self.model.named_parameters())
        self.parts = describe_model(self.model, (), inner.optimizers)
        self.map = cut(self.parts.parameters, 2, 1)
        flats = FlatBuffers(self.map, None, PrivateMemory())
        self.buffers = ModelBuffers(self.parts, self.map, flats, True)
        self.buffers.move_model()
        rule = TakeRule(keep) if overlaps else None
        self.values = LocalValues(self.parts.tensors, self.buffers, self.map, rule)
        # Of each parameter: what was learned in all, and what the received values contain of it and of others.
        self.learned = [0] * len(self.parts.tensors)
        self.counted = [0] * len(self.parts.tensors)
        self.others = [0] * len(self.parts.tensors)

    def members(self, fragment: int) -> list[int]:
        return [i for i, parameter in enumerate(self.parts.parameters) if parameter.optimizer == fragment]

    def learn(self, by: int) -> None:
        with torch.no_grad():
            for index, tensor in enumerate(self.parts.tensors):
                tensor.grad = torch.ones_like(tensor)
                tensor.add_(by)
                self.learned[index] += by
        self.values.learn()

    def push(self, fragment: int) -> None:
        self.values.push(fragment)
        for index in self.members(fragment):
            told = -self.buffers.view("local", index)
            assert (told == self.learned[index] - self.counted[index]).all(), "pushed once, and whole"

    def receive(self, fragments: list[int], others: int, counts: bool) -> None:
        for index in (index for fragment in fragments for index in self.members(fragment)):
            self.others[index] += others
            if counts:
                self.counted[index] = self.sent[index]
            self.buffers.view("params", index).fill_(self.counted[index] + self.others[index])

    def exchange(self, fragment: int, others: int, meanwhile: int) -> None:
        """Push a fragment, learn more before the new values come, and take them."""
        self.sent = list(self.learned)
        self.push(fragment)
        self.values.before_values()
        self.values.end_push()
        if meanwhile:
            self.learn(meanwhile)
        self.receive([fragment], others, True)
        self.values.after_values()

    def fetch(self, others: int) -> None:
        """Ask for all values between two rounds."""
        self.values.before_values()
        self.receive(list(range(1 + max(p.optimizer for p in self.parts.parameters))), others, False)
        self.values.after_values()

    def check(self) -> None:
        """Own value = received value + what was learned and the received value does not contain."""
        for index, tensor in enumerate(self.parts.tensors):
            received = self.buffers.view("params", index)
            assert (received == self.counted[index] + self.others[index]).all()
            assert (tensor.detach() == received + self.learned[index] - self.counted[index]).all()


EVENTS = st.one_of(
    st.tuples(st.just("learn"), st.integers(-4, 4)),
    st.tuples(st.just("exchange"), st.integers(-4, 4), st.integers(-4, 4)),
    st.tuples(st.just("fetch"), st.integers(-4, 4)),
)


@pytest.mark.parametrize("overlaps", [False, True])
@given(fragments=st.integers(1, 3), events=st.lists(EVENTS, max_size=20))
def test_an_own_value_is_the_received_one_and_what_it_does_not_contain(
    overlaps: bool, fragments: int, events: list[tuple[str, ...]]
) -> None:
    worker, rounds = Values(fragments, overlaps), 0
    for kind, *numbers in events:
        if kind == "learn":
            worker.learn(int(numbers[0]))
        elif kind == "fetch":
            worker.fetch(int(numbers[0]))
        else:
            worker.exchange(rounds % fragments, int(numbers[0]), int(numbers[1]) if overlaps else 0)
            rounds += 1
        worker.check()


def test_dropped_and_blended_steps() -> None:
    for keep, expected in ((Keep.kDrop, 10.0), (Keep.kBlend, 0.5 * 3 + 0.5 * 10)):
        own, sent, received = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([10.0])
        TakeRule(keep, 0.5).take([own], [sent], [received])
        assert own.item() == expected
