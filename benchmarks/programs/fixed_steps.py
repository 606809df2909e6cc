"""A script that takes 20 small steps from a fixed seed: everything in it is drawn from that seed, nothing from a clock.

`tests.soak.digests` runs it under many job files. `--model`, `--optimizer` and the other options choose which part of
the package the job exercises.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import topotrain as tt

SAMPLES, BATCH, EPOCHS = 110, 26, 4
"""Five steps in an epoch: shares of three workers are unequal, and the last batch is a small one."""
INPUTS, CLASSES, WORDS = 32, 10, 40


class Net(nn.Module):
    """Two hidden layers, wide enough that every server gets pieces of several parameters."""

    def __init__(self, between: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.fc1, self.between = nn.Linear(INPUTS, 96), between()
        self.fc2, self.fc3 = nn.Linear(96, 70), nn.Linear(70, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(torch.relu(self.fc2(self.between(self.fc1(x)))))
        return out


class WithLoss(Net):
    """Its forward returns the loss, as `schedule: k1F1B` needs it."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(super().forward(x), labels)


class Views(Net):
    """Placed by the script: the first layer on worker 0, the others on worker 1."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in ((0, self.fc1), (1, self.fc2), (1, self.fc3)):
            tt.place(layer, f"/job:worker/task:{number}")


class Words(Net):
    """A part of its input is looked up: in a weight whose gradient is sparse, or in a table of the servers."""

    def __init__(self, served: bool) -> None:
        super().__init__()
        if served:
            rule = tt.kvstore.Adagrad(lr=0.1)
            self.words = tt.Embedding(None, INPUTS, init="normal 0 1", optimizer=rule, name="words")
        else:
            self.words = nn.Embedding(WORDS, INPUTS, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.words((x[:, 0].abs() * 1000).long() % WORDS))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "norm": lambda: Net(lambda: nn.Sequential(nn.BatchNorm1d(96), nn.ReLU())),
    "dropout": lambda: Net(lambda: nn.Dropout(0.3)),
    "noisy": lambda: Net(lambda: nn.Sequential(nn.BatchNorm1d(96), nn.Dropout(0.3), nn.ReLU())),
    "loss": WithLoss,
    "views": Views,
    "sparse": lambda: Words(served=False),
    "served": lambda: Words(served=True),
    "bf16": lambda: Net().bfloat16(),
}

OPTIMIZERS: Mapping[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples one after the other, without indices."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._data)


CLIPS = {"visible": nn.utils.clip_grad_norm_, "hidden": tt.clip_grad_norm_}


def loop(model: nn.Module, optimizer: Any, loader: Any, options: argparse.Namespace) -> nn.Module:
    """The usual loop; with `--accumulate`, a step after so many batches; the rate falls with every epoch."""
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    gamma = 0.7 if options.optimizer else 1.0  # a job file's updater has a schedule of its own
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)
    for _ in tt.epochs(EPOCHS):
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(loader, 1):
            inside = isinstance(model, WithLoss)
            (model(inputs, labels) if inside else nn.functional.cross_entropy(model(inputs), labels)).backward()
            if number % options.accumulate == 0:
                if options.clip:
                    CLIPS[options.clip](model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=tuple(MODELS), default="plain")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="none: the updater of the job file")
    parser.add_argument("--clip", choices=tuple(CLIPS))
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stream", action="store_true", help="an iterable dataset")
    parser.add_argument("--trainer", action="store_true", help="tt.Trainer instead of the loop")
    parser.add_argument("--save", type=Path, help="in an ordinary process: where the parameters are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = MODELS[options.model]()
    rng = torch.Generator().manual_seed(options.seed + 1)
    inputs = torch.randn(SAMPLES, INPUTS, generator=rng).to(next(model.parameters()).dtype)
    samples = TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=rng))
    data: Any = Stream(samples) if options.stream else samples
    loader = DataLoader(data, batch_size=BATCH, shuffle=not options.stream)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters()) if options.optimizer else None
    if options.trainer:
        tt.Trainer(model, loss=nn.CrossEntropyLoss(), train=loader).fit()
    else:
        model = loop(model, optimizer, loader, options)
    if options.save:
        save_file(dict(model.state_dict()), options.save)


if __name__ == "__main__":
    main()
