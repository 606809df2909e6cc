"""A chain of square layers, --each on every worker of a group: the whole of it may be more than a process may have."""

import argparse
import resource
from contextlib import suppress

import torch
from torch import Tensor, nn

import topotrain as tt

STEPS, SAMPLES, RATE = 2, 4, 10.0  # a mean over many features has small gradients
LAST = "layers.{}.weight"


class Deep(nn.Module):
    def __init__(self, workers: int, each: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for worker in range(workers):
            with tt.device(f"/job:worker/task:{worker}"):
                for _ in range(each):
                    self.layers.append(nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)  # stays of the size that it has
        return x


def loss_of(output: Tensor) -> Tensor:
    return (output - 1.0).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--each", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:  # the limit is real: this process could not hold the model
        with suppress(RuntimeError):
            torch.ones(options.workers * options.each, options.width, options.width)
            raise AssertionError("the model fits into one process")
    torch.manual_seed(0)
    model: nn.Module = Deep(options.workers, options.each, options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = tt.prepare(model, optimizer)
    x = torch.randn(SAMPLES, options.width)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(x))  # without a loader a worker's samples are the script's business: here all the same
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = tt.state_dict(model)
    if state is not None:
        tt.report(stored=len(state), sum=state[LAST.format(options.workers * options.each - 1)].double().sum().item())
    tt.report(limit=float(limit), before=losses[0], loss=lambda: loss_of(model(x)).item())


if __name__ == "__main__":
    main()
