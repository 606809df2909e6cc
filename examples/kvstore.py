"""Handwritten digits with a key-value store: every worker pushes gradients and pulls values by itself.

    python examples/kvstore.py                                        # one process
    topotrain run examples/conf/downpour.conf examples/kvstore.py     # the same file, four workers and two servers

There is no `tt.prepare` here, so the servers know no model and no step: only keys.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import topotrain as tt


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, with a key-value store.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples per step and worker")
    parser.add_argument("--kind", default="dist_sync", choices=("dist_sync", "dist_async", "local"))
    options = parser.parse_args()

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = (images / 16).float(), labels.long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loss_of = nn.CrossEntropyLoss()

    kv = tt.kvstore.create(options.kind)
    keys = [name for name, _ in model.named_parameters()]
    values = [p.data for p in model.parameters()]
    kv.init(keys, values)
    kv.set_optimizer(tt.kvstore.SGD(lr=0.2, momentum=0.9), rescale_grad=1 / kv.num_workers)

    mine = torch.arange(kv.rank, 1437, kv.num_workers)  # this worker's samples; the last 360 are held out
    steps = 1437 // kv.num_workers // options.batch  # the same number on every worker
    for _ in range(options.epochs):
        order = mine[torch.randperm(len(mine))]
        for batch in order.split(options.batch)[:steps]:
            kv.pull(keys, out=values)
            model.zero_grad()
            loss_of(model(images[batch]), labels[batch]).backward()
            kv.push(keys, [p.grad for p in model.parameters()])

    def accuracy() -> float:
        kv.pull(keys, out=values)
        with torch.no_grad():
            return (model(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean().item()

    kv.barrier()
    tt.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
