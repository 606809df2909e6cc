"""A server, one message at a time."""

import json
import math
from dataclasses import replace

import pytest
import torch
from single_servers import ServerHarness, server, started, worker
from torch import nn

from topotrain.config.job import Slicing, Updater
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.protocol import NO_REVISION
from topotrain.launch.runtime.server_composition import make_server

# --- joining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("join", [True, False])
def test_values_are_held_until_they_and_the_models_description_are_here(join):
    harness = ServerHarness(nservers_per_group=2, join=join)
    harness.fetch(worker())
    assert harness.got[worker()] == []
    harness.give_values(3.0)
    if not join:
        assert harness.got[worker()] == []
        harness.join(worker())
    assert harness.values(worker()) == 3.0
    harness.give_values(9.0)  # values that come late are ignored
    harness.fetch(worker(), 2)
    assert harness.values(worker()) == 3.0


@pytest.mark.parametrize("servers", [1, 2])
def test_other_models_are_refused_and_both_workers_named(servers):
    harness = ServerHarness(nworker_groups=2, nserver_groups=servers, join=False)
    harness.join(worker(0))
    other = ServerHarness(nworker_groups=2, nserver_groups=servers, size=151, join=False)
    harness.join(worker(1), other.schema)
    (fail,) = harness.heard(worker(1), m.Fail)
    assert fail.config
    assert "parameter weight: worker 0/0 has weight of shape (1, 150), float32, worker 1/0" in fail.text
    harness.give_values()
    harness.fetch(worker(1))
    assert servers == 1 or harness.heard(worker(1), m.Values) == []


def test_an_optimizer_that_cannot_be_built_is_refused():
    harness = ServerHarness(join=False)
    text = json.dumps({**json.loads(harness.schema.optimizer), "name": "torch.optim.LBFGS"})
    harness.join(worker(), replace(harness.schema, optimizer=text))
    (fail,) = harness.heard(worker(), m.Fail)
    assert fail.config and "server 0/0 cannot build the optimizer" in fail.text and "LBFGS" in fail.text


def test_shared_memory_is_given_out_when_a_worker_of_ours_has_come():
    """Another group may know the model before all servers of ours are there to be shown anything."""
    harness = ServerHarness(
        join=False, nworker_groups=4, nserver_groups=2, nservers_per_group=2, server_worker_separate=True
    )
    first = make_server(server(), harness.job, harness.topology, PrivateMemory(), shared=True)
    said = [out for part in harness.schema.parts() for out in first.handle(server(1), part)]
    assert not said and not first.state.complete
    said = [out for part in harness.schema.parts() for out in first.handle(worker(), part)]
    assert {to for to, message in said if isinstance(message, m.SharedBuffer)} == {server(0, 1), worker()}


def test_all_server_groups_start_from_group_0s_values():
    harness = ServerHarness(nworker_groups=2, nserver_groups=2, join=False, holding=(m.Init,))
    harness.join(worker(0))
    harness.give_values(3.0)
    harness.fetch(worker(0))
    assert harness.got[worker(0)] == []  # the others do not know the model yet
    harness.join(worker(1))
    harness.fetch(worker(1))
    assert harness.values(worker(0)) == 3.0 and harness.got[worker(1)] == []
    harness.let_go()
    assert harness.values(worker(1)) == 3.0


# --- a step ------------------------------------------------------------------------------------------------------


def test_visible_the_mean_comes_back_then_the_values():
    harness = started(nworkers_per_group=2)
    harness.push(worker(0, 0), 2)
    assert harness.got[worker(0, 0)] == []
    harness.push(worker(0, 1), 4)
    for who in harness.workers:
        (mean,) = harness.heard(who, m.ReducedGradient)
        assert (mean.step, mean.ordinal, mean.present) == (0, 0, b"\x01")
        assert torch.equal(mean.body, torch.full_like(mean.body, 3.0))
        assert harness.heard(who, m.BackwardReduced) == [m.BackwardReduced(0, 0, b"\x01")]
    harness.commit(worker(0, 0))
    assert harness.got[worker(0, 0)] == []
    harness.commit(worker(0, 1))
    for who in harness.workers:
        assert harness.heard(who, m.Applied) == [m.Applied(0, 1, 0, False, -1.0)]
        assert harness.values(who) == -3.0


def test_a_step_is_applied_on_all_shards_or_on_none():
    harness = started(nservers_per_group=2)
    harness.push(worker(), 5)
    harness.commit(worker(), to=server(0, 1))
    assert harness.got[worker()] == []
    assert harness.servers[server(0, 1)].state.version == 0
    harness.commit(worker(), to=server(0, 0))
    assert harness.values(worker()) == -5.0
    assert len(harness.heard(worker(), m.Applied)) == 2


def test_the_same_batches_count_once_and_values_come_where_they_are_asked_for():
    harness = started()
    harness.step(worker(), 1, marks=(7, 0, 1), fetch=False)
    assert harness.heard(worker(), m.Values) == [] and len(harness.heard(worker(), m.Applied)) == 1
    harness.step(worker(), 1, step=1, marks=(7, 0, 1))
    assert harness.values(worker()) == -1.0
    harness.step(worker(), 1, step=2, marks=(7, 3, 3))
    (fail,) = harness.heard(worker(), m.Fail)
    assert "worker group 0: batches 3 to 3 of stream 0x7 do not continue it: 1 was the last" in fail.text


def test_values_of_one_group_are_a_view_and_those_of_several_a_snapshot():
    for groups, same in ((1, True), (2, False)):
        harness = started(nworker_groups=groups)
        out = harness.servers[server()].handle(worker(), m.Fetch(2))
        values = [message for _, message in out if isinstance(message, m.Values)]
        before = [v.body.clone() for v in values]
        harness.step(worker(groups - 1), 1)
        assert all(torch.equal(v.body, b) for v, b in zip(values, before)) is not same


# --- arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bound", [0.5, 1e6])
def test_clip_norm_is_torchs_over_all_shards(kind, bound):
    harness = started(nservers_per_group=2)
    harness.push(worker(), 0.25)
    harness.commit(worker(), clip_norm=bound, clip_type=kind)
    harness.model.weight.grad = torch.full((1, 150), 0.25)
    norm = nn.utils.clip_grad_norm_(harness.model.parameters(), bound, kind)
    for applied in harness.heard(worker(), m.Applied):
        assert applied.norm == pytest.approx(float(norm), rel=1e-6)
    assert harness.values(worker()) == pytest.approx(-float(harness.model.weight.grad[0, 0]), rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "gradient", "commit", "norm", "value"),
    [
        ({"size": 70}, 1.0, {"clip_norm": 100.0}, math.sqrt(70), -1.0),  # 58 elements of padding are filled, too
        ({}, 8.0, {"inv_scale": 0.125, "clip_norm": 1e6}, math.sqrt(150), -1.0),  # unscaled before it is clipped
        ({"updater": Updater(clip_low=-0.5, clip_high=0.25)}, 3.0, {}, -1.0, -0.25),
    ],
    ids=["padding", "loss scale", "bounds of elements"],
)
def test_what_a_step_makes_of_a_gradient(fields, gradient, commit, norm, value):
    harness = started(**fields)
    harness.step(worker(), gradient, **commit)
    assert harness.heard(worker(), m.Applied)[0].norm == pytest.approx(norm)
    assert harness.values(worker()) == value


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_on_one_shard_skips_the_step_on_all(bad):
    harness = started(nservers_per_group=2)
    for to in harness.homes(worker()):
        for bucket in harness.map.buckets_of(to.index):
            body = torch.ones(bucket.hi - bucket.lo)
            body[0] = bad if to.index == 1 else 1.0
            harness.say(worker(), to, m.Push(0, 1, bucket.id, 1.0, b"\x01", body=body))
    harness.commit(worker(), check_finite=True)
    assert [(a.found_inf, a.version) for a in harness.heard(worker(), m.Applied)] == [(True, 0)] * 2
    assert harness.values(worker()) == 0.0
    harness.step(worker(), 1, step=1, check_finite=True)
    assert harness.values(worker()) == -1.0


def test_hyperparameters_are_the_last_ones_of_the_group():
    harness = started(nworker_groups=2)
    harness.optimizer.param_groups[0]["lr"] = 2.0
    harness.step(worker(0), 1)
    assert harness.values(worker(0)) == -2.0
    harness.optimizer.param_groups[0]["lr"] = 4.0
    harness.step(worker(1), 1)
    assert harness.values(worker(1)) == -6.0
    harness.step(worker(0), 1, step=1)
    assert harness.values(worker(0)) == -8.0


def test_a_segment_without_gradient_does_not_move():
    harness = started(optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5))
    harness.step(worker(), 1)
    assert harness.values(worker()) == -1.0
    harness.commit(worker(), 1, revisions=bytes([NO_REVISION]))
    assert harness.values(worker()) == -1.0
    harness.step(worker(), 0, step=2)
    assert harness.values(worker()) == -1.5


# --- disagreement ------------------------------------------------------------------------------------------------


def test_a_disagreement_fails_the_group_and_only_it():
    harness = started(nworker_groups=2, nworkers_per_group=2)
    for index in (0, 1):
        harness.push(worker(0, index), 1)
        harness.commit(worker(0, index), inv_scale=1.0 + index)
    for index in (0, 1):
        (fail,) = harness.heard(worker(0, index), m.Fail)
        assert "worker group 0: workers 0 and 1 of a group disagree about the loss scale" in fail.text
        assert not fail.config
    for index in (0, 1):
        harness.push(worker(1, index), 1)
        harness.commit(worker(1, index))
    assert harness.values(worker(1, 0)) == -1.0


def test_a_step_from_the_future_is_a_disagreement():
    harness = started()
    harness.commit(worker(), 1)
    (fail,) = harness.heard(worker(), m.Fail)
    assert "worker 0 is in step 1, the group in step 0" in fail.text


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_ends_while_another_waits_is_named(late):
    harness = started(nworkers_per_group=2)
    stay, leave = worker(0, late), worker(0, 1 - late)
    sayings = [lambda: harness.say(leave, server(), m.Finish(0)), lambda: harness.push(stay, 1)]
    for saying in sayings if late else reversed(sayings):
        saying()
    (fail,) = harness.heard(stay, m.Fail)
    assert f"worker {leave.index} ended its script after 0 steps" in fail.text


def test_bodies_must_be_there_and_fit():
    harness = started()
    with pytest.raises(m.ProtocolError, match="Push without a body"):
        harness.say(worker(), server(), m.Push(0, 1, 0, 1.0, b"\x01"))
    with pytest.raises(m.ProtocolError, match="bytes, expected 768"):
        harness.say(worker(), server(), m.Push(0, 1, 0, 1.0, b"\x01", body=torch.zeros(7)))


# --- where bodies go ---------------------------------------------------------------------------------------------


def test_bodies_are_received_where_they_belong():
    harness = ServerHarness(nworkers_per_group=2, join=False)
    home = harness.servers[server()]
    push = m.Push(0, 1, 0, 1.0, b"\x01")
    assert home.place(worker(), push, False) is None  # no model, no place
    harness.join(worker())
    values = home.place(worker(), m.Init(0), True)
    harness.give_values(4.0)
    assert torch.equal(values, torch.full_like(values, 4.0))
    assert home.place(worker(), push, True) is None  # a view will do
    places = [home.place(worker(0, index), push, False).data_ptr() for index in (0, 1)]
    assert len({*places, values.data_ptr()}) == 3
    with pytest.raises(m.ProtocolError):
        home.place(worker(3, 0), push, False)
    with pytest.raises(m.ProtocolError):
        home.place(worker(), replace(push, bucket=9), False)


# --- optimizer state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0, 0, 2]])
def test_optimizer_state_counts_when_all_pieces_are_here_in_any_order(order):
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.5)

    harness = started(optimizer=adam, size=2500, slicing=Slicing.kTensor, slice_bytes=4096)
    buckets = harness.map.buckets_of(0)
    assert [len(bucket.pieces) for bucket in buckets] == [1, 1, 1]
    entries = ("exp_avg", "exp_avg_sq")

    def part(number, key):
        (piece,) = buckets[number].pieces
        return m.StatePart(0, number, 0, 0.0, key, body=torch.full((piece.hi - piece.lo,), number + 1.0))

    harness.say(worker(), server(), m.StatePart(0, 0, 0, 1.0, "step"))
    for number in order[:-1]:
        harness.say(worker(), server(), *(part(number, key) for key in entries))
    # A second copy of the server, made now, has the pieces, too.
    original, copy = harness.servers[server()], harness.made(server())
    copy.load_state_dict(original.state_dict())
    for each in (original, copy):
        harness.servers[server()] = each
        harness.say(worker(), server(), m.StateRequest(1))
        assert {p.key for p in harness.heard(worker(), m.StatePart)} == {"step", ""}
        harness.say(worker(), server(), *(part(order[-1], key) for key in entries), m.StateRequest(2))
        found = {(p.key, p.bucket): p.body for p in harness.heard(worker(), m.StatePart) if p.key in entries}
        assert found.keys() == {(key, bucket.id) for key in entries for bucket in buckets}
        assert all((body == number + 1).all() for (_, number), body in found.items())


# --- other server groups and the end -----------------------------------------------------------------------------


def finish(harness, who, steps=0):
    for to in harness.homes(who):
        harness.say(who, to, m.Finish(steps))
    if who.index == 0:
        harness.say(who, server(), m.ModelBufferValue(who.group, -1))


def final(harness):
    for to in harness.topology.servers(0):
        harness.say(worker(), to, m.FinalRequest(-9))
    harness.say(worker(), server(), m.BufferRequest())


@pytest.mark.parametrize(("agreement", "expected"), [("kMaster", -11.0), ("kRingAverage", -5.5), ("kGossip", -5.5)])
def test_the_result_is_the_master_view_after_the_drain(agreement, expected):
    harness = started(nworker_groups=2, nserver_groups=2, agreement=agreement, sync_freq=5)
    harness.step(worker(0), 1)
    harness.step(worker(1), 10)
    finish(harness, worker(0), 1)
    final(harness)
    harness.heard(worker(0), m.Values | m.Applied)
    assert harness.got[worker(0)] == [] and not any(s.done for s in harness.servers.values())
    finish(harness, worker(1), 1)
    assert harness.values(worker(0)) == expected
    assert harness.heard(worker(0), m.ModelBufferValue) == [m.ModelBufferValue(2, -1)]
    assert all(s.done for s in harness.servers.values())
