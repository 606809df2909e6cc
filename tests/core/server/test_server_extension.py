"""The seam of a server: what an extension is asked, when, and that a hook which it does not override costs nothing."""

from dataclasses import dataclass, field, replace

import pytest
from reports import SentMessages
from server_core import HOME, Core

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ExtensionHooks, ServerExtension, overriding
from topotrain.extensions.tables.table_messages import TableBarrier, TableStats, TableStatsRequest

A = Address(Role.WORKER, 0, 0)


@dataclass(eq=False)
class UpdateCounter(ServerExtension):
    """Counts the updates of each worker group, and tells a worker that asks how many steps are over."""

    updates: dict[int, int] = field(default_factory=dict)
    over: list[tuple[int, int]] = field(default_factory=list)

    messages = before_model = (TableStatsRequest,)

    def handle(self, sender, message):
        return [(sender, TableStats(message.round, len(self.over), 0, 0, 0))]

    def apply_step(self, group, step, commits, factor):
        assert factor == 1.0 and sorted(commits) == [0, 1]
        self.updates[group] = self.updates.get(group, 0) + 1
        return ()

    def step_over(self, result):
        assert self.updates[result.group] == result.step + 1, "the values change before the step is over"
        assert result.applied.version == result.step + 1 and sorted(result.commits) == [0, 1]
        self.over.append((result.group, result.step))
        return [(A, TableBarrier(0, result.step))]


class Gate(ServerExtension):
    """Holds every step back until a word has come."""

    messages = (TableStatsRequest,)
    opened = False

    def may_stage(self, group, step):
        return self.opened

    def handle(self, sender, message):
        self.opened = True
        return ()


class Doubter(ServerExtension):
    """Votes that no gradient is finite."""

    def amend_vote(self, vote, commits):
        return replace(vote, finite=False)


def core(*extensions: ServerExtension) -> Core:
    """A server with these extensions and two workers, before its first step."""
    return Core(extensions)


def test_an_extension_hears_of_each_update_and_of_each_end_of_a_step():
    counter = UpdateCounter()
    job = core(counter)
    job.steps(3)
    assert counter.updates == {0: 3} and counter.over == [(0, 0), (0, 1), (0, 2)]


def test_what_an_extension_returns_is_sent_before_the_replies_of_the_step():
    job, sender = core(UpdateCounter()), SentMessages()
    job.server.queue._sender = sender
    job.steps(1)
    said = [(to, type(message)) for to, message in sender.sent]
    mine = said.index((A, TableBarrier))
    assert (A, m.Applied) in said[mine:] and said.count((A, TableBarrier)) == 1


def test_a_message_of_an_extension_is_answered_before_there_is_a_model():
    job = Job(cluster=Cluster(nworkers_per_group=2, server_worker_separate=True))
    server = Server(HOME, job, layout(job.cluster), PrivateMemory())
    server.attach([UpdateCounter()])
    assert server.handle(A, TableStatsRequest(0, 0, 7)) == [(A, TableStats(7, 0, 0, 0, 0))]
    waits = Gate()
    later = Server(HOME, job, layout(job.cluster), PrivateMemory())
    later.attach([waits])
    assert later.handle(A, TableStatsRequest(0, 0, 7)) == [] and not waits.opened, "it is held until then"


def test_a_server_refuses_what_none_of_its_extensions_handles():
    with pytest.raises(m.ProtocolError, match="no extension that handles TableStatsRequest"):
        core().server.handle(A, TableStatsRequest(0, 0, 7))
    with pytest.raises(m.ProtocolError, match="TableStatsRequest has no body"):
        core(UpdateCounter()).server.place(A, TableStatsRequest(0, 0, 7), False)


def test_a_step_waits_for_an_extension_and_goes_on_with_its_next_message():
    gate = Gate()
    job = core(gate)
    job.steps(1)
    assert job.server.state.version == 0
    job.server.handle(A, TableStatsRequest(0, 0, 7))
    assert job.server.state.version == 1
    doubted = core(Doubter())
    doubted.steps(1)
    assert doubted.server.state.version == 0, "an amended vote decides: the step is skipped"


def test_only_what_is_overridden_is_bound():
    hooks = ExtensionHooks([UpdateCounter(), Gate()])
    assert [type(each) for each in hooks.may_stage] == [Gate]
    assert [type(each) for each in hooks.step_over] == [UpdateCounter]
    assert hooks.amend_vote == hooks.group_over == hooks.refuses_leave == ()
    assert overriding([ServerExtension()], ServerExtension.may_stage) == ()
