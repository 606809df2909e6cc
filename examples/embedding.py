"""Who likes what: a table of users and a table of things, which live on the servers only.

    python examples/embedding.py                                          # one process: the tables are here
    topotrain run examples/conf/sandblaster.conf examples/embedding.py    # the tables are spread over two servers

The model learns a row of 16 numbers for each user and each thing from pairs that somebody has judged. In the end it
judges pairs that nobody has shown it, and recommends things to some users.
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


USERS, THINGS, FAR = 300, 300, 1_000_003


def tastes(count: int, seed: int) -> TensorDataset:
    """Made up: users with ids far apart like things whose number has the same remainder by 4, with some exceptions."""
    made = torch.Generator().manual_seed(seed)
    users = torch.randint(USERS, (count,), generator=made)
    things = torch.randint(THINGS, (count,), generator=made)
    exceptions = torch.rand(count, generator=made) < 0.05
    return TensorDataset(users * FAR, things, ((users % 4 == things % 4) ^ exceptions).float())


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of pairs of which the model knows whether the user likes the thing."""
    users, things, liked = data.tensors
    return ((model(users, things) > 0) == liked.bool()).float().mean().item()


@torch.no_grad()
def recommend(model: nn.Module, user: int, count: int = 8) -> list[int]:
    """The things with the highest scores for a user."""
    things = torch.arange(THINGS)
    return model(torch.full_like(things, user * FAR), things).topk(count).indices.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn who likes what.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Taste()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # of the bias; the tables have their own
    loader = DataLoader(tastes(20_000, seed=1), batch_size=100, shuffle=True)
    held_out = tastes(2_000, seed=2)
    loss_of = nn.BCEWithLogitsLoss()

    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(options.epochs):
        for user, thing, liked in loader:
            optimizer.zero_grad()
            loss_of(model(user, thing), liked).backward()
            optimizer.step()

    def result() -> float:
        """Called once, with the final tables of the job."""
        for user in range(4):
            print(f"user {user} likes things 4 n + {user}; recommended: {recommend(model, user)}", flush=True)
        return accuracy(model, held_out)

    tt.report(accuracy=result, users=lambda: sum(server["rows"] for server in model.users.stats()))


if __name__ == "__main__":
    main()
