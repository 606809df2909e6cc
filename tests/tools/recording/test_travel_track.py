"""Messages of a slowed job in the history: bounded, with their sentences, and only new ones in a delta."""

import pytest

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.core.events import Started, Traveled
from topotrain.extensions.slow_deliveries.explanations import Explanations
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.job_start import JobStart
from topotrain.tools.recording.recorded_lines import RecordingHeader, TimedEvent
from topotrain.tools.recording.travel_track import MOST_TRAVELS

TOPOLOGY = layout(Cluster(nworker_groups=2, server_worker_separate=True))
HEADER = JobStart(Job(name="digits", program="train.py"), TOPOLOGY, 1000.0).header


def push(step: int) -> Traveled:
    return Traveled("worker 0/0", "server 0/0", "push", step, 2)


def history(header: RecordingHeader = HEADER) -> JobHistory:
    made = JobHistory()
    made.add(TimedEvent(0.0, header))
    return made


def test_a_message_has_its_sentence_in_the_view() -> None:
    made = history()
    made.add(TimedEvent(1.25, push(3)))
    sentence = Explanations.of(TOPOLOGY).sentence(push(3))
    assert "stale" in sentence
    assert made.view()["travels"] == [[1.25, "worker 0/0", "server 0/0", "push", 3, 2, sentence]]


def test_a_delta_has_new_messages_only() -> None:
    made = history()
    made.add(TimedEvent(1.0, push(1)))
    cursor = made.view()["cursor"]
    assert made.since(cursor)["travels"] == []
    made.add(TimedEvent(2.0, Started("worker 0/0", 7)))
    made.add(TimedEvent(3.0, push(2)))
    assert [travel[4] for travel in made.since(cursor)["travels"]] == [2]


def test_a_worker_whose_first_message_is_under_way_computes() -> None:
    made = history()
    made.add(TimedEvent(1.0, Started("worker 0/0", 7)))
    made.add(TimedEvent(2.0, push(1)))
    assert made.view()["states"]["worker 0/0"] == [[1.0, "starting"], [2.0, "computes"]]


def test_of_many_messages_the_last_ones_stay() -> None:
    made = history()
    for step in range(1, MOST_TRAVELS + 11):
        made.add(TimedEvent(float(step), push(step)))
    steps = [travel[4] for travel in made.view()["travels"]]
    assert steps == list(range(11, MOST_TRAVELS + 11))


@pytest.mark.parametrize("block", ["", "cluster { of_a_later_version: 7 }", "}{"])
def test_a_block_that_cannot_be_read_leaves_messages_without_sentences(block: str) -> None:
    made = history(RecordingHeader(started=1000.0, job={"block": block}, layout=HEADER.layout))
    made.add(TimedEvent(1.0, push(1)))
    assert made.view()["travels"] == [[1.0, "worker 0/0", "server 0/0", "push", 1, 2, ""]]


def test_without_the_package_there_are_no_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topotrain.tools.recording.travel_track.find_spec", lambda name: None)
    made = history()
    made.add(TimedEvent(1.0, push(1)))
    assert made.view()["travels"][0][-1] == ""
