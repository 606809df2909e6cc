"""Caffe2's way to start a job: the same program once per shard, by hand, here or on other hosts.

    python examples/caffe2_style.py --num_shards=2 --shard_id=0 --file_store_path=workspace/store
    python examples/caffe2_style.py --num_shards=2 --shard_id=1 --file_store_path=workspace/store

Alone (`python examples/caffe2_style.py`) it is an ordinary script.
"""

import argparse
import os

import torch
from digits import accuracy, build_model, read_digits
from torch import nn
from torch.utils.data import DataLoader, Subset

import topotrain as tt
from topotrain import data_parallel


def rendezvous_of(options: argparse.Namespace) -> dict[str, object] | None:
    if options.num_shards == 1:
        return None
    if options.redis_host:
        password = os.environ.get("REDIS_PASSWORD", "")
        store = data_parallel.RedisStoreHandler(
            options.redis_host, options.redis_port, options.run_id, password=password
        )
    else:
        store = data_parallel.FileStoreHandler(options.file_store_path, options.run_id)
    return dict(  # noqa: C408
        kv_handler=store,
        shard_id=options.shard_id,
        num_shards=options.num_shards,
        engine="GLOO",
        exit_nets=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, as a trainer of Caffe2 did.")
    parser.add_argument("--num_shards", type=int, default=1, help="how many processes; 1: this one, alone")
    parser.add_argument("--shard_id", type=int, default=0)
    parser.add_argument("--file_store_path", default="workspace/store", help="a directory that all shards see")
    parser.add_argument("--redis_host", default="", help="a Redis server, instead of a directory")
    parser.add_argument("--redis_port", type=int, default=6379)
    parser.add_argument("--run_id", default="", help="tells runs apart that share a directory or a server")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per step, over all shards together")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = read_digits()
    batch = options.batch_size // options.num_shards

    def add_input(model: data_parallel.Model) -> DataLoader:
        mine = range(options.shard_id, len(train), options.num_shards)
        return DataLoader(Subset(train, mine), batch_size=batch, shuffle=True, drop_last=True)

    def add_forward_pass(model: data_parallel.Model, loss_scale: float) -> list[torch.Tensor]:
        images, labels = model.batch
        loss = nn.functional.cross_entropy(model(images), labels)
        return [loss * loss_scale]

    def add_optimizer(model: data_parallel.Model) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)

    model = build_model()
    net = data_parallel.Parallelize(
        model,
        input_builder_fun=add_input,
        forward_pass_builder_fun=add_forward_pass,
        optimizer_builder_fun=add_optimizer,
        devices=[0],
        rendezvous=rendezvous_of(options),
        optimize_gradient_memory=True,
        cpu_device=True,
    )
    data_parallel.RunInitNet(net)
    for _ in range(options.epochs):
        data_parallel.RunNet(net, len(train) // options.batch_size)
    tt.report(accuracy=lambda: accuracy(model, test))


if __name__ == "__main__":
    main()
