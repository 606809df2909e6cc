"""Models with tables: `sparse` has nn.Embedding(sparse=True), `served` has tt.Embedding; also in one process."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

STEPS, BATCH, ROWS, WIDTH = 20, 24, 20_000, 32


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

    def __init__(self) -> None:
        super().__init__()
        rule = tt.kvstore.SparseAdam(lr=0.01)
        self.words = tt.Embedding(ROWS, WIDTH, init="normal 0 1", optimizer=rule, name="words")
        self.line = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.line(self.words(ids).mean(dim=1))


def loader() -> DataLoader:
    """Samples of four words; the first one says what the answer is, and 100 words come again and again."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(100, (STEPS * BATCH // 2, 4), generator=rng)
    return DataLoader(TensorDataset(ids * 199, ids[:, 0] % 3), batch_size=BATCH)


def train(kind: str) -> tuple[nn.Module, list[float]]:
    """The usual loop; with tt.prepare in an ordinary process, too."""
    torch.manual_seed(5)
    model = {"sparse": Sparse, "served": Served}[kind]()
    if kind == "sparse":
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
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
    kind = sys.argv[1]
    model, _ = train(kind)
    ids, labels = loader().dataset.tensors

    @torch.no_grad()
    def loss() -> float:
        return float(nn.functional.cross_entropy(model(ids), labels))

    tt.report(loss=loss, rows=lambda: sum(s["rows"] for s in model.words.stats()) if kind == "served" else 0)


if __name__ == "__main__":
    main()
