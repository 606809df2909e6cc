"""The work that is timed: an MLP of 10.5 M parameters, a GPT of 12.2 M, a CNN of 11.2 M, and what is split.

Batches are drawn once, from the worker's own seed. Their sizes are chosen so that computing is most of a step: with two
workers on two cores DistributedDataParallel takes about 1.2 to 1.4 times what computing alone takes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES = 4
CHARACTERS = 103
"""Different characters in the text of the char model."""
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A model, its inputs and its targets -> a loss."""


@dataclass(frozen=True, slots=True)
class Work:
    """A model, the samples of one worker's step, and a function: number of the step -> loss."""

    model: nn.Module
    samples: int
    batches: tuple[tuple[Tensor, Tensor], ...]
    loss_of: LossOf

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of `model` (this one, or a wrapper of it) on the batch of a step."""
        inputs, targets = self.batches[step % len(self.batches)]
        return self.loss_of(model, inputs, targets)

    def to(self, device: torch.device) -> "Work":
        """The same work on another device."""
        batches = tuple((inputs.to(device), targets.to(device)) for inputs, targets in self.batches)
        return replace(self, model=self.model.to(device), batches=batches)


def mlp() -> nn.Module:
    sizes = [1024, 2048, 2048, 2048]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.inputs(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.between = nn.LayerNorm(width)
        self.forth = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.back(F.gelu(self.forth(self.between(x))))


class GPT(nn.Module):
    """Six blocks of width 384; the head has the weights of the embedding."""

    def __init__(self, words: int = 4096, length: int = 128, width: int = 384, heads: int = 6, depth: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.after = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.after(self.blocks(x)), self.words.weight)


class CharacterModel(nn.Module):
    """A transformer for text as characters: four blocks of width 96, and a head of its own."""

    def __init__(self, words: int = CHARACTERS, length: int = 64, width: int = 96, heads: int = 4, depth: int = 4):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.after = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.after(self.blocks(x)))
        return out


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        straight = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.side = nn.Identity() if same else straight

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.side(x))


def cnn() -> nn.Module:
    """ResNet-18 as it is used on images of 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(before, width, stride), Residual(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


SPLIT_SAMPLES = 1024
"""Of each of two workers that share a model of the width below."""
_INPUTS, _WIDTH, _CLASSES = 64, 512, 10


def _tower(*layers: nn.Module) -> nn.Sequential:
    """Layers, and three wide ones after them."""
    wide = [layer for _ in range(3) for layer in (nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))]
    return nn.Sequential(*layers, *wide)


class Branches(nn.Module):
    """Two equal towers over the same input, and a small head over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _tower(nn.Linear(_INPUTS, _WIDTH)), _tower(nn.Linear(_INPUTS, _WIDTH))
        self.head = nn.Linear(2 * _WIDTH, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], 1).relu())


class Stages(nn.Module):
    """Two towers of equal work, one after the other, the first behind a small layer and the second before one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _tower(nn.Linear(_INPUTS, _WIDTH)), _tower()
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(_WIDTH, _CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class StagesWithLoss(Stages):
    """The same with the loss inside, as `schedule: k1F1B` takes it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def _classes(samples: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, *shape), torch.randint(10, (samples,))


def _tokens(samples: int, length: int = 128, words: int = 4096) -> tuple[Tensor, Tensor]:
    text = torch.randint(words, (samples, length + 1))
    return text[:, :-1], text[:, 1:].reshape(-1)


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets)


def own_seconds(
    model: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> float:
    """The processor time of a forward and a backward here: the median of nine, of which no hook sees anything."""
    times = []
    for _ in range(9):
        began = time.thread_time()
        torch.autograd.grad(loss_of(model, x, y), [p for p in model.parameters() if p.requires_grad])
        times.append(time.thread_time() - began)
    return median(times)


@dataclass(frozen=True, slots=True)
class _Recipe:
    model: Callable[[], nn.Module]
    samples: int
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: LossOf = cross_entropy


_RECIPES: Mapping[str, _Recipe] = {
    "mlp": _Recipe(mlp, 80, lambda n: _classes(n, 1024)),
    "wide": _Recipe(lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), 8, lambda n: _classes(n, 4096)),
    "gpt": _Recipe(GPT, 2, _tokens),
    "char": _Recipe(CharacterModel, 8, lambda n: _tokens(n, 64, CHARACTERS)),
    "cnn": _Recipe(cnn, 4, lambda n: _classes(n, 3, 32, 32)),
    "small": _Recipe(lambda: nn.Sequential(nn.Linear(1024, 1060), nn.ReLU(), nn.Linear(1060, 32)), 8,
                     lambda n: _classes(n, 1024)),
    "branches": _Recipe(Branches, SPLIT_SAMPLES, lambda n: _classes(n, _INPUTS)),
    "stages": _Recipe(Stages, SPLIT_SAMPLES, lambda n: _classes(n, _INPUTS)),
    "stages with loss": _Recipe(StagesWithLoss, SPLIT_SAMPLES, lambda n: _classes(n, _INPUTS),
                                lambda model, inputs, targets: model(inputs, targets)),
}  # fmt: skip
TRAINED = ("mlp", "gpt", "cnn")


def build(name: str, rank: int, times: int = 1) -> Work:
    """The work of that name for worker `rank`, the same model for all.

    Args:
        name: "stages/2" has twice the samples of "stages".
        times: so many times the samples that suit a core of a processor.
    """
    name, _, more = name.partition("/")
    times *= int(more or 1)
    torch.manual_seed(0)
    recipe = _RECIPES[name]
    model = recipe.model()
    torch.manual_seed(1 + rank)
    samples = recipe.samples * times
    batches = tuple(recipe.batch(samples) for _ in range(BATCHES))
    return Work(model, samples, batches, recipe.loss)


def parameters(model: nn.Module) -> int:
    """Trainable elements."""
    return sum(parameter.numel() for parameter in model.parameters())
