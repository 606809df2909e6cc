"""Fragments that are exchanged in turn, while the workers go on: the bits of a reference in plain PyTorch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import mlp, run_hosted, run_local, vectors
from test_same_bits import OUTER, adamw, assert_same_bits, building, job, script
from torch import nn

from topotrain.config.job import ConfigError, Keep, TransportChoice
from topotrain.extensions.outer_optimizer.rounds import fragments_of

Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Islands:
    """Workers in one process that exchange one fragment at a time."""

    def __init__(self, groups: int, fragments: int, outer: str, keep: Keep, blend: float) -> None:
        torch.manual_seed(1)
        self.agreed = mlp()
        self.models = [copy.deepcopy(self.agreed) for _ in range(groups)]
        self.optimizers = [adamw(model.parameters()) for model in self.models]
        sizes = [p.nbytes for p in self.agreed.parameters()]
        found = fragments_of(sizes, fragments)
        self.members = [[i for i, its in enumerate(found) if its == number] for number in range(fragments)]
        parameters = list(self.agreed.parameters())
        self.outer = [OUTER[outer][1]([parameters[i] for i in members]) for members in self.members]
        self.keep, self.blend = keep, blend
        self.rounds = 0
        self.sent: list[list[torch.Tensor]] = []

    def step(self, batches: Batches) -> None:
        for model, optimizer, (x, y) in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    @property
    def now(self) -> list[int]:
        """The parameters of the next round."""
        return self.members[self.rounds % len(self.members)]

    @torch.no_grad()
    def push(self, last: bool = False) -> None:
        agreed, own = list(self.agreed.parameters()), [list(model.parameters()) for model in self.models]
        self.sent = [[mine[i].clone() for i in self.now] for mine in own]
        for i in self.now:
            total = agreed[i] - own[0][i]
            for mine in own[1:]:
                total = total + (agreed[i] - mine[i])
            agreed[i].grad = total / len(own)
            if last:
                agreed[i].sub_(agreed[i].grad)
        if not last:
            self.outer[self.rounds % len(self.members)].step()

    @torch.no_grad()
    def take(self, meanwhile: bool) -> None:
        agreed = list(self.agreed.parameters())
        for model, sent in zip(self.models, self.sent, strict=True):
            own = list(model.parameters())
            for i, then in zip(self.now, sent, strict=True):
                if not meanwhile or self.keep is Keep.kDrop:
                    own[i].copy_(agreed[i])
                elif self.keep is Keep.kBlend:
                    own[i].mul_(self.blend).add_(agreed[i], alpha=1 - self.blend)
                else:
                    own[i].copy_(own[i] - then + agreed[i])
        self.rounds += 1


def expected(
    batches: Batches,
    groups: int,
    sync_freq: int,
    fragments: int,
    overlap: int,
    keep: Keep,
    blend: float,
    make: type[Islands] = Islands,
) -> dict[str, torch.Tensor]:
    islands, interval = make(groups, fragments, "nesterov", keep, blend), sync_freq // fragments
    under_way, since = False, [0] * fragments
    for number in range(1, len(batches) // groups + 1):
        islands.step(batches[(number - 1) * groups : number * groups])
        since = [steps + 1 for steps in since]
        if under_way and number % interval == overlap:
            islands.take(True)
            under_way = False
        if number % interval == 0:
            since[islands.rounds % fragments] = 0
            islands.push()
            under_way = overlap > 0
            if not under_way:
                islands.take(False)
    if under_way:
        islands.take(True)
    while since[islands.rounds % fragments]:
        since[islands.rounds % fragments] = 0
        islands.push(last=True)
        islands.rounds += 1
    return {name: value.detach() for name, value in islands.agreed.named_parameters()}


CASES = [
    # sync_freq, fragments, overlap, keep
    (4, 2, 0, Keep.kAdd),
    (6, 3, 1, Keep.kAdd),
    (6, 1, 2, Keep.kAdd),
    (6, 2, 2, Keep.kBlend),
    (6, 2, 1, Keep.kDrop),
    (4, 4, 0, Keep.kAdd),
]


def cluster(case: tuple[int, int, int, Keep], **more: Any) -> Any:
    sync_freq, fragments, overlap, keep = case
    blend = {"blend": 0.25} if keep is Keep.kBlend else {}
    return job(sync_freq=sync_freq, fragments=fragments, overlap=overlap, keep=keep, **blend, **more)


def wanted(case: tuple[int, int, int, Keep], batches: Batches) -> dict[str, torch.Tensor]:
    sync_freq, fragments, overlap, keep = case
    return expected(batches, 3, sync_freq, fragments, overlap, keep, 0.25)


@pytest.mark.parametrize("steps", [24, 17, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_has_the_bits_of_the_reference(case: tuple[int, int, int, Keep], steps: int) -> None:
    batches = vectors(3 * steps)
    found = run_local(cluster(case), building(mlp, adamw), script(batches, 3))
    assert_same_bits(found.values, wanted(case, batches))


def test_transport_and_servers_change_no_bit(tmp_path: Path) -> None:
    batches, case = vectors(3 * 14), CASES[1]
    made = cluster(case, transport=TransportChoice.kTcp, nservers_per_group=3)
    found = run_hosted(made, building(mlp, adamw), script(batches, 3), tmp_path)
    assert_same_bits(found.values, wanted(case, batches))


def test_a_fragment_travels_alone() -> None:
    """An exchange of one of four parameters costs less than one of all."""

    def bytes_of(case: tuple[int, int, int, Keep]) -> int:
        batches = vectors(3 * 16)
        return sum(run_local(cluster(case), building(wide, adamw), script(batches, 3)).traffic)

    whole, parts = bytes_of((4, 1, 0, Keep.kAdd)), bytes_of((4, 4, 0, Keep.kAdd))
    assert parts < 1.4 * whole, (whole, parts)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 512), nn.Tanh(), nn.Linear(512, 5))


def test_more_fragments_than_parameters() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.fragments = 5: must be at most 4, the number of parameters"):
        run_local(cluster((5, 5, 0, Keep.kAdd)), building(mlp, adamw), script(vectors(3), 3))
