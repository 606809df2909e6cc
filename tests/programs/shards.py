"""A small model, trained through `tt.data_parallel`: by hand as one of several shards, or under `topotrain run`."""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

import topotrain as tt

SAMPLES, BATCH, STEPS, SHARDS = 64, 16, 12, 2


def shard(handler: object, number: int, workspace: str) -> object:
    """A net like that of `topotrain run`; each shard starts from values of its own, which must not matter."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 40, generator=generator)
    y = x[:, :4].argmax(dim=1)
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 4))
    at = {"step": 0}

    def add_input(model: tt.data_parallel.Model) -> None:
        order = torch.arange(at["step"] * BATCH, (at["step"] + 1) * BATCH) % SAMPLES
        mine = order[number::SHARDS]
        model.batch = x[mine], y[mine]
        at["step"] += 1

    def forward(model: tt.data_parallel.Model, loss_scale: float) -> list[torch.Tensor]:
        images, labels = model.batch
        model.blobs["loss"] = nn.functional.cross_entropy(model(images), labels)
        return [model.blobs["loss"] * loss_scale]

    rendezvous = None
    if handler is not None:
        rendezvous = {"kv_handler": handler, "shard_id": number, "num_shards": SHARDS, "engine": "GLOO"}
        rendezvous["interface"] = "lo"
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
    parser.add_argument("--shard", type=int, default=-1, help="by hand, and shard 1 of a second start kills itself")
    number = parser.parse_args().shard
    if number < 0:
        shard(None, tt.rank(), "").run(STEPS)
        return
    handler = tt.data_parallel.FileStoreHandler("store")
    net = shard(handler, number, "file")
    print(f"loss {tt.data_parallel.RunNet(net, STEPS):.6f}", flush=True)
    net.finalize()
    torch.save(net.model.module.state_dict(), Path(f"file-{number}.pt"))
    net = shard(handler, number, "dies")
    net.run(3)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    net.run(10**6)


if __name__ == "__main__":
    main()
