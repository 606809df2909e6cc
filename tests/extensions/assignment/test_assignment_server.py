"""A server's part of assignments: all of it or nothing, each once, and nothing that no correct worker sends."""

import pytest
import torch
from single_servers import server, started, worker

from topotrain.core import protocol as m
from topotrain.core.protocol import int_to_bits
from topotrain.extensions.assignment.assignment_messages import AssignedBucket, AssignedElements, Assignment

PAIR = {"nworkers_per_group": 2, "nservers_per_group": 2, "server_worker_separate": True}


def assigned(harness, who, value, step=0, place=(5, 0, 0), repeated=False, elements=None):
    """All messages of one worker; worker 0 decides."""
    for to in harness.homes(who):
        buckets = harness.map.buckets_of(to.index) if who.index == 0 else ()
        for bucket in buckets:
            count = bucket.hi - bucket.lo
            bits = int_to_bits((1 << len(bucket.pieces)) - 1, len(bucket.pieces))
            masked = elements is not None
            harness.say(who, to, AssignedBucket(step, bucket.id, bits, masked, body=torch.full((count,), value)))
            if masked:
                body = torch.tensor([elements] * ((count + 7) // 8), dtype=torch.uint8)
                harness.say(who, to, AssignedElements(step, bucket.id, body=body))
        stream, batch, number = place
        harness.say(who, to, Assignment(step, len(buckets), stream, batch, number, True, repeated))


def change(harness, value, step=0, **more):
    """A whole assignment of the group."""
    for who in harness.workers:
        assigned(harness, who, value, step, **more)
        harness.commit(who, step, backwards=0, weight=0.0, fetch=False, revisions=b"\xff", counts=False, hyper=b"")


def now(harness, number):
    for who in harness.workers:
        harness.fetch(who, number)
    return harness.values(worker())


def test_an_assignment_waits_for_all_of_it_on_all_shards():
    harness = started(**PAIR)
    for who in harness.workers:
        harness.commit(who, 0, backwards=0, weight=0.0, fetch=False, revisions=b"\xff", counts=False, hyper=b"")
    assigned(harness, worker(index=1), 4.0)
    assert not harness.heard(worker(), m.Applied)
    assigned(harness, worker(), 4.0)
    assert len(harness.heard(worker(), m.Applied)) == 2 and now(harness, 2) == 4.0


@pytest.mark.parametrize("place", [(5, 3, 0), (-1, 0, 0)], ids=["in a pass", "between two"])
def test_an_assignment_of_the_same_place_is_made_once(place):
    harness = started(**PAIR)
    change(harness, 4.0, place=place)
    change(harness, 7.0, step=1, place=place)
    assert now(harness, 2) == 4.0
    change(harness, 7.0, step=2, place=(*place[:2], 1))
    assert now(harness, 3) == 7.0
    change(harness, 8.0, step=3, place=(*place[:2], 2), repeated=True)
    assert now(harness, 4) == 7.0


def test_workers_at_different_places_fail_with_a_reason():
    harness = started(**PAIR)
    for who in harness.workers:
        assigned(harness, who, 4.0, place=(5, who.index, 0))
        harness.commit(who, 0, backwards=0, weight=0.0, fetch=False, revisions=b"\xff", counts=False, hyper=b"")
    (text,) = {failed.text for failed in harness.heard(worker(), m.Fail)}
    assert "workers 0 and 1 of a group are at different places of the script in tt.assign" in text
    assert not harness.heard(worker(), m.Applied)


def test_an_assignment_of_a_group_that_dies_is_forgotten():
    harness = started(**PAIR)
    assigned(harness, worker(), 4.0)
    for each in harness.servers.values():
        for extension in each.hooks.reset_group:
            extension.reset_group(0, False)
    harness.step(worker(), 0.0)
    harness.step(worker(index=1), 0.0)
    assert now(harness, 2) == 0.0


@pytest.mark.parametrize(
    ("who", "message"),
    [
        (1, AssignedBucket(0, 0, b"\x01", False, body=torch.zeros(64))),
        (0, AssignedBucket(0, 0, b"\x01", False)),
        (0, AssignedBucket(0, 0, b"\x01", False, body=torch.zeros(3))),
        (0, AssignedBucket(0, 0, b"\x02", False, body=torch.zeros(64))),
        (0, AssignedBucket(0, 99, b"\x01", False, body=torch.zeros(64))),
        (0, AssignedElements(0, 0, body=torch.zeros(1, dtype=torch.uint8))),
        (0, AssignedElements(0, 0)),
        (0, Assignment(0, -1, 0, 0, 0, False, False)),
    ],
    ids=["of another worker", "without values", "too few", "no such piece", "no such bucket", "few bits", "none", "-1"],
)
def test_what_no_correct_worker_sends_is_refused_and_changes_nothing(who, message):
    harness = started(**PAIR)
    with pytest.raises(m.ProtocolError):
        harness.say(worker(index=who), server(), message)
    change(harness, 4.0)
    assert now(harness, 2) == 4.0
