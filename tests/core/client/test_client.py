"""A worker's client: what it sends where, and what it waits for."""

import pytest
import torch
from single_client import ME, SERVERS, ClientHarness, applied, end

from topotrain.core import protocol as m
from topotrain.core.client.client import JobError, PeerLost
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.data_messages import LeaseRelease


def test_fetch_waits_for_all_buckets_of_all_servers():
    harness = ClientHarness()
    harness.answer_next(0, *harness.values(0, -2, 5.0))
    harness.answer_next(1, *harness.values(1, -2, 6.0))
    harness.exchange.values.fetch()
    assert harness.take() == [(server, m.Fetch(1)) for server in SERVERS]
    for number, fill in ((0, 5.0), (1, 6.0)):
        for bucket in harness.map.buckets_of(number):
            assert torch.equal(harness.flats.view("params", bucket), torch.full((bucket.hi - bucket.lo,), fill))


def test_values_of_another_round_change_nothing():
    harness = ClientHarness()
    (bucket, *_) = harness.map.buckets
    late = harness.values(0, -9, 77.0)[0]
    assert harness.exchange.place(SERVERS[0], late, True).data_ptr() != harness.flats.view("params", bucket).data_ptr()
    harness.exchange.handle(SERVERS[0], late)
    harness.answer_next(0, late, *harness.values(0, -2))
    harness.answer_next(1, *harness.values(1, -2))
    harness.exchange.values.fetch()
    assert not harness.flats.view("params", bucket).eq(77.0).any()


def test_each_server_is_told_of_its_own_buckets():
    harness = ClientHarness()
    lo = harness.map.buckets_of(1)[0].id
    harness.exchange.gradients.end_backward(0, 2, 1.5, 1 << lo)
    (_, first), (_, second) = harness.take(m.BackwardEnd)
    assert not any(first.pushed) and second.pushed[0] == 1
    assert (first.step, first.ordinal, first.weight) == (0, 2, 1.5)


def test_means_are_there_when_all_servers_have_closed_and_all_they_named_has_come():
    harness = ClientHarness()
    bucket = harness.map.buckets_of(1)[0]
    harness.exchange.gradients.end_backward(0, 0, 1.0, 0)
    body = torch.arange(float(bucket.hi - bucket.lo))
    harness.answer_next(0, m.BackwardReduced(0, 0, b"\x00"))
    harness.answer_next(1, m.BackwardReduced(0, 0, b"\x01"))
    harness.answer_next(1, m.ReducedGradient(0, 0, bucket.id, b"\x01", body=body.view(torch.uint8)))
    means, written = harness.exchange.gradients.wait_means()
    assert written == 0
    assert list(means) == [bucket.id]
    present, mean = means[bucket.id]
    assert present == 1 and torch.equal(mean, body)


def test_means_of_another_backward_are_not_mistaken():
    harness = ClientHarness()
    bucket = harness.map.buckets_of(0)[0]
    stale = m.ReducedGradient(0, 0, bucket.id, b"\x01", body=torch.full((bucket.hi - bucket.lo,), 9.0))
    harness.exchange.gradients.end_backward(0, 1, 1.0, 0)
    harness.answer_next(0, stale, m.BackwardReduced(0, 0, b"\x01"), m.BackwardReduced(0, 1, b"\x00"))
    harness.answer_next(1, m.BackwardReduced(0, 1, b"\x00"))
    assert harness.exchange.gradients.wait_means() == ({}, 0)
    harness.exchange.handle(SERVERS[0], stale)  # said again after the end
    harness.exchange.gradients.end_backward(1, 0, 1.0, 0)
    harness.answer_next(0, m.BackwardReduced(1, 0, b"\x00"))
    harness.answer_next(1, m.BackwardReduced(1, 0, b"\x00"))
    assert harness.exchange.gradients.wait_means() == ({}, 0)


def test_a_commit_is_over_when_all_servers_have_applied_it_and_the_values_are_here():
    harness = ClientHarness()
    harness.answer_next(0, applied(3), applied(4, version=7, staleness=1, norm=2.5), *harness.values(0, 4))
    harness.answer_next(1, *harness.values(1, 4), applied(4, version=7, staleness=3, found_inf=True, norm=2.5))
    outcome = harness.exchange.steps.commit(4, end())
    assert (outcome.version, outcome.staleness, outcome.found_inf, outcome.norm) == (7, (1, 3), True, 2.5)
    commits = harness.take(m.Commit)
    assert [to for to, _ in commits] == list(SERVERS)


def test_each_server_gets_its_part_of_the_bitmaps():
    harness = ClientHarness()
    pieces = [(b, i) for b in harness.map.buckets for i in range(len(b.pieces))]
    for bucket, i in pieces:
        bit = harness.exchange.model.piece_bit(bucket, i)
        revisions = tuple(range(len(harness.map.buckets)))
        for number in (0, 1):
            harness.answer_next(number, applied(0))
        harness.exchange.steps.commit(0, end(fetch=False, edited=bit, dropped=bit, revisions=revisions))
        commits = dict(harness.take(m.Commit))
        for server, commit in commits.items():
            mine = [p for p in pieces if p[0].shard == server.index]
            expected = 1 << mine.index((bucket, i)) if (bucket, i) in mine else 0
            assert int.from_bytes(commit.edited, "little") == expected == int.from_bytes(commit.dropped, "little")
            assert tuple(commit.revisions) == tuple(b.id for b in harness.map.buckets_of(server.index))


def test_a_refusal_ends_every_wait_with_the_servers_message():
    harness = ClientHarness()
    harness.answer_next(0, m.Fail("the models differ", True))
    with pytest.raises(JobError, match="the models differ") as caught:
        harness.exchange.values.fetch()
    assert caught.value.config
    with pytest.raises(JobError, match="the models differ"):
        harness.exchange.gradients.wait_means()


def test_a_lost_server_ends_every_wait_but_not_after_goodbye():
    harness = ClientHarness()
    harness.exchange.finish(0)  # worker 1 leaves now
    harness.exchange.lost(SERVERS[0], "closed")
    harness.take()
    other = ClientHarness()
    other.exchange.lost(SERVERS[1], "closed by the peer")
    with pytest.raises(PeerLost, match=r"worker 0/1 lost server 0/1: closed by the peer"):
        other.exchange.values.fetch()
    for number in (0, 1):
        harness.answer_next(number, *harness.values(number, -2))
    harness.exchange.values.fetch()


def test_buckets_of_others_are_refused():
    harness = ClientHarness()
    other = harness.map.buckets_of(1)[0].id
    for number in (other, -1, 10**6):
        with pytest.raises(m.ProtocolError, match=r"is not server 0/0's"):
            harness.exchange.place(SERVERS[0], m.Values(0, number, 0), True)


def test_bodies_are_received_where_they_belong():
    harness = ClientHarness()
    bucket = harness.map.buckets_of(0)[0]
    harness.exchange.gradients.end_backward(0, 0, 1.0, 0)
    mean, earlier = (m.ReducedGradient(step, 0, bucket.id, b"\x01") for step in (0, -1))
    assert harness.exchange.place(SERVERS[0], mean, True) is None
    for message, name in ((mean, "mean"), (earlier, "unwanted")):
        place = harness.exchange.place(SERVERS[0], message, False)
        assert place.data_ptr() == harness.flats.view(name, bucket).data_ptr()
    buffer = harness.exchange.place(SERVERS[0], m.ModelBufferValue(0, 2), False)
    assert buffer.nbytes == 8  # num_batches_tracked
    assert harness.exchange.place(SERVERS[0], m.ModelBufferValue(0, 9), False) is None
    assert harness.exchange.place(SERVERS[0], m.Applied(0, 0, 0, False, 0.0), False) is None


def test_state_comes_in_parts_from_all_servers():
    harness = ClientHarness()
    first, second = (harness.map.buckets_of(n)[0].id for n in (0, 1))
    harness.answer_next(0, m.StatePart(1, first, 0, 3.0, "step"), m.StatePart(1, -1, -1, 1.0, ""))
    harness.answer_next(1, m.StatePart(1, -1, -1, 2.0, ""), m.StatePart(1, second, 0, 3.0, "step"))
    harness.answer_next(1, m.StatePart(0, second, 0, 9.0, "old"), m.StatePart(1, second, 0, 4.0, "other"))
    assert [(p.bucket, p.key) for p in harness.exchange.optimizer_state.get()] == [
        (first, "step"),
        (second, "step"),
        (second, "other"),
    ]
    assert harness.take() == [(server, m.StateRequest(1)) for server in SERVERS]


def test_buffers_go_to_server_0_0_as_bytes():
    harness = ClientHarness(nworker_groups=2, nserver_groups=2)
    buffers = [torch.tensor([[1.0, 2.0]]).t(), torch.tensor(3)]
    harness.exchange.buffers.put(buffers)
    assert harness.take() == [], "all workers of a group hold them: worker 0 speaks"
    harness.exchange.channel.me = ME._replace(index=0)
    harness.exchange.buffers.put(buffers)
    sent = harness.take(m.ModelBufferValue)
    assert {to for to, _ in sent} == {SERVERS[0]}
    assert [(p.group, p.index) for _, p in sent] == [(0, 0), (0, 1), (0, -1)]
    assert torch.equal(sent[0][1].body.view(torch.float32), torch.tensor([1.0, 2.0]))


def test_that_the_script_left_its_loop_is_said_before_whatever_it_does_next():
    harness = ClientHarness()
    harness.exchange.channel.exit_loop(3, 0)
    harness.exchange.extension(DataClient).free(0, 0, 0)  # said while the iterator is collected
    harness.take(LeaseRelease)
    harness.exchange.channel.send(SERVERS[1], m.Finish(3))
    left = m.LoopExited(1, 3, 0)
    assert harness.take() == [(SERVERS[0], left), (SERVERS[1], left), (SERVERS[1], m.Finish(3))]
    harness.exchange.channel.send(SERVERS[0], m.Finish(3))
    harness.take(m.Finish)


def test_a_script_that_an_error_ends_does_not_say_that_it_left_its_loop():
    """The others would be told of the exit, and take it for the cause."""
    for fail in (lambda harness: harness.exchange.lost(SERVERS[0], "gone"), lambda harness: harness.exchange.leave()):
        harness = ClientHarness()
        fail(harness)
        harness.exchange.channel.exit_loop(4, 0)
        harness.exchange.channel.send(SERVERS[0], m.Finish(4))
        harness.take(m.Finish)
    harness = ClientHarness()
    harness.exchange.channel.exit_loop(3, 0)  # its error unwinds the loop first, and is known later
    harness.exchange.give_up("ValueError: boom")
    assert harness.take() == [(server, m.Fail("ValueError: boom", cause=True)) for server in SERVERS]


def test_a_cause_explains_the_messages_before_it():
    harness = ClientHarness()
    exchange = harness.exchange
    exchange.handle(SERVERS[0], m.Fail("left early"))
    harness.answer_next(1, m.Fail("left early"))
    harness.answer_next(1, m.Fail("stopped", cause=True))
    assert exchange.channel.await_cause(lambda: False) == "stopped"
    exchange.handle(SERVERS[0], m.Fail("gone"))
    assert exchange.channel.await_cause(lambda: False) == "stopped"
    assert str(exchange.channel.failure) == "left early"


def test_without_a_cause_the_first_failure_counts():
    late, gone, silent = ClientHarness().exchange, ClientHarness().exchange, ClientHarness().exchange
    late.handle(SERVERS[0], m.Fail("first"))
    late.handle(SERVERS[1], m.Fail("second"))
    assert late.channel.await_cause(lambda: True) == "first"
    for server in SERVERS:
        gone.handle(server, m.Fail(f"{server} goes"))
        gone.lost(server, "closed")
        silent.lost(server, "closed")
    assert gone.channel.await_cause(lambda: False) == f"{SERVERS[0]} goes"
    assert silent.channel.await_cause(lambda: False) == ""
