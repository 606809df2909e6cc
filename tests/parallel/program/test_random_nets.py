"""Nets cut in any way, with the moves that the inference puts in, learn what the whole ones learn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from seeds import SOAK
from split_workers import Block, Group, learns_the_same, squares
from torch import nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.conv2(self.relu(self.conv1(x)))
        out += identity
        return self.relu(out)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(2, 4, 3, padding=1), Residual()
        self.pool, self.hidden, self.head = nn.MaxPool2d(2), nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.block(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class Masked(nn.Module):
    """Everything of torch that has a dropout inside; `probability` is what `Group`'s generator draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.memory = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.turned = nn.GRU(8, 4, num_layers=3, dropout=0.25, bidirectional=True)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.encoder(x) + self.attention(x, x, x)[0]
        x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)
        x = self.turned(self.memory(x)[0].transpose(0, 1))[0].transpose(0, 1)
        return self.last(nn.functional.dropout(x, 0.2)).mean(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = (part(x).view(n, length, 2, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, length, 8))


class Transformer(nn.Module):
    """With its last layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places, self.attention = nn.Embedding(11, 8), nn.Embedding(5, 8), Attention()
        self.norm1, self.norm2, self.up, self.down = (
            nn.LayerNorm(8),
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(len(tokens[0]), device=tokens.device))
        x = x + self.attention(self.norm1(x))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.head(x)


class Prompted(nn.Module):
    """Parameters of its own, one of which another module uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.fc, self.norm = nn.Parameter(torch.zeros(1, 2, 6)), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(torch.cat([self.prompt.expand(x.size(0), -1, -1), x[:, None]], 1)) @ self.fc.weight
        return self.norm(y.mean(1).reshape(x.size(0), -1)) * x


class Towers(nn.Module):
    """Two inputs, and a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.right = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.join = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        left, right = self.left(x), self.right(y)
        return {"joined": self.join(torch.cat([left, right], 1)), "near": ((left * right).sum(1), left)}


def mlp(n: int) -> tuple[Any, ...]:
    return (torch.randn(n, 6),)


def images(n: int) -> tuple[Any, ...]:
    return (torch.randn(n, 2, 4, 4),)


def tokens(n: int) -> tuple[Any, ...]:
    return (torch.randint(0, 11, (n, 5)),)


def pairs(n: int) -> tuple[Any, ...]:
    return torch.randn(n, 5), torch.randn(n, 3)


def both(output: dict[str, Any], *_: Any) -> torch.Tensor:
    return output["joined"].square().mean() + output["near"][0].square().mean() + output["near"][1].abs().mean()


NETS: dict[str, tuple[type[nn.Module], Callable[[int], tuple[Any, ...]], Callable[..., torch.Tensor]]] = {
    "mlp": (Mlp, mlp, squares),
    "cnn": (Cnn, images, squares),
    "transformer": (Transformer, tokens, squares),
    "towers": (Towers, pairs, both),
    "prompted": (Prompted, mlp, squares),
}


def same(name: str, places: dict[str, int], counts: list[int], **settings: Any) -> None:
    make, data, loss = NETS[name]
    torch.manual_seed(3)
    learns_the_same(make(), blocks_of(places), [data(count) for count in counts], loss, **settings)


def blocks_of(places: dict[str, int]) -> list[Block]:
    """-2: by samples; -1: by features; k: on worker k."""
    found = []
    for module, place in places.items():
        dim = 0 if place == -2 else 1 if place == -1 else -1
        found.append(Block(f"^{module}$", dim, place if place >= 0 else None))
    return found


def leaves(name: str) -> list[str]:
    model = NETS[name][0]()
    return [n for n, m in model.named_modules() if n and any(True for _ in m.parameters(recurse=False))]


@settings(
    max_examples=20 if SOAK else 2, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking would take minutes
@given(st.data())
@pytest.mark.parametrize("name", NETS)
def test_any_placement(name, data):
    workers = data.draw(st.integers(2, 3), label="workers")
    counts = data.draw(st.lists(st.integers(1, 4), min_size=workers, max_size=workers), label="samples")
    tied = ("embedding", "head")
    places = {leaf: data.draw(st.integers(-2, workers - 1), label=leaf) for leaf in leaves(name) if leaf not in tied}
    places |= {
        leaf: data.draw(st.sampled_from([-2, *range(workers)]), label=leaf) for leaf in tied if leaf in leaves(name)
    }
    micros = data.draw(st.integers(1, 3), label="micro-batches")
    same(name, places, counts, microbatches=micros)


class Nested(nn.Module):
    """Takes its tensors out of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        x, (y, _) = batch["x"], batch["more"]
        return self.last(torch.tanh(self.first(x)) + y)


def test_arguments_may_be_nested():
    torch.manual_seed(3)
    model = Nested()
    shares = [({"x": torch.randn(n, 6), "more": (torch.randn(n, 4), 1)},) for n in (3, 2)]
    group = Group(model, [Block("first", -1, 1)], shares, samples=(3, 2), microbatches=2)
    told = group.step(squares)
    batch = {"x": torch.cat([s[0]["x"] for s in shares]), "more": (torch.cat([s[0]["more"][0] for s in shares]), 1)}
    assert told == pytest.approx(squares(model(batch)).item(), rel=1e-6)


def test_the_masks_inside_attention_and_recurrent_layers_are_those_of_the_whole_batch() -> None:
    """On one worker each, by samples, and by features."""
    torch.manual_seed(3)
    blocks = [Block("attention|drop", location=0), Block("memory", location=1), Block("first|last", 1)]
    shares = [(torch.randn(count, 5, 6),) for count in (4, 3)]
    learns_the_same(Masked(), blocks, shares, seed=7, microbatches=2)
