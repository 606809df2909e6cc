"""A small model, trained through `tt.data_parallel`: by hand as one of several shards, or under `topotrain run`."""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

import topotrain as tt

SAMPLES, BATCH, STEPS = 64, 16, 12
WORD = "REDIS_PASSWORD"


def shard(handler: object, number: int, count: int, workspace: str, interface: str = "lo") -> object:
    """A net like that of `topotrain run`; each shard starts from values of its own, which must not matter."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 40, generator=generator)
    y = x[:, :4].argmax(dim=1)
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 4))
    at = {"step": 0}

    def add_input(model: tt.data_parallel.Model) -> None:
        order = torch.arange(at["step"] * BATCH, (at["step"] + 1) * BATCH) % SAMPLES
        mine = order[number::count]
        model.batch = x[mine], y[mine]
        at["step"] += 1

    def forward(model: tt.data_parallel.Model, loss_scale: float) -> list[torch.Tensor]:
        images, labels = model.batch
        model.blobs["loss"] = nn.functional.cross_entropy(model(images), labels)
        return [model.blobs["loss"] * loss_scale]

    rendezvous = None
    if handler is not None:
        rendezvous = {"kv_handler": handler, "shard_id": number, "num_shards": count, "engine": "GLOO"}
        rendezvous["interface"] = interface
        rendezvous["exit_nets"] = [lambda: print(f"exit net of shard {number}", flush=True)]
    return tt.data_parallel.Parallelize(
        model,
        add_input,
        forward,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        [0],
        rendezvous,
        cpu_device=True,
        barrier_net_timeout_sec=100,
        workspace=workspace,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", type=int, default=-1, help="by hand; else under topotrain run")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--file", default="")
    parser.add_argument("--redis", type=int, default=0, help="port")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--dies", action="store_true", help="afterwards shard 1 of another start is killed")
    options = parser.parse_args()
    if options.shard < 0:
        shard(None, tt.rank(), options.shards, "").run(STEPS)
        return
    handlers = {}
    if options.redis:
        password = os.environ[WORD]
        handlers["redis"] = tt.data_parallel.RedisStoreHandler("127.0.0.1", options.redis, "Run/1", password=password)
    if options.file:
        handlers["file"] = tt.data_parallel.FileStoreHandler(options.file)
    for name, handler in handlers.items():
        net = shard(handler, options.shard, options.shards, name, options.interface)
        print(f"{name}: loss {tt.data_parallel.RunNet(net, STEPS):.6f}", flush=True)
        net.finalize()
        torch.save(net.model.module.state_dict(), Path(f"{name}-{options.shard}.pt"))
    if options.dies:
        net = shard(handlers["file"], options.shard, options.shards, "dies")
        net.run(3)
        if options.shard == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        net.run(10**6)


if __name__ == "__main__":
    main()
