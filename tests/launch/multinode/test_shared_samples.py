"""Samples of other units: the last of each kind and process once a second, and no queue for a leader that is away."""

from collections.abc import Iterable, Sequence

from topotrain.core.events import Event, Notice, Output, Resources, Started, StepDone, from_json, to_json
from topotrain.launch.multinode.shared_samples import INTERVAL_S, ReceivedSamples, SharedSamples


class Units:
    def __init__(self) -> None:
        self.leads, self.free = False, True
        self.sent: list[list[Event]] = []
        self.waiting: list[Event] = []

    def send_samples(self, lines: Sequence[str]) -> bool:
        if self.free:
            self.sent.append([from_json(line) for line in lines])
        return self.free

    def take_samples(self) -> Iterable[Event]:
        found, self.waiting = self.waiting, []
        return found


def step(number: int, who: str = "worker 0/1") -> StepDone:
    return StepDone(who, float(number), number, number, None, 0.0, 0, 0, 0)


def test_the_last_of_each_kind_is_sent_once_a_second() -> None:
    units, shown = Units(), []
    samples = SharedSamples(units, shown.append)
    for number in range(1, 41):
        samples.note(step(number))
        samples.note(step(number, "worker 0/2"))
        samples.note(Output("worker 0/1", "stdout", "x\n"))
        samples.note(Notice("worker 0/1", "words"))
        samples.poll(10 + number / 20)
    assert len(units.sent) == 2 / INTERVAL_S and not shown
    assert all(len(message) <= 2 for message in units.sent)
    memory = Resources("worker 0/1", 7, 1, 0.5)
    samples.note(memory)
    samples.poll(20.0)
    assert units.sent[-1] == [step(40), step(40, "worker 0/2"), memory]
    samples.poll(30.0)
    assert len(units.sent) == 3


def test_the_start_of_a_process_stays_before_its_first_step() -> None:
    units = Units()
    samples = SharedSamples(units, lambda event: None)
    for event in (step(9), Started("worker 0/1", 7), step(1)):
        samples.note(event)
    samples.poll(1.0)
    assert units.sent == [[Started("worker 0/1", 7), step(1)]]


def test_a_leader_that_is_away_costs_no_memory_and_gets_the_last_ones() -> None:
    units = Units()
    samples = SharedSamples(units, lambda event: None)
    units.free = False
    for number in range(1, 100):
        samples.note(step(number))
        samples.poll(float(number))
    units.free = True
    samples.poll(1000.0)
    assert units.sent == [[step(99)]]


def test_the_leader_shows_those_of_others_and_sends_none() -> None:
    units, shown = Units(), []
    units.leads, units.waiting = True, [step(1)]
    samples = SharedSamples(units, shown.append)
    samples.note(step(5, "worker 0/0"))
    samples.poll(1.0)
    assert (shown, units.sent) == ([step(1)], [])
    # It follows from here on. What it had to itself is of no use any more.
    units.leads = False
    samples.poll(10.0)
    assert units.sent == []


def test_what_is_no_sample_is_dropped() -> None:
    received = ReceivedSamples()
    received.add([to_json(Notice("unit 1", "words")), to_json(step(3))])
    assert list(received.take()) == [step(3)] and list(received.take()) == []
