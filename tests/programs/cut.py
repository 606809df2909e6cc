"""A small CNN for 12 steps; the script may say where its parts are to be."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

SAMPLES, BATCH, EPOCHS = 96, 24, 3


class Net(nn.Module):
    def __init__(self, tagged: bool = False) -> None:
        super().__init__()
        with tt.device("/job:worker/task:0" if tagged else "/job:worker"):
            self.conv = nn.Conv2d(1, 4, 3)
            self.norm = nn.BatchNorm2d(4)
        with tt.device("/job:worker/task:1" if tagged else "/job:worker"):
            self.fc = nn.Linear(4 * 36, 10)
            self.out = nn.Linear(10, 5)

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.relu(self.norm(self.conv(images)))
        return self.out(torch.relu(self.fc(maps.flatten(1))))


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean())


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def trained_by_the_job(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    test = DataLoader(data(), batch_size=20, shuffle=True)
    tt.Trainer(model, nn.CrossEntropyLoss(), loader, test, optimizer=optimizer, metrics={"right": right}).fit()


def look(model: nn.Module, images: Tensor, file: Path) -> None:
    """What a script may do between two steps: take a file, and try the model without learning."""
    state = tt.state_dict(model)
    assert (state is not None) == tt.is_main()
    model.eval()
    with torch.no_grad():
        assert model(images).isfinite().all()
    model.train()
    if state is not None:
        save_file({name: value.contiguous() for name, value in state.items()}, file)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 5, (SAMPLES,), generator=generator))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tagged", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--look", type=Path)
    parser.add_argument("--one-looks", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    model = Net(options.tagged)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options.trainer:
        trained_by_the_job(model, optimizer)
        raise SystemExit
    train = data()
    model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(train, batch_size=BATCH, shuffle=True))
    for _ in tt.epochs(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            tt.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if options.look and (tt.is_main() or not options.one_looks):
            look(model, images, options.look)
    tt.report(accuracy=lambda: accuracy(model, train))
