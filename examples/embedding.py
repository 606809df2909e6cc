"""Who likes what: a table of users and a table of things, which live on the servers only.

python examples/embedding.py                                          # one process: the tables are here
topotrain run examples/conf/sandblaster.conf examples/embedding.py    # the tables are spread over two servers
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt


class Taste(nn.Module):
    """A score for a user and a thing: the inner product of their rows, plus what all have in common."""

    def __init__(self) -> None:
        super().__init__()
        rule = tt.kvstore.Adagrad(lr=0.2)
        self.users = tt.Embedding(None, 16, init="normal 0 0.1", optimizer=rule, name="users")  # any id >= 0
        self.things = tt.Embedding(1000, 16, init="normal 0 0.1", optimizer=rule, seed=1, name="things")
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users(user) * self.things(thing)).sum(dim=-1) + self.bias


def tastes(count: int = 4000) -> TensorDataset:
    """Made up: users with ids far apart like things whose number has the same remainder by 4."""
    dice = torch.Generator().manual_seed(0)
    users = torch.randint(300, (count,), generator=dice)
    things = torch.randint(1000, (count,), generator=dice)
    return TensorDataset(users * 1_000_003, things, (users % 4 == things % 4).float())


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn who likes what.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Taste()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # of the bias; the tables have their own
    loader = DataLoader(tastes(), batch_size=100, shuffle=True)
    loss_of = nn.BCEWithLogitsLoss()

    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    loss = torch.tensor(0.0)
    for _ in tt.epochs(options.epochs):
        for user, thing, liked in loader:
            optimizer.zero_grad()
            loss = loss_of(model(user, thing), liked)
            loss.backward()
            optimizer.step()

    tt.report(loss=loss.item(), users=lambda: sum(server["rows"] for server in model.users.stats()))


if __name__ == "__main__":
    main()
