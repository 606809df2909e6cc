"""Models with tables: `sparse` has nn.Embedding(sparse=True), `served` has tt.Embedding; also in one process."""

import argparse
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

STEPS, BATCH, ROWS, WIDTH = 20, 24, 20_000, 32
RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}


class Sparse(nn.Module):
    """A bag of words, and a line over it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.line = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.line(self.words(ids).mean(dim=1))


class Served(nn.Module):
    """The same over a table on the servers."""

    def __init__(self, rule: str, rows: int | None = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        kind = {"sgd": tt.kvstore.SGD, "adagrad": tt.kvstore.Adagrad, "adam": tt.kvstore.SparseAdam}[rule]
        rate = {"sgd": 0.5, "adagrad": 0.1, "adam": 0.01}[rule]
        self.words = tt.Embedding(rows, width, init="normal 0 1", optimizer=kind(lr=rate), name="words")
        self.line = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.line(self.words(ids).mean(dim=1))


class Only(nn.Module):
    """Nothing but a sparse weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


def loader() -> DataLoader:
    """Samples of four words; the first one says what the answer is, and 100 words come again and again."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(100, (STEPS * BATCH // 2, 4), generator=rng)
    return DataLoader(TensorDataset(ids * 199, ids[:, 0] % 3), batch_size=BATCH)


def build(kind: str, rule: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = {"sparse": Sparse, "only": Only, "served": partial(Served, rule)}[kind]()
    if kind == "only":
        return model, RULES[rule](model.parameters())
    dense = "sgd" if rule == "adam" or kind == "served" else rule
    return model, RULES[dense](model.parameters())


def train(kind: str, rule: str) -> tuple[nn.Module, list[float]]:
    """The usual loop; with tt.prepare in an ordinary process, too."""
    model, optimizer = build(kind, rule)
    model, optimizer, batches = tt.prepare(model, optimizer, loader())
    losses = []
    for _ in tt.epochs(2):
        for ids, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("sparse", "only", "served"))
    parser.add_argument("rule", choices=tuple(RULES))
    options = parser.parse_args()
    model, _ = train(options.kind, options.rule)
    ids, labels = loader().dataset.tensors

    @torch.no_grad()
    def loss() -> float:
        return float(nn.functional.cross_entropy(model(ids), labels))

    tt.report(loss=loss, rows=lambda: sum(s["rows"] for s in model.words.stats()) if options.kind == "served" else 0)


if __name__ == "__main__":
    main()
