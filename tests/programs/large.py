"""A table of --rows rows of 8 KB, every one of them touched; the peak of memory that processes may have is limited."""

import argparse
import resource
from contextlib import suppress

import torch
from torch import nn

import topotrain as tt

WIDTH, CHUNK, RATE = 2048, 1024, 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = tt.Embedding(None, WIDTH, init="zeros", optimizer=tt.kvstore.SGD(lr=RATE), name="large")
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) + self.bias


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:  # the limit is real: this process could not hold the table
        with suppress(RuntimeError):
            torch.ones(options.rows, WIDTH)
            raise AssertionError("the table fits into one process")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = tt.prepare(model, optimizer)
    for at in range(0, options.rows, CHUNK):
        optimizer.zero_grad()
        ids = torch.arange(at, min(at + CHUNK, options.rows)) * 1_000_003
        (model(ids) - ids[:, None] % 7).square().sum(dim=1).mean().mul(len(ids) / 2).backward()
        optimizer.step()

    def wrong() -> float:
        """How far rows are from where one step from 0 leads."""
        ids = torch.arange(0, options.rows, max(1, options.rows // 1000)) * 1_000_003
        with torch.no_grad():
            return float((model(ids) - RATE * (ids[:, None] % 7)).abs().max())

    tt.report(wrong=wrong, limit=float(limit))


if __name__ == "__main__":
    main()
