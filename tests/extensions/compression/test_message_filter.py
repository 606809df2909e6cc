"""Compression inside a job: it trains, nothing is lost or counted twice, and workers of a group stay equal."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import (
    Result,
    Trainer,
    WorkerHandle,
    building,
    cross_entropy,
    job_of,
    mlp,
    run_hosted,
    run_local,
    usual_loop,
    vectors,
)
from pairwise import pairwise
from torch import nn

from topotrain.config.job import Cluster, Compression, Job
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import FlatBuffers, PrivateMemory, slice_map_for
from topotrain.core.protocol import ProtocolError, Push, ReducedGradient, Values
from topotrain.extensions.compression.error_feedback import codec_for
from topotrain.extensions.compression.message_filter import ServerEncoding, WorkerEncoding

KINDS = ("kFp16", "kBf16", "kInt8", "kTopK")
SYNCHRONOUS = ("sandblaster", "allreduce", "two by two", "serverless", "one")
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "downpour": {"nworker_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2, "server_worker_separate": True},
    "hogwild": {"nworker_groups": 2, "nworkers_per_group": 2, "nserver_groups": 2},
    "barrier": {"nworker_groups": 2, "nworkers_per_group": 2, "max_staleness": 0},
}
BATCHES = vectors(4) * 3


def compressed(kind: str, name: str = "sandblaster", **changes: Any) -> Job:
    changes = ASYNCHRONOUS.get(name, {}) | changes
    return job_of(name if name not in ASYNCHRONOUS else "one", compression=kind, compression_ratio=0.2, **changes)


def loss_of(result: Result) -> float:
    model = result.workers[0].model if result.workers else None
    assert model is not None
    return sum(float(cross_entropy(model, x, y).detach()) for x, y in BATCHES[:4]) / 4


def train(job: Job, step: Callable[[Any, Any], None], **more: Any) -> Result:
    """Run a job whose workers of a group must have the same parameters after each step."""
    notes: dict[tuple[Address, int], torch.Tensor] = {}

    def script(t: WorkerHandle) -> None:
        for number, batch in enumerate(BATCHES):
            step(t, batch)
            notes[t.me, number] = nn.utils.parameters_to_vector(t.model.parameters()).detach().clone()

    found = run_local(job, building(**more), script)
    assert len(notes) == len(found.workers) * len(BATCHES)
    for (me, number), values in notes.items():
        first = notes[Address(Role.WORKER, me.group, 0), number]
        assert torch.equal(values.view(torch.uint8), first.view(torch.uint8)), (me, number)
    return found


def usual_step(t: WorkerHandle, batch: Any) -> None:
    t.optimizer.zero_grad()
    t.backward(t.losses(cross_entropy, *batch))
    t.optimizer.step()


def two_backwards(t: WorkerHandle, batch: Any) -> None:
    t.optimizer.zero_grad()
    for half in (0, 1):
        t.backward([0.5 * loss for loss in t.losses(cross_entropy, *(part[half * 6 : half * 6 + 6] for part in batch))])
    t.optimizer.step()


def clipping(t: WorkerHandle, batch: Any) -> None:
    """The script changes gradients, which then travel as they are."""
    t.optimizer.zero_grad()
    t.backward(t.losses(cross_entropy, *batch))
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    t.optimizer.step()


def fetching(t: WorkerHandle, batch: Any) -> None:
    """As after a rest: values are fetched between two steps."""
    usual_step(t, batch)
    if t.worker.committed % 5 == 3:
        t.exchange.values.fetch()


UNCOMPRESSED = cache(lambda name: train(job_of(name), usual_step))
EACH_KIND = [("sandblaster", kind) for kind in KINDS]
EACH_LAYOUT = [(name, ("kInt8", "kTopK")[number % 2]) for number, name in enumerate(SYNCHRONOUS[1:])]


@pytest.mark.parametrize(("name", "kind"), EACH_KIND + EACH_LAYOUT)
def test_a_synchronous_job_trains_nearly_as_without(name: str, kind: str) -> None:
    expected, found = UNCOMPRESSED(name), train(compressed(kind, name), usual_step)
    if kind == "kTopK":
        assert loss_of(found) < loss_of(expected) + 0.1
    else:
        assert found.distance(expected) < {"kFp16": 1e-4, "kBf16": 1e-3, "kInt8": 3e-3}[kind]
    assert not found.same_bits(expected)  # else nothing was compressed


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (usual_step, {"apply": "kOnArrival", "grads": "kHidden", "name": "downpour", "max_staleness": 0}),
        (two_backwards, {"grads": "kHidden"}),
        (clipping, {}),
        (fetching, {"name": "barrier"}),
        (usual_step, {"warmup_steps": 3, "name": "barrier"}),
    ],
)
def test_every_way_of_a_step(step: Callable[[Any, Any], None], changes: dict[str, Any]) -> None:
    found, expected = (train(compressed(kind, **changes), step) for kind in ("kFp16", "kNone"))
    assert found.distance(expected) < 1e-4


@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, (torch.float64, torch.bfloat16) * 2, strict=True)))
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    def step(t: WorkerHandle, batch: Any) -> None:
        usual_step(t, (batch[0].to(dtype), batch[1]))

    train(compressed(kind), step, model=lambda: mlp().to(dtype))


def test_transports_and_runs_give_the_same_bits(tmp_path: Path) -> None:
    found = [run_local(compressed("kTopK"), building(), usual_loop(BATCHES))]
    for transport in ("kShm", "kTcp"):
        (tmp_path / transport).mkdir()
        job = compressed("kTopK", transport=transport)
        found.append(run_hosted(job, building(), usual_loop(BATCHES), tmp_path / transport))
    assert all(found[0].same_bits(other) for other in found[1:])


@pytest.mark.parametrize(("kind", "look", "ways"), [("kTopK", True, 3), ("kInt8", False, 2)])
def test_traffic_is_what_the_arithmetic_says(kind: str, look: bool, ways: int) -> None:
    """Pushes, values and the means that the script reads are encoded, and nothing else has other bytes."""

    def script(t: Trainer) -> None:
        for batch in BATCHES:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            assert not look or all(p.grad.isfinite().all() for p in t.model.parameters())
            t.optimizer.step()

    short = run_local(compressed(kind), building(), script)
    long = run_local(job_of(), building(), script)
    slice_map = long.workers[0].worker.map
    saved = 0
    for bucket in slice_map.buckets:
        codec = codec_for(Compression(kind), torch.float32, 0.2)
        assert codec is not None
        saved += 4 * (bucket.hi - bucket.lo) - codec.size(bucket.hi - bucket.lo)
    assert long.traffic[0] - short.traffic[0] == saved * ways * 3 * len(BATCHES)


def test_a_worker_alone_for_some_steps_pushes_encoded_and_is_sent_values_as_they_are() -> None:
    """n_push, n_fetch: it changes its parameters itself, so differences to what it was shown would be wrong."""
    results = {
        kind: run_local(job_of("one", compression=kind, n_push=2, n_fetch=2), building(), usual_loop(BATCHES))
        for kind in ("kNone", "kFp16")
    }
    assert results["kFp16"].distance(results["kNone"]) < 1e-4
    numel = sum(b.hi - b.lo for b in results["kNone"].workers[0].worker.map.buckets)
    saved = results["kNone"].traffic[0] - results["kFp16"].traffic[0]
    assert saved == 2 * numel * len(BATCHES) // 2


# --- nothing is lost, nothing counts twice -------------------------------------------------------------------------


class Whole(nn.Module):
    """Its gradients are whole numbers that the batch names: sums of them are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(150))
        self.b = nn.Parameter(torch.zeros(10, 20))
        self.frozen = nn.Parameter(torch.ones(30), requires_grad=False)

    def forward(self, number: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        """d loss / d a[i] = sum of number · (i % 7); b takes part for samples that have a flag, if there are any."""
        loss = (self.a * (torch.arange(150) % 7)).sum() * number.sum()
        if not flag.any():
            return loss
        return loss + (self.b.reshape(-1) * (torch.arange(200) % 5)).sum() * (number * flag).sum()


def whole_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def whole_loss(model: nn.Module, number: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    return model(number, flag)


def numbers(steps: int, samples: Sequence[int] = (6,), silent: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of whole numbers, with b's gradient missing on some workers or on all; then silent ones, in which what is
    left arrives."""
    rng = torch.Generator().manual_seed(3)
    loud = []
    for step in range(steps):
        size = samples[step % len(samples)]
        flags = torch.randint(2, (size,), generator=rng) * (step % 4 > 0)
        loud.append((torch.randint(-3, 4, (size,), generator=rng).float(), flags.float()))
    return loud + [(torch.zeros(6), torch.ones(6))] * silent


def total(batches: list[tuple[torch.Tensor, torch.Tensor]], groups: int = 1) -> dict[str, torch.Tensor]:
    """What all the batches come to: each group reads all of them."""
    a = sum(float(number.sum()) for number, _ in batches) * groups
    b = sum(float((number * flag).sum()) for number, flag in batches) * groups
    return {
        "a": -a * (torch.arange(150) % 7).float(),
        "b": -b * (torch.arange(200) % 5).float().reshape(10, 20),
        "frozen": torch.ones(30),
    }


def assert_total(found: Result, expected: dict[str, torch.Tensor]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found.values[name], values, rtol=0, atol=0)


def whole_numbers(job: Job, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Result:
    return run_local(job, building(Whole, whole_sgd), usual_loop(batches, whole_loss))


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        *pairwise(
            ("sandblaster", "downpour", "hogwild"),
            ("kFp16", "kTopK"),
            ({"grads": "kVisible"}, {"grads": "kHidden"}),
        ),
        ("sandblaster", "kTopK", {"apply": "kOnArrival", "grads": "kHidden"}),
        ("downpour", "kFp16", {"apply": "kOnArrival", "grads": "kHidden"}),
    ],
)
def test_whole_numbers_arrive_once(name: str, kind: str, changes: dict[str, Any]) -> None:
    """kFp16 holds them exactly. kTopK sends a fifth of them: the rest drains while there is nothing new."""
    batches, job = numbers(8), compressed(kind, name, reduce="kSum", **changes)
    assert_total(whole_numbers(job, batches), total(batches, layout(job.cluster).worker_groups))
    early = numbers(8, silent=0)
    # Else this would not test anything.
    if kind == "kTopK" and name == "sandblaster" and "apply" not in changes:
        assert not torch.equal(whole_numbers(job, early).values["a"], total(early)["a"])


@pytest.mark.parametrize("grads", ["kVisible", "kHidden"])
def test_a_sample_that_does_not_count_leaves_nothing_for_later(grads: str) -> None:
    """Two samples for three workers: one of these computes on a sample that is another's, and counts again later."""
    batches = numbers(6, samples=(2, 6))
    assert_total(whole_numbers(compressed("kTopK", grads=grads, reduce="kSum"), batches), total(batches))


@pytest.mark.parametrize("kind", ["kInt8", "kTopK"])
def test_the_servers_update_with_the_mean_that_the_workers_see(kind: str) -> None:
    seen: dict[Address, torch.Tensor] = {}

    def script(t: WorkerHandle) -> None:
        t.backward(t.losses(cross_entropy, *BATCHES[0]))
        seen[t.me] = torch.cat([p.grad.reshape(-1) for p in t.model.parameters() if p.grad is not None])
        t.optimizer.step()

    first = torch.cat([p.detach().reshape(-1) for p in run_local(job_of(), building(), lambda t: None).values.values()])
    found = run_local(compressed(kind), building(optimizer=whole_sgd), script)
    last = torch.cat([p.reshape(-1) for p in found.values.values()])
    for gradient in seen.values():
        assert torch.equal(first - gradient, last)
    if kind == "kTopK":
        assert 0.1 < float((gradient != 0).float().mean()) < 0.3


@pytest.mark.parametrize(("name", "backwards"), [("sandblaster", 1), ("one", 2)])
def test_loss_scaling(name: str, backwards: int) -> None:
    """The scale grows and shrinks, some steps are skipped: what is left follows the scale, and forgets the skipped."""
    batches = numbers(14)

    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        model = Whole()
        return model, whole_sgd(model), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def script(t: WorkerHandle) -> None:
        (scaler,) = t.more
        for step, batch in enumerate(batches):
            t.optimizer.zero_grad()
            for number in range(backwards):
                last = t.me.index == t.topology.workers_per_group - 1
                bad = float("inf") if step in (2, 9) and last else 1.0
                t.backward(
                    [scaler.scale(loss * bad) for loss in t.losses(whole_loss, (number + 1) * batch[0], batch[1])]
                )
            scaler.step(t.optimizer)
            scaler.update()
            t.notes[step] = scaler.get_scale()

    found = run_local(compressed("kTopK", name, reduce="kSum"), build, script)
    scales = {step: scale for step, scale in found.workers[0].notes.items() if isinstance(step, int)}
    assert scales[2] < scales[1] and scales[9] < scales[8] and max(scales.values()) > 64
    counted = [batch for step, batch in enumerate(batches) if step not in (2, 9)]
    assert_total(found, total(counted * (1 if backwards == 1 else 3)))  # the second one counts twice


# --- one resident alone --------------------------------------------------------------------------------------------

PARAMETERS = (Parameter("a", (700,), (1,), "float32", True), Parameter("n", (64,), (1,), "int64", False))


def resident(kind: str = "kInt8") -> tuple[Cluster, SliceMap, WorkerEncoding, ServerEncoding, FlatBuffers, FlatBuffers]:
    cluster = Cluster(compression=Compression(kind), compression_ratio=0.1)
    slice_map = slice_map_for(PARAMETERS, layout(cluster))
    below, above = (FlatBuffers(slice_map, shard, PrivateMemory()) for shard in (None, 0))
    worker = WorkerEncoding(cluster, slice_map, below, adds=False)
    return cluster, slice_map, worker, ServerEncoding(cluster, slice_map, 0, above), below, above


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_sizes_are_refused(kind: str) -> None:
    _, slice_map, worker, server, _, above = resident(kind)
    floats, whole = slice_map.buckets
    me = Address(Role.WORKER, 0, 0)
    like = above.view("values", floats)
    room = server.landing(me, floats)
    codec = codec_for(Compression(kind), torch.float32, 0.1)
    assert room is not None and codec is not None
    assert room.numel() == codec.size(floats.hi - floats.lo) < 4 * like.numel()
    assert server.landing(me, whole) is None
    for body in (room[:-4], torch.zeros(room.numel() + 4, dtype=torch.uint8), like.view(torch.uint8)):
        with pytest.raises(ProtocolError, match="not an encoding"):
            server.push(me, Push(0, 1, floats.id, 1.0, b"\1", body=body), floats, like)
        with pytest.raises(ProtocolError, match="not an encoding"):
            worker.mean(floats, body)
        with pytest.raises(ProtocolError, match="not an encoding"):
            worker.values(floats, body)
    with pytest.raises(ProtocolError, match="without a body"):
        server.push(me, Push(0, 1, floats.id, 1.0, b"\1"), floats, like)


def test_what_no_codec_takes_travels_as_it_is() -> None:
    _, slice_map, worker, server, _, above = resident()
    whole = slice_map.buckets[1]
    body = torch.arange(whole.hi - whole.lo)
    assert worker.push(whole, 1.0, 1, body) is body
    like = above.view("values", whole)
    assert server.push(Address(Role.WORKER, 0, 0), Push(0, 1, whole.id, 1.0, b"\1", body=body), whole, like) is body
    assert server.mean_body(0, whole, body) is body
    server.show(0, whole, body, anew=False)
    assert server.difference(0, whole) is None
    assert not worker.is_coded(ReducedGradient(0, 0, whole.id, b"\1"), whole)
    with pytest.raises(ProtocolError, match="never is"):
        worker.is_coded(Values(0, whole.id, 1, coded=True), whole)


def test_a_push_sent_twice_is_decoded_once() -> None:
    _, slice_map, worker, server, _, above = resident("kFp16")
    bucket, me = slice_map.buckets[0], Address(Role.WORKER, 0, 0)
    like = above.view("values", bucket)
    first = worker.push(bucket, 1.0, 1, torch.ones(like.numel())).clone()
    second = worker.push(bucket, 1.0, 1, torch.full((like.numel(),), 2.0)).clone()
    for ordinal, body, seen in ((1, first, 1.0), (2, second, 2.0), (1, first, 2.0)):
        found = server.push(me, Push(0, ordinal, bucket.id, 1.0, b"\1", body=body), bucket, like)
        assert float(found[0]) == seen
