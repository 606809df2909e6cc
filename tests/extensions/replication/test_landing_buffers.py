"""A second copy on the same host reads gradients in the memory of the first one, which receives the next ones there."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from replicated_cluster import ReplicatedCluster, flats_of
from replicated_deaths import CrashableCluster
from seeds import SOAK, every, seeds, soaked
from simulation import ScriptedWorker, job
from torch import Tensor

from topotrain.config.job import Apply, Compression, Grads, Pull
from topotrain.config.sharding import cut
from topotrain.config.topology import Address
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.extensions.replication.landing_buffers import LandingBuffers

pytestmark = pytest.mark.simulated

STEPS, LAG = 4, 0.02
"""The second copy takes up to ten times as long for a message as the network."""
MODES: dict[str, dict[str, Any]] = {
    "visible": {"grads": Grads.kVisible},
    "hidden": {"grads": Grads.kHidden},
    "on arrival": {"grads": Grads.kHidden, "apply": Apply.kOnArrival},
    "visible, kInt8": {"grads": Grads.kVisible, "compression": Compression.kInt8},
    "hidden, kE3M0": {"grads": Grads.kHidden, "compression": Compression.kE3M0},
    "hidden, kTopK": {"grads": Grads.kHidden, "compression": Compression.kTopK, "compression_ratio": 0.1},
    "lazy, kInt8": {"grads": Grads.kVisible, "pull": Pull.kLazy, "compression": Compression.kInt8},
    "on arrival, kFp16": {"grads": Grads.kHidden, "apply": Apply.kOnArrival, "compression": Compression.kFp16},
}


class LaggingCluster(ReplicatedCluster):
    lag, prompt = LAG, True


class PromptCluster(ReplicatedCluster):
    prompt = True


class LaggingMortals(CrashableCluster):
    lag, prompt = LAG, True


def script(worker: ScriptedWorker, mode: str) -> None:
    cluster: ReplicatedCluster = worker.cluster  # type: ignore[assignment]
    client = worker.client
    worker.visible = MODES[mode]["grads"] is Grads.kVisible
    worker.open(start=1.0)
    for step in range(STEPS):
        rng = torch.Generator().manual_seed(100 * step + worker.me.index)
        parts = [torch.randn(p.shape, generator=rng, dtype=getattr(torch, p.dtype)) for p in cluster.map.parameters]
        if "apply" in MODES[mode]:
            client.gradients.set_rates(b"")
            client.gradients.end_backward(worker.steps, 0, 1.0, worker.push(parts))
            worker.commit(revisions=())
        else:
            worker.step(parts)
    # Before the final values, which are not encoded.
    cluster.ends[worker.me] = [value.clone() for value in worker.values()]
    worker.finish()
    if worker.me.index == 0:
        client.values.fetch_final()
        client.buffers.final()
    lines = cluster.lifelines[worker.me]
    lines.leave()
    cluster.sim.wait(lambda: lines.left)


def run(
    mode: str,
    seed: int,
    kill: tuple[int, int] | None = None,
    kind: type[ReplicatedCluster] = LaggingCluster,
    loses: bool = False,
    again: int = 0,
) -> ReplicatedCluster:
    cluster = kind(job(workers=2, shards=2, **MODES[mode]), seed, kill, again)
    cluster.transport.loses = loses
    return cluster.play(partial(script, mode=mode))


@cache
def undisturbed(mode: str) -> list[Tensor]:
    """The values of a job in which no memory is shared."""
    return run(mode, 1, kind=ReplicatedCluster).values()


@cache
def moments(mode: str) -> dict[int, int]:
    return run(mode, 1).ticks


def is_right(cluster: ReplicatedCluster, mode: str) -> bool:
    expected = undisturbed(mode)
    copies = [flats_of(server) for index in range(2) for server in cluster.copies(index)]
    ends = [list(map(torch.equal, seen, next(iter(cluster.ends.values())))) for seen in cluster.ends.values()]
    pairs = zip(copies[::2], copies[1::2], strict=True)
    return (
        all(map(torch.equal, cluster.values(), expected))
        and all(all(map(torch.equal, first, second)) for first, second in pairs)
        and all(map(all, ends))
    )


LATER = ("visible, kInt8", "hidden, kE3M0", "hidden, kTopK", "on arrival, kFp16")
"""Modes whose encoding a copy that is made in the middle has, too: see below."""


@pytest.mark.parametrize("mode", soaked([mode for mode in MODES if mode not in LATER], LATER))
def test_a_copy_that_is_behind_reads_what_was_sent(mode: str) -> None:
    for seed in (each + 1 for each in seeds(5)[: 5 if SOAK else 2]):
        assert is_right(run(mode, seed), mode), seed


DIES = [(mode, number % 2) for number, mode in enumerate(MODES)]


@pytest.mark.parametrize(("mode", "process"), soaked(DIES[:3] + DIES[5:6], DIES[3:5] + DIES[6:]))
def test_either_process_may_die_at_each_moment_of_a_step(mode: str, process: int) -> None:
    """Of the first copy of one server and of the second one of the other, whose memory outlives the process."""
    for moment in every(2 + process, moments(mode)[process] + 1, 17):
        cluster = run(mode, 1, (process, moment), loses=moment % 2 == 0)
        assert cluster.deaths == 1
        assert is_right(cluster, mode), moment


ENCODED = [mode for mode in MODES if "compression" in MODES[mode]]


@pytest.mark.parametrize("mode", soaked(ENCODED[:1] + ENCODED[2:4], ENCODED[1:2] + ENCODED[4:]))
def test_a_copy_that_was_made_between_two_messages_encodes_as_the_first_one(mode: str) -> None:
    """The copy is made after a death, and sends the replies after another one."""
    deaths = 0
    kills = every(10, moments(mode)[0], 14)
    for moment in kills:
        cluster = run(mode, 1, (0, moment), again=5 + moment % 40)
        deaths += cluster.deaths
        assert is_right(cluster, mode), moment
    assert deaths > len(kills) // 2


def test_workers_and_servers_die_while_copies_are_behind() -> None:
    for seed in seeds(8):
        falls = ((0.02 + 0.01 * seed, seed % 2, 0.003),)
        cluster = LaggingMortals(job(2, 2, 2), seed, kill=(seed % 2, 150 + 60 * seed), falls=falls)
        cluster.run()
        assert cluster.deaths == 1 and cluster.worker_deaths
        assert not cluster.wrong(), seed


@pytest.mark.parametrize("process", [0, 1])
def test_no_reply_leaves_before_the_second_copy_has_its_event(process: int) -> None:
    for moment in every(20, 200, 7):
        assert is_right(run("hidden", 1, (process, moment), PromptCluster, loses=True), "hidden"), moment


# --- the choice --------------------------------------------------------------------------------------------------


@pytest.fixture
def flats() -> FlatBuffers:
    from simulation import SMALL

    return FlatBuffers(cut(SMALL, 1, 1), 0, PrivateMemory())


def test_two_buffers_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy is never so far behind that memory has to be allocated."""
    found: set[str] = set()
    choose = LandingBuffers.choose

    def watched(self: LandingBuffers, worker: Address, bucket: object, buffer: Tensor, flats: FlatBuffers) -> Tensor:
        chosen = choose(self, worker, bucket, buffer, flats)  # type: ignore[arg-type]
        spare = flats.view(f"spare {worker.group}/{worker.index}", bucket)  # type: ignore[arg-type]
        found.add("usual" if chosen is buffer else "spare" if chosen is spare else "new")
        return chosen

    monkeypatch.setattr(LandingBuffers, "choose", watched)
    for seed in (1, 2):
        run("hidden", seed)
        run("visible", seed)
    assert found == {"usual", "spare"}
