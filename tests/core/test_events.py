"""Every event survives its line; a line that is no event is refused with a reason."""

import dataclasses
import gc
import json
import math
import sys
import typing

import pytest

from topotrain.core import events
from topotrain.core.events import Event, Failed, StepDone, from_json, to_json

EXAMPLES: list[Event] = [
    events.Serving("server 0/1", ("shm:///x", "tcp://127.0.0.1:6723"), 12),
    events.Started("worker 0/1", 12),
    StepDone("worker 0/1", 1.5, 7, 320, 0.25, 0.5, 3, 1000, 2000),
    StepDone("worker 0/1", 1.5, 7, 320, None, 0.0, 0, 1000, 2000),
    StepDone("worker 0/1", 1.5, 7, 320, 0.25, 0.5, 3, 1, 2, waited_s=0.5, staleness_p95=2.0, epoch=1, progress=0.25),
    events.Skipped("worker 0/1", 7, 2, "worker 0/0", "net.weight"),
    events.Counted("server 0/0", {"worker 0/0": 320, "worker 0/1": 300}),
    events.Metrics({"accuracy": 0.97, "loss": 1.0}),
    events.Logged("worker 0/1", 1.5, 7, {"accuracy": 0.5}),
    events.Tested("worker 0/0", "test", 100, {"loss": 0.5, "accuracy": 0.9}, 0),
    Failed("worker 1/0", "program", 'ValueError: "x"', "Traceback\n  line\n"),
    events.Finished("worker 0/1", 7, 320, 0.5, 3, 1000, 2000),
    events.Notice("unit 3", "line one\nline two ü"),
    events.LastingNotice("worker 0/0", "the loss has not fallen"),
    events.Output("worker 0/1", "stderr", "a\r\nb\n"),
    events.Waits("worker 0/1", 10.0),
    events.Connects("worker 0/1"),
    events.Ending("worker 0/1"),
    events.Exited("worker 0/1", 12, -9),
    events.Frozen("worker 0/1", 12),
    events.Thawed("worker 0/1", 12),
    events.Lost("worker 0/1", 12, "worker 0/1 (pid 12) was killed by SIGKILL", "last words\n"),
    events.Unrepeatable("worker 0/1", "the job has tables", False),
    events.Repeatable("worker 0/1", "two backwards"),
    events.Repeated("worker 0/1", 12, 0.07),
    events.Incident(0, "worker 0/1", "was killed by SIGKILL", "group 0 starts again", 1.5),
    events.Recovered(0, 0.5, 0.25),
    events.Covered("server 0/1", 2),
    events.Missed("server 0/1"),
    events.Differs("server 0/1", 2),
    events.Saved("server 0/0", 3, 70, "workspace/job/manifests/step-70", "step"),
    events.Unsaved("server 0/0", "no step was taken yet"),
    events.Agreed("server 0/0", 2, "leave", "no other group trains"),
    events.Left(2, "has left", 1.5),
    events.Joined(2, 1, 2.5),
    events.Bounded("worker 0/0", 3, "an epoch has one batch for each of 3 workers"),
    events.Resized(0, 3, 2, 70, 1.5),
    events.Final("workspace/final.safetensors", 12.5),
    events.Apart("server 1/0", 40, 2.5, 7, 0.01),
    events.Rounds("server 0/0", {"2": 3, "3": 40}, 0.25, 2, ("0 41 0 1 2", "0 42 0 2")),
    events.LocalSteps("worker 0/1", 40, 2.5, 0.5, 1.25),
    events.StateTaken("worker 1/0", True),
    events.Resources("worker 0/1", 12, 200_000_000, 3.25),
    events.Traffic("worker 0/1", {"server 0/0": 1000, "server 0/1": 2000}),
    events.ServerLoad("server 0/1", 40, 40, 0.75),
    events.Slices("server 0/1", ("net.weight", "net.bias"), (128, 0), (128, 16), 3),
    events.ReplayReport("server 0/1", "whole life", "worker 1/0", 0, ""),
    events.Tabled("server 0/1", "words", 12, 4096),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_event_is_one_line_and_comes_back(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    assert from_json(line) == event
    assert from_json(line + "\n") == event


def test_every_kind_of_event_is_in_the_examples() -> None:
    assert {type(event) for event in EXAMPLES} == set(events.EVENTS.values())


def test_a_loss_that_is_no_number_travels() -> None:
    back = from_json(to_json(dataclasses.replace(typing.cast(StepDone, EXAMPLES[2]), loss=math.nan)))
    assert isinstance(back, StepDone)
    assert back.loss is not None
    assert math.isnan(back.loss)


GOOD = json.loads(to_json(EXAMPLES[2]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "no event"),
        ("[1]", "no event"),
        ("[" * 100_000, "no event"),
        ('{"event":"Missile"}', "no event"),
        (json.dumps({**GOOD, "more": 1}), "more"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "step"}), "must have"),
        (json.dumps({**GOOD, "step": "7"}), "StepDone.step"),
        (json.dumps({**GOOD, "step": True}), "StepDone.step"),
        (json.dumps({**GOOD, "time": None}), "StepDone.time"),
        ('{"event":"Metrics","values":{"a":"b"}}', "Metrics.values"),
        ('{"event":"Serving","who":"w","urls":[1],"pid":1}', "Serving.urls"),
        ('{"event":"Failed","who":"w","kind":"weather","text":"","traceback":""}', "must be one of program"),
    ],
)
def test_what_is_no_event_is_refused(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_json(line)


def test_the_events_of_a_long_job_take_no_memory() -> None:
    line = json.dumps(GOOD)
    to_json(from_json(line))
    gc.collect()  # it also empties the free lists of tuples
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(1000):
            to_json(from_json(line))
        assert sys.getallocatedblocks() - before < 100
    finally:
        gc.enable()
