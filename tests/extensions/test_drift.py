"""A worker's copy of a parameter that loses bits ends the job, by the names of worker, parameter and step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import cross_entropy, mlp, run_hosted, run_local, vectors
from simulation import STORM, ScriptedCluster, ScriptedWorker, trace
from simulation import job as scripted_job

from topotrain.config.job import Cluster, Compression, Job, TransportChoice
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import layout
from topotrain.core.client.client import JobError
from topotrain.core.model.tensor_bits import bit_sum
from topotrain.extensions.drift import drift_check
from topotrain.extensions.drift.drift_check import DriftCheck, compares_copies
from topotrain.extensions.drift.drift_messages import CopySums

WRONG = r"worker 0/1 has other bits in parameter 2\.weight than server 0/\d, after 3 steps: memory, a card or a link"


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_check, "PERIOD_S", 0.0)
    monkeypatch.setattr(drift_check, "SHARE", float("inf"))


def build() -> Any:
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def training(flips: int | None = 3) -> Any:
    """A script of two workers; before step number `flips` a bit of worker 1's copy is another one."""

    def run(t: Any) -> None:
        t.worker.attach(DriftCheck(t.worker))
        for number, batch in enumerate(vectors(6)):
            if number == flips and t.me.index == 1:
                # The flat buffer, and not the parameter: no version and no page of the process tells of it.
                t.worker.buffers.view("params", 2).view(torch.uint8)[1, 7] ^= 16
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    return run


def pair(**cluster: Any) -> Job:
    return Job(cluster=Cluster(nworkers_per_group=2, **({"nservers_per_group": 2} | cluster)))


@pytest.mark.parametrize(
    "cluster",
    [{}, {"nserver_groups": 0, "nservers_per_group": 1}, {"transport": TransportChoice.kTcp}],
    ids=["servers", "all-reduce", "tcp"],
)
def test_a_flipped_bit_is_named(cluster: dict[str, Any], tmp_path: Path) -> None:
    if "transport" in cluster:
        with pytest.raises(JobError, match=WRONG):
            run_hosted(pair(**cluster), build, training(), tmp_path)
        return
    assert run_local(pair(**cluster), build, training(None)).values
    with pytest.raises(JobError, match=WRONG):
        run_local(pair(**cluster), build, training())


def pieces_of(slice_map: SliceMap, shard: int, values: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for bucket in slice_map.buckets_of(shard):
        for piece in bucket.pieces:
            segment = slice_map.segments[piece.segment]
            start = segment.start + piece.lo - segment.lo
            yield values[segment.parameter].reshape(-1)[start : start + piece.hi - piece.lo]


@pytest.mark.simulated
@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_messages_is_taken_for_a_drift(seed: int) -> None:
    """Also where the sums come behind the step that they were made before."""
    cluster = ScriptedCluster(scripted_job(1, 3, 2), seed, STORM)
    asked = trace(cluster, CopySums)

    def train(worker: ScriptedWorker) -> None:
        worker.open()
        for _ in range(6):
            for server in worker.client.channel.servers:
                sums = (bit_sum(value) for value in pieces_of(cluster.map, server.index, worker.values()))
                flat = tuple(number for pair in enumerate(sums) for number in pair)
                worker.client.channel.send(server, CopySums(worker.steps, flat))
            worker.step(worker.numbers())
        worker.finish()

    cluster.play(train)
    assert len(asked) >= 3 * 2 * 6 and all(message.sums for *_, message in asked if isinstance(message, CopySums))


def test_where_copies_are_compared() -> None:
    def compared(**cluster: Any) -> bool:
        hidden = {"grads": "kHidden", "per_worker_batch": True} if "backup" in cluster else {}
        job = Job(cluster=Cluster(**cluster), **hidden)  # type: ignore[arg-type]
        return compares_copies(job, layout(job.cluster))

    assert compared(nworkers_per_group=2) and compared(nworkers_per_group=2, nserver_groups=0)
    assert compared(nworker_groups=2, nserver_groups=0), "each group has servers of its own"
    for apart in (
        {"nworker_groups": 2},
        {"nworker_groups": 2, "nserver_groups": 2},
        {"nworkers_per_group": 3, "backup": 1},
        {"n_push": 2, "n_fetch": 2},
        {"nworkers_per_group": 2, "transport": TransportChoice.kTcp, "compression": Compression.kFp16},
    ):
        assert not compared(**apart), apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_each_bit_counts(dtype: torch.dtype) -> None:
    value = torch.ones(9).to(dtype)
    was = bit_sum(value)
    for byte in range(value.nbytes):
        for bit in range(8):
            value.view(torch.uint8)[byte] ^= 1 << bit
            assert bit_sum(value) != was
            value.view(torch.uint8)[byte] ^= 1 << bit
    assert bit_sum(value) == was
