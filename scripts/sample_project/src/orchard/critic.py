"""Train a grader and a critic of its scores in one job; the critic's weights stay small, as in a Wasserstein GAN."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import topotrain as tt

from .fruits import fruits
from .network import Grader, accuracy

EPOCHS, LARGEST = 4, 0.1


def largest(model: nn.Module) -> float:
    """Return the largest weight of a model, without its sign."""
    return max(weight.detach().abs().max().item() for weight in model.parameters())


def main() -> None:
    torch.manual_seed(0)
    held_out = fruits(200, seed=2)
    grader, critic = Grader(), nn.Linear(2, 1)
    grading = torch.optim.SGD(grader.parameters(), lr=0.1)
    criticizing = torch.optim.Adam(critic.parameters(), lr=0.05)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(fruits(480, seed=1), batch_size=16, shuffle=True)
    loss_of = nn.CrossEntropyLoss()

    grader, critic, grading, criticizing, loader = tt.prepare(grader, critic, grading, criticizing, loader)
    for _ in tt.epochs(EPOCHS):
        for measures, kinds in loader:
            scores = grader(measures)
            criticizing.zero_grad()
            value: Tensor = critic(scores.detach()).mean()
            value.backward()  # type: ignore[no-untyped-call]
            criticizing.step()
            with tt.assign(critic):
                for weight in critic.parameters():
                    weight.data.clamp_(-LARGEST, LARGEST)
            grading.zero_grad()
            loss: Tensor = loss_of(scores, kinds)
            loss.backward()  # type: ignore[no-untyped-call]
            grading.step()
    tt.report(accuracy=lambda: accuracy(grader, held_out), largest=lambda: largest(critic))


if __name__ == "__main__":
    main()
