"""Handwritten digits with `tt.Trainer`: the job file says how long, with which optimizer, when to test and to write.

python examples/trainer.py                                        # one process, as the same file says
topotrain run examples/conf/trainer.conf examples/trainer.py      # the job
"""

import torch
from digits import build_model, read_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import topotrain as tt


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of a batch that is named correctly."""
    return (output.argmax(dim=1) == target).float().mean()


def main() -> None:
    torch.manual_seed(0)
    train, test = read_digits()
    trainer = tt.Trainer(
        build_model(),
        loss=nn.CrossEntropyLoss(),
        train=DataLoader(train, batch_size=64, shuffle=True),
        test=DataLoader(test, batch_size=120),
        job="examples/conf/trainer.conf",  # counts only in plain `python`; under `topotrain run` its own file does
        metrics={"accuracy": accuracy},
    )
    trainer.fit()


if __name__ == "__main__":
    main()
