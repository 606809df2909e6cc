"""A script that trains by order: it says hello on a socket and runs as many steps as it is told, then waits again.

So many sides stay alive side by side, take turns on an idle machine, and are measured without their start. Started by
`topotrain run` it is an ordinary script of topotrain; started by itself, with --peer, it is one of torch's.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import topotrain as tt
from benchmarks.models import Work, build

RATE, MOMENTUM = 0.01, 0.9
PERIOD = 16
"""Steps between two averages of the model."""


class Line:
    """JSON lines to and from whoever measures."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("r")

    def say(self, **words: Any) -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def orders(self) -> Iterator[dict[str, Any]]:
        for line in self._file:
            yield json.loads(line)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=RATE, fused=True)


def with_job(model: nn.Module, optimizer_of: Callable[[nn.Module], Optimizer] = sgd) -> tuple[nn.Module, Optimizer]:
    model, optimizer = tt.prepare(model, optimizer_of(model))
    return model, optimizer


def alone(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, sgd(model)


def no_update(model: nn.Module) -> tuple[nn.Module, None]:
    return model, None


def ddp(model: nn.Module, bucket_mb: int | None = None) -> tuple[nn.Module, Optimizer]:
    how = {"broadcast_buffers": False, "gradient_as_bucket_view": True, "bucket_cap_mb": bucket_mb}
    wrapped = nn.parallel.DistributedDataParallel(model, **how)
    return wrapped, sgd(wrapped)


def ddp_in_halves(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped, optimizer = ddp(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, optimizer


def averager(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    return model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=PERIOD))


def zero(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    kind = {"optimizer_class": SGD, "lr": RATE, "momentum": MOMENTUM, "fused": True}
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), parameters_as_bucket_view=True, **kind)


def fsdp(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = getattr(model, "blocks", model)  # units in which parameters are gathered
    for part in inner:
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    if inner is not model or list(model.parameters(recurse=False)):
        fully_shard(model, mesh=mesh)
    return model, SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, foreach=True)  # fused refuses its tensors


WAYS: dict[str, Callable[[nn.Module], tuple[nn.Module, Optimizer | None]]] = {
    "job": with_job,
    "job+adam": partial(with_job, optimizer_of=adam),
    "alone": alone,
    "no_update": no_update,
    "ddp": ddp,
    "ddp+4mb": partial(ddp, bucket_mb=4),
    "ddp+fp16": ddp_in_halves,
    "averager": averager,
    "ddp+nccl": ddp,
    "zero": zero,
    "fsdp": fsdp,
}
_MEETING = {**dict.fromkeys(("ddp", "ddp+4mb", "ddp+fp16", "averager", "zero", "fsdp"), "gloo"), "ddp+nccl": "nccl"}
"""Peers whose processes meet, and the backend by which they do."""


class Stepper:
    """A model that can take steps."""

    def __init__(self, work: Work, model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
        self._work, self._model, self._optimizer, self._device = work, model, optimizer, device
        self._done = 0

    def steps(self, count: int) -> float:
        """Take so many; returns the last loss."""
        for _ in range(count):
            if self._optimizer is None:
                self._model.zero_grad()
            else:
                self._optimizer.zero_grad()
            loss = self._work.loss(self._model, self._done)
            loss.backward()
            if self._optimizer is not None:
                self._optimizer.step()
            self._done += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return loss.item()

    def checksum(self) -> float:
        """A number that another result would not have: the mean magnitude of all parameters."""
        self._model.state_dict()  # waits for values that `pull: kLazy` still owes
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self._model.parameters()]
        total = torch.tensor(
            [sum(p.detach().double().abs().sum().item() for p in parts), sum(p.numel() for p in parts)]
        )
        if any(hasattr(p, "to_local") for p in self._model.parameters()):
            dist.all_reduce(total)
        return float(total[0] / total[1])


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process: the most that was ever resident, and its share of it now if users divide common pages."""
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)  # noqa: SIM115
    rollup = dict(line.split(":", 1) for line in open(f"/proc/{pid}/smaps_rollup") if ":" in line)  # noqa: SIM115
    return {"peak": int(status["VmHWM"].split()[0]) * 1024, "share": int(rollup["Pss"].split()[0]) * 1024}


def device_of(kind: str, peer: str, rank: int) -> torch.device:
    """The device of this process: as topotrain chooses it for a worker, and one GPU after the other for a peer."""
    if kind == "cpu":
        return torch.device("cpu")
    device = tt.device() if peer == "job" else torch.device("cuda", rank % max(1, torch.cuda.device_count()))
    if device.type != kind:
        raise RuntimeError(f"tt.device() is {device}: torch sees no GPU in this worker")
    torch.cuda.set_device(device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True, help="mlp, or mlp+adam with a job")
    parser.add_argument("--peer", default="job", choices=sorted(WAYS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--times", type=int, default=1, help="so many times the samples in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    line = Line(options.socket)
    options.model, _, optimizer = options.model.partition("+")
    way = options.peer + (f"+{optimizer}" if optimizer else "")
    rank = tt.rank() if options.peer == "job" else int(os.environ["RANK"])
    try:
        device = device_of(options.device, options.peer, rank)
        if options.peer in _MEETING:
            backend = _MEETING[options.peer]
            # The device is named, or NCCL would guess it from the rank when it is needed first.
            dist.init_process_group(backend, **({"device_id": device} if backend == "nccl" else {}))
        work = build(options.model, rank, options.times).to(device)
        stepper = Stepper(work, *WAYS[way](work.model), device)
        stepper.steps(1)
    except Exception as error:
        line.say(rank=rank, refused=f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    line.say(rank=rank, pid=os.getpid(), samples=work.samples, first=time.time())
    for order in line.orders():
        if "steps" in order:
            began = time.perf_counter()
            line.say(loss=stepper.steps(order["steps"]), seconds=time.perf_counter() - began)
        elif "check" in order:
            line.say(checksum=stepper.checksum(), **memory(os.getpid()))
        else:
            break
    if options.peer in _MEETING:
        os._exit(0)  # taking Gloo's group apart hangs at times


if __name__ == "__main__":
    main()
