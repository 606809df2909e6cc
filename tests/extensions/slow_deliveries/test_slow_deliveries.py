"""Which messages are reported and held, in which order, and that each has a sentence in the words of its framework."""

import itertools
import re
import string
import threading
import time
from pathlib import Path

import pytest
import torch
from every_message import every_message

from topotrain.config import job_file
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.events import Event, Traveled
from topotrain.extensions.collectives.collective_messages import CollectivePart
from topotrain.extensions.host_sums.host_sum_messages import HostGradient, HostPush, HostValues
from topotrain.extensions.outer_optimizer.groups.group_messages import PeerGradient
from topotrain.extensions.slow_deliveries import traveled_messages
from topotrain.extensions.slow_deliveries.explanations import SENTENCES, Explanations, FrameworkKind
from topotrain.extensions.slow_deliveries.slow_deliveries import SlowDeliveries
from topotrain.extensions.slow_deliveries.traveled_messages import WHATS, traveled

CONFS = Path(__file__).parents[3] / "examples" / "conf"
WORKER, SERVER = Address(Role.WORKER, 0, 1), Address(Role.SERVER, 0, 0)
BODY = torch.zeros(4)
PUSH = m.Push(4, 0, 7, 1.0, b"\x01", body=BODY)
VALUES = m.Values(4, 7, 5, body=BODY)
ALL_WHATS = {*WHATS.values(), "apply", "partial"}


def decision(change: int = 0) -> m.StepDecision:
    return m.StepDecision(9, 0, 4, False, 0.0, change)


def part(up: bool, ordinal: int) -> CollectivePart:
    return CollectivePart(4, ordinal, 7, up, 1.0, 1, 0.0, b"", 5)


# ---- which messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "what", "step", "bucket"),
    [
        (PUSH, "push", 5, 7),
        (m.ReducedGradient(4, 0, 7, b"\x01", body=BODY), "mean", 5, 7),
        (m.BackwardReduced(4, 0, b"\x01", b"\x01"), "mean", 5, -1),
        (m.GradientOverride(4, 7, body=BODY), "edit", 5, 7),
        (m.StepVote(0, 4, True, 0.0, False, 0), "vote", 5, -1),
        (decision(), "apply", 5, -1),
        (m.Applied(4, 6, 0, False, -1.0), "applied", 5, -1),
        (VALUES, "values", 5, 7),
        (m.Delta(7, 3, body=BODY), "difference", 3, 7),
        (m.MasterValue(7, 3, body=BODY), "master", 3, 7),
        (m.PairOffer(7, 3, body=BODY), "offer", 3, 7),
        (m.PairReply(7, 3, body=BODY), "reply", 3, 7),
        (part(up=True, ordinal=0), "partial", 5, 7),
        (part(up=False, ordinal=0), "mean", 5, 7),
        (part(up=False, ordinal=-1), "values", 5, 7),
        (HostGradient(4, 0, 7, 1.0, b"\x01", body=BODY), "gradient", 5, 7),
        (HostPush(4, 0, 7, 0, 1.0, b"\x01", (0,), body=BODY), "sum", 5, 7),
        (HostValues(0, 4, 7, 5, body=BODY), "values", 5, 7),
        (PeerGradient(4, 7, 1.0, b"\x01", body=BODY), "gradient", 5, 7),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, m.Message) else None,
)
def test_messages_of_a_step_are_reported(message: m.Message, what: str, step: int, bucket: int) -> None:
    assert traveled(WORKER, SERVER, message) == Traveled("worker 0/1", "server 0/0", what, step, bucket)


@pytest.mark.parametrize(
    "message",
    [
        decision(change=4),
        m.BackwardReduced(4, 0, b"\x01"),
        m.Values(-2, 7, 5, body=BODY),  # values at the start, or final ones
        m.Fetch(1),
        m.Finish(3),
        m.BackwardEnd(4, 0, 1.0, b"\x01"),
        m.Init(7, body=BODY),
    ],
    ids=lambda message: type(message).__name__,
)
def test_other_messages_are_not(message: m.Message) -> None:
    assert traveled(WORKER, SERVER, message) is None


def test_every_name_is_that_of_a_message() -> None:
    assert WHATS.keys() <= {kind.__name__ for kind in every_message()}


def test_every_word_is_documented() -> None:
    table = traveled_messages.__doc__ or ""
    named = {word for row in re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE) for word in row.split(", ")}
    assert named - {"what"} == ALL_WHATS


# ---- sentences -------------------------------------------------------------------------------------------------------

ALWAYS = ALL_WHATS - {"partial", "difference", "master", "offer", "reply"}
"""A worker group is synchronous inside in every framework."""
OCCUR = {
    FrameworkKind.SANDBLASTER: ALWAYS | {"partial"},
    FrameworkKind.ALLREDUCE: ALWAYS | {"partial"},
    FrameworkKind.DOWNPOUR: ALWAYS,
    FrameworkKind.HOGWILD: ALWAYS | {"difference", "master", "offer", "reply"},
    FrameworkKind.ISLANDS: ALWAYS,
}


@pytest.mark.parametrize("kind", FrameworkKind)
def test_every_message_has_a_sentence_where_it_occurs(kind: FrameworkKind) -> None:
    assert OCCUR[kind] <= SENTENCES[kind].keys() <= ALL_WHATS
    for what, template in SENTENCES[kind].items():
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        assert {"sender", "to", "step"} <= fields <= {"sender", "to", "step", "part"}, (kind, what)
        text = Explanations(kind, False).sentence(Traveled("worker 0/1", "server 0/0", what, 3, 7))
        assert "worker 0/1" in text and "server 0/0" in text and "3" in text and text.endswith(".") and "{" not in text


def test_frameworks_differ_where_their_training_does() -> None:
    for what in ("push", "mean", "values"):
        texts = [SENTENCES[kind][what] for kind in FrameworkKind]
        assert len(set(texts)) == len(texts), what
    assert len({SENTENCES[kind]["applied"] for kind in FrameworkKind}) == 4  # the synchronous ones have the same


def test_a_word_without_a_sentence_is_shown_as_it_is() -> None:
    event = Traveled("worker 0/1", "server 0/0", "{novelty}", 3, -1)
    text = Explanations(FrameworkKind.DOWNPOUR, False).sentence(event)
    assert text == "worker 0/1 sends server 0/0 a message of step 3: {novelty}."


def test_values_that_do_not_travel_are_explained() -> None:
    applied = Traveled("server 0/0", "worker 0/1", "applied", 3, -1)
    near, far = (Explanations(FrameworkKind.SANDBLASTER, shared).sentence(applied) for shared in (True, False))
    assert near.startswith(far) and near.endswith("they need not travel.")
    mean = Explanations(FrameworkKind.ALLREDUCE, True).sentence(Traveled("server 0/0", "worker 0/1", "mean", 3, -1))
    assert "gradients of all its slices" in mean


@pytest.mark.parametrize(
    ("conf", "kind"),
    [
        ("sandblaster", FrameworkKind.SANDBLASTER),
        ("in_memory_sandblaster", FrameworkKind.SANDBLASTER),
        ("allreduce", FrameworkKind.ALLREDUCE),
        ("downpour", FrameworkKind.DOWNPOUR),
        ("hogwild", FrameworkKind.HOGWILD),
        ("in_memory_hogwild", FrameworkKind.HOGWILD),
        ("hybrid", FrameworkKind.ALLREDUCE),
        ("islands", FrameworkKind.ISLANDS),
        ("streaming", FrameworkKind.ISLANDS),
    ],
)
def test_the_kind_of_the_examples(conf: str, kind: FrameworkKind) -> None:
    assert FrameworkKind.of(layout(job_file.load(CONFS / f"{conf}.conf").cluster)) is kind


# ---- the delay -------------------------------------------------------------------------------------------------------


class Sink:
    """Keeps events and their times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []

    def emit(self, event: Event) -> None:
        self.events.append((time.monotonic(), event))


def test_messages_of_several_connections_are_held_one_after_another() -> None:
    sink, seconds = Sink(), 0.02
    slow = SlowDeliveries(seconds, sink)

    def read(index: int) -> None:
        for step in range(5):
            slow.on_delivery(Address(Role.WORKER, 0, index), SERVER, m.Push(step, 0, 0, 1.0, b"", body=BODY))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = [at for at, _ in sink.events]
    assert len(times) == 15
    assert all(later - earlier >= seconds for earlier, later in itertools.pairwise(times))
    for index in range(3):
        who = f"worker 0/{index}"
        steps = [event.step for _, event in sink.events if isinstance(event, Traveled) and event.who == who]
        assert steps == [1, 2, 3, 4, 5]


def test_a_message_is_reported_before_it_is_held_and_others_pass_at_once() -> None:
    sink = Sink()
    slow = SlowDeliveries(0.5, sink)
    holding = threading.Thread(target=slow.on_delivery, args=(WORKER, SERVER, PUSH))
    begun = time.monotonic()
    holding.start()
    while not sink.events:
        assert time.monotonic() - begun < 30
    # A message of no step does not wait for another connection.
    slow.on_delivery(Address(Role.WORKER, 0, 0), SERVER, m.Finish(3))
    assert holding.is_alive()
    holding.join()
    ((at, event),) = sink.events
    assert isinstance(event, Traveled) and time.monotonic() - at >= 0.5
