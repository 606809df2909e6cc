"""A script that sleeps for every sample, with one slow worker, or with a pause of one worker now and then.

The slow worker sleeps four times as long. In every fifth step one worker sleeps four times as long, one worker
after the other. Worker (0,0) writes the seconds of the last epoch to a file. The first epoch warms up.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

SAMPLES, EPOCHS = 1280, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--slow", type=int, default=-1, help="number of the slow worker")
    parser.add_argument("--pauses", action="store_true")
    parser.add_argument("--per-sample", type=float, default=3.0, help="milliseconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Linear(32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(SAMPLES, 32), torch.randint(10, (SAMPLES,)))
    model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=options.batch, shuffle=True))
    each = options.per_sample / 1000 * (4 if tt.rank() == options.slow else 1)
    began, step = 0.0, 0
    for epoch in tt.epochs(EPOCHS):
        if epoch == EPOCHS - 1:
            began = time.perf_counter()
        for inputs, labels in loader:
            pauses = options.pauses and step % 5 == 0 and step // 5 % 4 == tt.rank()
            time.sleep(each * len(inputs) * (4 if pauses else 1))
            step += 1
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if tt.is_main():
        options.out.write_text(str(time.perf_counter() - began))


if __name__ == "__main__":
    main()
