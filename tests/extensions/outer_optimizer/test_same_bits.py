"""Rounds of an outer optimizer end with the bits of the example in plain PyTorch."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import Cnn, cross_entropy, images, mlp, run_hosted, run_local, vectors
from torch import nn

from topotrain.config.job import (
    ChangeMethod,
    Cluster,
    Job,
    LRGen,
    Slicing,
    TransportChoice,
    Updater,
    UpdaterType,
    Weigh,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "islands_by_hand.py"
ROUNDS, LEFT = 3, 1

Inner = Callable[[Any], torch.optim.Optimizer]
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def updater(kind: UpdaterType, rate: float, momentum: float = 0.0) -> Updater:
    return Updater(type=kind, momentum=momentum, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=rate))


OUTER = {
    "nesterov": (
        updater(UpdaterType.kNesterov, 0.7, 0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    ),
    "mean": (updater(UpdaterType.kSGD, 1.0), lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    "adam": (updater(UpdaterType.kAdam, 0.01), lambda parameters: torch.optim.Adam(parameters, lr=0.01)),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


def by_hand() -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location("islands_by_hand", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    train: Callable[..., None] = module.train
    return train


def data(groups: int, sync_freq: int, make: Callable[[int], Batches] = vectors) -> Batches:
    """Batches for some rounds, and for a last one with fewer steps."""
    return make(groups * (ROUNDS * sync_freq + LEFT))


def job(groups: int = 3, sync_freq: int = 4, outer: str = "nesterov", **cluster: Any) -> Job:
    apart = {"server_worker_separate": True, "sync_freq": sync_freq, "outer": OUTER[outer][0]}
    return Job(cluster=Cluster(nworker_groups=groups, **(apart | cluster)))


def script(batches: Batches, groups: int) -> Callable[[Any], None]:
    """Train each worker group on every `groups`-th batch."""

    def run(t: Any) -> None:
        for batch in batches[t.me.group :: groups]:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    return run


def building(model: Callable[[], nn.Module], inner: Inner) -> Callable[[], tuple[Any, ...]]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model()
        return made, inner(made.parameters())

    return build


def expected(
    batches: Batches, groups: int, sync_freq: int, outer: str = "nesterov", inner: Inner = adamw, model: Any = mlp
) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    agreed = model()
    parts = [batches[group::groups] for group in range(groups)]
    loss = nn.functional.cross_entropy
    by_hand()(agreed, inner, OUTER[outer][1](agreed.parameters()), loss, parts, sync_freq)
    return {name: value.detach() for name, value in agreed.named_parameters()}


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_the_example_has_at_most_forty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("outer", OUTER)
def test_a_job_has_the_bits_of_the_example(groups: int, outer: str) -> None:
    batches = data(groups, 4)
    found = run_local(job(groups, outer=outer), building(mlp, adamw), script(batches, groups))
    assert_same_bits(found.values, expected(batches, groups, 4, outer))
    assert [server.state.version for server in found.servers] == [ROUNDS + 1]


@pytest.mark.parametrize(
    "cluster",
    [
        {"nservers_per_group": 3},
        {"nservers_per_group": 2, "slicing": Slicing.kTensor},
        {"nworkers_per_procs": 3, "server_worker_separate": False},
        {"weigh": Weigh.kEqual},
        {"sync_freq": 1},
        {"sync_freq": 100},
    ],
    ids=str,
)
def test_the_layout_changes_no_bit(cluster: dict[str, Any]) -> None:
    sync_freq = cluster.get("sync_freq", 4)
    batches = data(3, 4)
    found = run_local(job(**cluster), building(mlp, adamw), script(batches, 3))
    assert_same_bits(found.values, expected(batches, 3, sync_freq))


@pytest.mark.parametrize(
    "inner",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.003, fused=True),
        lambda parameters: torch.optim.Rprop(parameters),
        lambda parameters: torch.optim.Adafactor(parameters),
    ],
    ids=["sgd", "fused adam", "rprop", "adafactor"],
)
def test_any_optimizer_may_be_the_inner_one(inner: Inner) -> None:
    """Also those that no server could run on a part of a tensor."""
    batches = data(2, 3)
    found = run_local(job(2, 3, nservers_per_group=2), building(mlp, inner), script(batches, 2))
    assert_same_bits(found.values, expected(batches, 2, 3, inner=inner))


def test_a_model_with_batch_norm_and_float64() -> None:
    def model() -> nn.Module:
        return Cnn().double()

    batches = [(x.double(), y) for x, y in data(2, 3, images)]
    found = run_local(job(2, 3), building(model, adamw), script(batches, 2))
    assert_same_bits(found.values, expected(batches, 2, 3, model=model))


def test_the_transport_changes_no_bit(tmp_path: Path) -> None:
    batches = data(3, 4)
    wanted = job(transport=TransportChoice.kShm, nservers_per_group=2)
    found = run_hosted(wanted, building(mlp, adamw), script(batches, 3), tmp_path)
    assert_same_bits(found.values, expected(batches, 3, 4))
