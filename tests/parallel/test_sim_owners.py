"""Parameters that only some workers of a group hold: values, sums and the end, on a simulated network."""

import pytest
import torch
from simulation import STORM, ScriptedCluster, ScriptedWorker, job, parameters, same, total, trace

from topotrain.config.job import Grads
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Role
from topotrain.core import protocol as m
from topotrain.core.client.client import StepEnd
from topotrain.core.protocol import NO_REVISION

START = 3.0
STEPS = 4


def held(name: str, count: int, *owners: int, dtype: str = "float32") -> Parameter:
    return Parameter(name, (count,), (1,), dtype, True, owners=owners)


SCHEMA = (
    held("left", 70, 0),
    held("right", 200, 1),
    *parameters(100),
    held("tied", 130, 0, 1),
    held("wide", 90, 1, dtype="float64"),
    held("last", 65, 2),
)


class Holder(ScriptedWorker):
    """A worker that has memory, and gradients, for the parameters that it holds."""

    def holds(self, index: int) -> bool:
        return not SCHEMA[index].owners or self.me.index in SCHEMA[index].owners

    def mine(self) -> list[int]:
        return [index for index in range(len(SCHEMA)) if self.holds(index)]

    def open(self, start: float = START) -> "Holder":
        self.client.open(self.cluster.schema, self.cluster.map, self.flats)
        if self.me.group == 0:
            for space in self.cluster.map.spaces:
                if space.on(self.me.index):
                    self.flats.flat("local", space.index).fill_(start)
            self.client.send_initial("local")
        self.client.values.fetch()
        return self

    def step(self, gradient: list[torch.Tensor]) -> None:
        for index in self.mine():
            self.view("local", index).copy_(gradient[index])
        revisions = [NO_REVISION] * len(self.cluster.map.buckets)
        for bucket in self.cluster.map.buckets_on(self.me.index):
            revisions[bucket.id] = 1
            full = (1 << len(bucket.pieces)) - 1
            self.client.gradients.push(self.steps, 1, bucket, 1.0, full, self.flats.view("local", bucket))
        self.client.steps.commit(self.steps, StepEnd(1, 1.0, True, b"", (), tuple(revisions)))
        self.steps += 1


def play(cluster: ScriptedCluster) -> list[list[torch.Tensor]]:
    """All gradients, with zeros where a worker holds nothing."""
    given: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def script(worker: ScriptedWorker) -> None:
        holder = Holder(cluster, worker.me)
        holder.open()
        for step in range(STEPS):
            gradient = [g if holder.holds(i) else torch.zeros_like(g) for i, g in enumerate(holder.numbers())]
            given[(*holder.me[1:], step)] = gradient
            holder.step(gradient)
            if cluster.topology.worker_groups == 1:
                now = [START - t for t in total([g for (_, _, at), g in given.items() if at <= step])]
                assert same([holder.view("params", i) for i in holder.mine()], [now[i] for i in holder.mine()])
        names = {name for name, space in holder.flats._flat if not cluster.map.spaces[space].on(holder.me.index)}
        assert not names, "memory for what another worker holds"
        holder.finish()
        if holder.me == cluster.workers[0]:
            holder.client.values.fetch_final()
            assert same(holder.values(), [START - t for t in total(list(given.values()))])

    cluster.play(script)
    return list(given.values())


@pytest.mark.parametrize(("groups", "homes", "shards"), [(1, 1, 2), (2, 1, 3), (2, 2, 1)])
def test_who_holds_a_parameter_has_its_values_and_the_sum_of_all_gradients_counts(groups, homes, shards):
    cluster = ScriptedCluster(job(groups, 3, shards, nserver_groups=homes, grads=Grads.kHidden), shards, STORM, SCHEMA)
    given = play(cluster)
    assert same(cluster.values(), [START - t for t in total(given)])


def test_nobody_is_sent_what_others_hold_but_the_result():
    cluster = ScriptedCluster(job(1, 3, 2, grads=Grads.kHidden), schema=SCHEMA)
    seen = trace(cluster, m.Values, m.Init)
    play(cluster)
    wrong = []
    for _, sender, to, message in seen:
        worker = to if to.role is Role.WORKER else sender
        final = isinstance(message, m.Values) and message.version < 0
        if message.bucket >= 0 and not final:
            space = cluster.map.spaces[cluster.map.buckets[message.bucket].space]
            wrong += [(sender, to, message)] if not space.on(worker.index) else []
    assert wrong == []
    said = [message.bucket for _, _, _, message in seen if isinstance(message, m.Init)]
    assert sorted(said) == [bucket.id for bucket in cluster.map.buckets]
