"""A script that learns handwritten digits and notes how far it is: time, loss and accuracy, into a file.

Every worker draws its own batches from its own seed, and may rest before each step, which is how a slow machine is
pretended. Worker (0,0) looks at the model every few steps; the time that looking takes is not counted.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from benchmarks.models import cross_entropy, mlp, own_seconds


def images(kept: Path) -> list[Tensor]:
    """Images to learn from and images held out, then their labels; kept in a file, to spare others scikit-learn."""
    if kept.exists():
        return list(torch.load(kept))
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found, labels = load_digits(return_X_y=True)
    parts = train_test_split(found, labels, test_size=360, random_state=1, stratify=labels)
    tensors = [torch.from_numpy(part) for part in parts]
    own = kept.with_suffix(f".{os.getpid()}")  # several processes may be here at once
    torch.save(tensors, own)
    own.replace(kept)
    return tensors


def digits(wide: bool, kept: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,437 images to learn from and 360 held out, as rows of 64 numbers, or of 1,024 where each pixel is 4 x 4."""
    train_x, test_x, train_y, test_y = images(kept)

    def rows(x: Tensor) -> Tensor:
        x = ((x - 4.9) / 6.0).float().view(-1, 1, 8, 8)
        return (F.interpolate(x, scale_factor=4.0) if wide else x).flatten(1)

    return rows(train_x), train_y.long(), rows(test_x), test_y.long()


def batches(x: Tensor, y: Tensor, size: int, draw: torch.Generator) -> Iterator[list[Tensor]]:
    """Batches without end, with replacement."""
    while True:
        picked = torch.randint(len(x), (size,), generator=draw)
        yield [x[picked], y[picked]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--digits", type=Path, required=True, help="where they are kept, once somebody has loaded them")
    parser.add_argument("--model", choices=("small", "mlp"), default="small")
    parser.add_argument("--peer", choices=("job", "ddp"), default="job")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rest", type=float, default=0.0, help="milliseconds before each step")
    parser.add_argument("--slow", type=int, default=-1, help="this worker rests, and computes, four times as long")
    parser.add_argument("--slow-steps", type=int, default=0, help="and takes so many steps")
    parser.add_argument(
        "--loader", type=int, default=0, help="a loader of topotrain gives so many workers their batches"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = tt.rank() if options.peer == "job" else int(os.environ["RANK"])
    slow = rank == options.slow
    torch.manual_seed(options.seed)
    train_x, train_y, test_x, test_y = digits(options.model == "mlp", options.digits)
    model: nn.Module = mlp() if options.model == "mlp" else nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, fused=True)
    if options.peer == "ddp":
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    draw = torch.Generator().manual_seed(1000 * options.seed + rank)
    loader: Iterable[list[Tensor]] = batches(train_x, train_y, options.batch, draw)
    if options.loader:
        # One epoch, in which each worker has `--steps` batches.
        all_of_them = torch.Generator().manual_seed(1000 * options.seed)
        picked = torch.randint(len(train_x), (options.steps * options.loader * options.batch,), generator=all_of_them)
        loader = DataLoader(TensorDataset(train_x[picked], train_y[picked]), options.batch)
        model, optimizer, loader = tt.prepare(model, optimizer, loader)
    elif options.peer == "job":
        model, optimizer = tt.prepare(model, optimizer)
    steps = options.slow_steps if slow and options.slow_steps else options.steps
    rows = train_x[: options.batch], train_y[: options.batch]
    more = 3 * own_seconds(getattr(model, "module", model), cross_entropy, *rows) if slow else 0.0
    began, looking = time.perf_counter(), 0.0
    with open(options.out if rank == 0 else os.devnull, "w") as file:
        # A loader of topotrain must come to its own end.
        for step, (x, y) in enumerate(loader if options.loader else islice(loader, steps), 1):
            time.sleep(options.rest * (4 if slow else 1) / 1000 + more)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if rank == 0 and step % options.every == 0:
                now = time.perf_counter()
                with torch.no_grad():
                    inner = getattr(model, "module", model)
                    loss = F.cross_entropy(inner(train_x), train_y).item()
                    right = (inner(test_x).argmax(1) == test_y).float().mean().item()
                file.write(json.dumps([now - began - looking, step, loss, right]) + "\n")
                looking += time.perf_counter() - now
    if options.peer == "ddp":
        dist.barrier()
        os._exit(0)  # taking Gloo's group apart hangs at times


if __name__ == "__main__":
    main()
