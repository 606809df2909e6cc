"""Key-value stores of all kinds in one script: every worker checks what it pulls.

`barrier`: worker 1 ends too soon. `model`: the script trains a model, too. `mortal MARK`: worker 1 kills itself once,
and the file MARK says that it has done so.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import topotrain as tt


def part(worker: int, step: int, *shape: int) -> torch.Tensor:
    """What a worker pushes in a step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * worker + step))


def synchronous(kv: "tt.kvstore.KVStore") -> None:
    n, rank = kv.num_workers, kv.rank
    kv.init(["sum", 1], [torch.full((5,), float(rank)), torch.zeros(3, 3, dtype=torch.int64)])
    assert kv.pull("sum").tolist() == [0.0] * 5  # what worker 0 said
    for turn in range(1, 4):
        kv.push(["sum", 1], [torch.full((5,), float(turn * (rank + 1))), torch.full((3, 3), rank + 1)])
        found, whole = kv.pull(["sum", 1])
        assert found.tolist() == [turn * n * (n + 1) / 2] * 5, found
        assert whole.unique().tolist() == [n * (n + 1) // 2]


def with_optimizer(kv: "tt.kvstore.KVStore") -> None:
    """The store has the values of one process that adds up everybody's gradients."""
    shapes = ((40, 7), (), (2, 3, 9000))
    expected = [torch.nn.Parameter(part(99, 0, *shape).double()) for shape in shapes]
    kv.init(["m", "s", "c"], [p.detach().clone() for p in expected])
    rule = tt.kvstore.SGD(lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
    kv.set_optimizer(rule, rescale_grad=1 / kv.num_workers)
    for step in range(5):
        rule.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.1 / (1 + step)
        kv.push(["m", "s", "c"], [part(kv.rank, step, *shape).double() for shape in shapes])
        for p, shape in zip(expected, shapes):
            p.grad = sum(part(worker, step, *shape).double() for worker in range(kv.num_workers)) / kv.num_workers
        plain.step()
        for value, p in zip(kv.pull(["m", "s", "c"]), expected):
            assert torch.allclose(value, p.detach(), rtol=1e-12, atol=1e-12)


def rows(kv: "tt.kvstore.KVStore") -> None:
    size = (1_000_000_000, 16)  # 64 GB if it were all there
    kv.init("table", torch.sparse_coo_tensor(size=size, check_invariants=True))
    kv.set_optimizer(tt.kvstore.Adagrad(lr=0.5))
    ids = torch.tensor([7, 1000 + kv.rank, 999_999_999])
    for _ in range(2):
        kv.push("table", torch.sparse_coo_tensor(ids[None], torch.ones(3, 16), size, check_invariants=True))
    found = kv.row_sparse_pull("table", row_ids=torch.tensor([7, 1000, 1000 + kv.num_workers - 1, 8]))
    assert found.indices()[0].tolist() == [7, 8, 1000, 999 + kv.num_workers]
    reference = torch.nn.Embedding(2, 16, sparse=True, _weight=torch.zeros(2, 16))
    rule = torch.optim.Adagrad(reference.parameters(), lr=0.5)
    for _ in range(2):
        rule.zero_grad()
        (reference(torch.tensor([0] * kv.num_workers + [1])).sum()).backward()
        rule.step()
    expected = reference.weight.detach()[0], torch.zeros(16), reference.weight.detach()[1], reference.weight.detach()[1]
    assert torch.allclose(found.values(), torch.stack(expected), rtol=1e-6)


def trains() -> None:
    """A few steps of a model between those of the stores: neither changes the other."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = tt.prepare(model, optimizer)
    norms = tt.kvstore.create("dist_async")
    norms.init("steps", torch.zeros(2).half())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        norms.push("steps", torch.ones(2).half())
    norms.barrier()
    assert norms.pull("steps").tolist() == [6.0 * norms.num_workers] * 2


def mortal(mark: Path) -> None:
    """Ten steps, in the middle of which worker 1 kills itself."""
    kv = tt.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(3, 4))
    kv.set_optimizer(tt.kvstore.SGD(lr=1.0))
    value = torch.zeros(3, 4)
    for step in range(10):
        kv.push("w", -torch.ones(3, 4))
        kv.pull("w", out=value)
        if kv.rank == 1 and step == 4 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if kv.rank == 0:
        print("value", value.unique().tolist(), flush=True)


def main() -> None:
    if "mortal" in sys.argv:
        mortal(Path(sys.argv[2]))
        return
    if "barrier" in sys.argv:
        kv = tt.kvstore.create("dist_async")
        if kv.rank != 1:
            kv.barrier()
        return
    waits, free = tt.kvstore.create("dist_sync"), tt.kvstore.create("dist_async")
    assert (waits.type, free.type, waits.rank) == ("dist_sync", "dist_async", tt.rank())
    free.init("seen", 0.0)
    for _ in range(10):
        free.push("seen", 1.0 + free.rank)
    synchronous(waits)
    with_optimizer(tt.kvstore.create("dist_sync"))
    rows(tt.kvstore.create("dist_sync"))
    own = tt.kvstore.create("local")
    own.init("mine", float(tt.rank()))
    assert float(own.pull("mine")) == tt.rank()
    if "model" in sys.argv:
        trains()
    free.barrier()
    n = free.num_workers
    assert float(free.pull("seen")) == 10 * n * (n + 1) / 2
    tt.report(seen=lambda: float(free.pull("seen")))


if __name__ == "__main__":
    main()
