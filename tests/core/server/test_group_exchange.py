"""The end of a job on the servers: who waits for whom, and what worker (0,0) is told."""

from types import SimpleNamespace

import pytest
import torch

from topotrain.config.job import Cluster
from topotrain.config.sharding import Parameter, cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import ModelBuffer, Schema
from topotrain.core.server.group_exchange import Shutdown

SCHEMA = Schema((Parameter("w", (192,), (1,), "float32", True),), (ModelBuffer("b", "float32", 2),), "{}", "d")
MAIN = Address(Role.WORKER, 0, 0)


def server(group):
    return Address(Role.SERVER, group, 0)


class Home:
    """One server's ending, and its values: its group's number everywhere."""

    def __init__(self, group, groups=3, **cluster):
        topology = layout(Cluster(nworker_groups=groups, nserver_groups=groups, **cluster))
        self.buckets = cut(SCHEMA.parameters, 1, groups=groups).buckets
        self.values = torch.full((192,), float(group))
        averages = cluster.get("agreement") == "kRingAverage"
        group_sync = SimpleNamespace(averages=averages, result=lambda bucket, value: value)
        self.shard = SimpleNamespace(buckets=self.buckets, values=self.numbered, group_sync=group_sync)
        self.ending = Shutdown(server(group), topology)
        self.ending.expect_buffers(len(SCHEMA.buffers))

    def view(self, bucket):
        return self.values[bucket.lo : bucket.hi]

    def numbered(self, number):
        return self.view(self.buckets[number - self.buckets[0].id])

    def drained(self):
        return self.ending.drained(self.shard)

    def take(self, sender, message):
        return self.ending.take(sender, message, message.body, self.shard)


def final(bucket, value):
    return m.FinalValue(bucket, body=torch.full((64,), float(value)))


def test_a_final_value_that_is_sent_twice_counts_once():
    home = Home(0)
    home.take(server(1), final(1, 5))
    home.take(server(1), final(1, 9))
    assert home.view(home.buckets[1])[0] == 5.0


def put(home, group, value):
    body = home.ending.buffer_place(m.ModelBufferValue(group, 0), SCHEMA)
    body.view(torch.float32).fill_(value)
    home.take(Address(Role.WORKER, group, 0), m.ModelBufferValue(group, 0, body=body))


def test_buffers_are_told_when_every_group_has_left_its_own():
    home = Home(0, groups=2)
    assert home.take(MAIN, m.BufferRequest()) == []
    put(home, 1, 5.0)
    home.take(Address(Role.WORKER, 1, 0), m.ModelBufferValue(1, -1))
    home.take(MAIN, m.ModelBufferValue(0, -1))  # "that was all", and overtakes what it speaks of
    put(home, 0, 4.0)
    out = home.take(MAIN, m.BufferRequest())
    puts = [(p.group, p.index, None if p.body is None else float(p.body.view(torch.float32)[0])) for _, p in out]
    assert puts[-3:] == [(0, 0, 4.0), (1, 0, 5.0), (2, -1, None)]


def test_what_scripts_have_changed_at_their_end_is_told_unless_their_processes_are_replaced():
    home = Home(0, groups=2)
    for index, group in ((0, 1), (1, 0)):
        writes = m.LastWrites(group, index, body=torch.full((8,), group, dtype=torch.uint8))
        who = Address(Role.WORKER, group, index)
        assert home.take(who, writes)[0] == (who, m.LastWrites(group, index))  # the echo
    home.ending.forget(0, ended=False)
    for group in (0, 1):
        put(home, group, 1.0)
        home.take(Address(Role.WORKER, group, 0), m.ModelBufferValue(group, -1))
    to, told = home.take(MAIN, m.BufferRequest())[0]
    assert (to, told.group, told.index, told.body.tolist()) == (MAIN, 1, 0, [1] * 8)


@pytest.mark.parametrize(("group", "index"), [(0, 1), (0, -1), (2, 0), (-1, 0)])
def test_buffers_that_cannot_be_are_refused(group, index):
    with pytest.raises(m.ProtocolError, match=f"model buffer {index} of group {group}"):
        Home(0, groups=2).ending.buffer_place(m.ModelBufferValue(group, index), SCHEMA)


def test_server_0_0_is_done_when_worker_0_0_has_all_it_wants():
    home = Home(0, groups=1)
    home.drained()
    assert not home.ending.done
    home.take(MAIN, m.FinalRequest(-1))
    assert not home.ending.done
    put(home, 0, 1.0)
    home.take(MAIN, m.ModelBufferValue(0, -1))
    home.take(MAIN, m.BufferRequest())
    assert home.ending.done


def test_whoever_takes_the_place_of_the_dead_is_told_what_it_asks_itself():
    """Though the script of the dead had come to its end: a fresh process knows no model yet, and asks when it does."""
    home = Home(0, groups=1)
    assert home.take(MAIN, m.FinalRequest(1)) == []
    home.ending.forget(0, ended=True)
    home.take(MAIN, m.ModelBufferValue(0, 0, body=torch.zeros(8, dtype=torch.uint8)))
    home.take(MAIN, m.ModelBufferValue(0, -1))
    assert home.drained() == []
    assert home.take(MAIN, m.FinalRequest(2))
