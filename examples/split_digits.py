"""Handwritten digits with one model split over the workers of a group: an ordinary script, the conf says who has what.

python examples/split_digits.py                                          # one process
topotrain run examples/conf/hybrid.conf examples/split_digits.py         # convolutions by samples, fc by features
topotrain run examples/conf/pipeline.conf examples/split_digits.py       # two stages, one worker each
"""

import argparse

import torch
from digits import accuracy, read_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import topotrain as tt


class Net(nn.Module):
    """Few weights in the convolutions, and most of them in the first fully connected layer, as in AlexNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 128)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.relu(self.conv2(torch.relu(self.conv1(images))))
        hidden = torch.relu(self.fc1(nn.functional.max_pool2d(maps, 2).flatten(1)))
        return self.fc2(self.drop(hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, with a model that may be split.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all workers of a group together")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = read_digits()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True)
    loss_of = nn.CrossEntropyLoss()

    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()

    tt.report(accuracy=lambda: accuracy(model, test))  # the whole model again, in one process


if __name__ == "__main__":
    main()
