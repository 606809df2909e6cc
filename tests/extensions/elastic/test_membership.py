"""Who is heard, who may come back, and how far a group of other servers came."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from topotrain.config.job import Algorithm, Apply, Cluster, Engine, Grads, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.server.server import Server
from topotrain.extensions.elastic.eligibility import refusal
from topotrain.extensions.elastic.membership import (
    STREAMS,
    CoordinatorAnswers,
    GroupRestarts,
    Members,
    count_reply,
    count_requests,
)
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams
from topotrain.extensions.tables.table_server import TableServer
from topotrain.launch.runtime.server_composition import make_server

A, B, OTHER = (Address(Role.WORKER, *place) for place in ((0, 0), (0, 1), (1, 0)))


def test_a_group_is_current_once_it_has_announced_itself_and_its_change_is_carried_out():
    members = Members((0, 1))
    assert not members.changed and all(map(members.is_current, (A, B, OTHER)))
    assert members.is_empty(0, 0) and members.is_empty(0, 1)
    assert members.expect(0, 1) and members.changed
    assert not members.is_current(A) and not members.is_current(B) and members.is_current(OTHER)
    assert members.is_empty(0, 1) and members.is_empty(0, 2) and not members.is_empty(0, 0)
    members.join(A, 1)
    assert not members.is_empty(0, 1) and members.is_empty(0, 2)
    assert not members.is_current(A) and members.pending() == [(0, 1)]
    assert members.restart(0, 1) == [A] and members.pending() == []
    assert members.is_current(A) and not members.is_current(B)
    members.join(B, 1)
    assert members.is_current(B)


def test_what_the_desk_asks_comes_in_parts_and_back_whole():
    streams = list(range(2 * STREAMS + 1))
    asked, answers = count_requests(3, 2, streams), CoordinatorAnswers()
    assert [len(question.counts) for question in asked] == [2 * STREAMS, 2 * STREAMS, 2]
    assert all(m.decode(*m.encode(question)) == question for question in asked)
    batches: Any = SimpleNamespace(count=lambda stream, group: stream % 7 if group == 3 else -1)
    parts = [count_reply(question, batches, False) for question in asked]
    assert answers.add(parts[2]) is None and answers.add(parts[2]) is None and answers.add(parts[0]) is None
    assert answers.add(parts[1]) == {stream: stream % 7 for stream in streams}
    assert count_requests(3, 2, ()) == [AppliedBatchesOfStreams(3, 2, 0, 1, ())], (
        "the group comes back without a lease, too"
    )

    # An answer to an earlier question is no part of a later one.
    answers, streams = CoordinatorAnswers(), list(range(STREAMS + 1))
    answers.add(count_requests(0, 1, streams)[0])
    assert answers.add(count_requests(0, 2, streams)[1]) is None
    assert answers.add(count_requests(0, 2, streams)[0]) is not None


APART = Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True)
# With a bound a group restarts as a whole, on the servers' own account.
BOUNDED = replace(APART, max_staleness=1)
BESIDE = Cluster(nworkers_per_group=2, nservers_per_group=2)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (APART, True),
        (BESIDE, False),
        (Cluster(nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True), True),
        (Cluster(nworkers_per_group=2, nservers_per_group=2, algorithm=Algorithm.kRing), False),
        (Cluster(nworkers_per_group=2, nservers_per_group=2, engine=Engine.kGloo), False),
    ],
    ids=["downpour", "all-reduce on one host", "sandblaster", "ring", "gloo"],
)
def test_which_layouts_regroup(cluster, expected):
    topology = layout(cluster)
    assert topology.regroups(0) is expected
    assert (refusal(Job(cluster=cluster), topology, 0) == "") is expected
    with pytest.raises(ValueError, match="worker group 7"):
        topology.regroups(7)


def test_what_is_applied_on_arrival_cannot_be_taken_back():
    assert "kOnArrival" in refusal(Job(cluster=APART, apply=Apply.kOnArrival, grads=Grads.kHidden), layout(APART), 1)


def server_of(job: Job, index: int = 0) -> Server:
    class NoModelYet:
        def allocate(self, numel, dtype):
            raise AssertionError("no model yet")

    return make_server(Address(Role.SERVER, 0, index), job, layout(job.cluster), NoModelYet())


def test_a_group_that_cannot_come_back_is_told_why():
    server = server_of(Job(cluster=BESIDE))
    server.replies.asked.add(0)  # its workers have begun
    out = server.handle(A, m.WorkerRejoined(1))
    assert [to for to, _ in out] == [A, B]
    assert all(isinstance(said, m.Fail) and "started again, but its workers add up" in said.text for _, said in out)


def test_the_first_workers_of_such_a_job_may_be_of_any_incarnation():
    """All of it was started again, its servers too."""
    server = server_of(Job(cluster=BESIDE))
    assert server.handle(A, m.WorkerRejoined(4)) == [(A, m.WorkerRejoined(4))]
    server.replies.asked.add(0)
    assert server.handle(B, m.WorkerRejoined(4)) == [(B, m.WorkerRejoined(4))]
    assert [type(said) for _, said in server.handle(B, m.WorkerRejoined(5))] == [m.Fail, m.Fail]


def test_a_server_that_came_late_asks_for_what_was_decided_before_there_is_a_model():
    """A worker may die while there is no way yet between two servers."""
    job = Job(cluster=replace(BOUNDED, nservers_per_group=2))
    first, second = server_of(job), server_of(job, 1)
    assert [type(said) for to, said in first.lost(A) if to == second.me] == [m.StepDecision]  # which goes nowhere
    ((to, question),) = second.reconnected()
    assert to == first.me
    for back, said in first.handle(second.me, question):
        assert back == second.me
        second.handle(first.me, said)
    assert second.handle(A, m.WorkerRejoined(1)) == [(A, m.WorkerRejoined(1))]


def test_a_job_with_tables_cannot_regroup():
    server = server_of(Job(cluster=BOUNDED))
    (tables,) = (each for each in server.hooks.extensions if isinstance(each, TableServer))
    tables._tables["t"] = None  # type: ignore[assignment]
    assert server.lost(A) == []
    out = server.handle(A, m.WorkerRejoined(1))
    assert [type(said) for _, said in out] == [m.Fail] * 2 and "has tables" in out[0][1].text


def test_who_is_lost_after_the_end_of_its_script_is_not_missed():
    server = server_of(Job(cluster=BOUNDED))
    server.worker_groups.finish(B, 3)
    server.startup.schema = object()  # type: ignore[assignment]
    server.lost(B)
    assert not server.extension(GroupRestarts).members.changed
    server.lost(A)
    assert server.extension(GroupRestarts).members.incarnation(0) == 1
    server.lost(A)
    assert server.extension(GroupRestarts).members.newest(0) == 1, "its end is heard once"
    assert not server.worker_groups.finished(0), "all its workers are started again"


def test_the_end_of_a_replaced_process_does_not_count():
    server = server_of(Job(cluster=BOUNDED))
    server.lost(A)
    server.handle(A, m.WorkerRejoined(1))
    server.lost(B)
    assert server.extension(GroupRestarts).members.newest(0) == 1
    server.handle(B, m.WorkerRejoined(1))
    server.lost(B)
    assert server.extension(GroupRestarts).members.newest(0) == 2
