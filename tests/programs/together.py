"""Values over the workers, in all the kinds that a script may have; prints what each worker got.

Modes: "agree" (all workers make all calls), "left out" and "report" (some leave one out), "buffers", or "dies": worker
1 kills itself once, between two calls behind a step, and the file of the second argument says that this has happened.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

mode = sys.argv[1]
me, odd = tt.rank(), tt.rank() % 2 == 1
settings = tt.broadcast(
    {"lr": 0.05, "sizes": [3, (1, None)], "mask": torch.arange(3) > 1} if me in (0, 2) else None,
    "group" if mode == "dies" else "job",
)
assert settings["sizes"] == [3, (1, None)] and settings["mask"].tolist() == [False, False, True]

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])


def step(x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def dies(once: Path) -> None:
    global model, optimizer
    loader = DataLoader(TensorDataset(torch.arange(48.0).reshape(12, 4) / 48), batch_size=2, shuffle=True)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    seen = 0.0
    for epoch in tt.epochs(4):
        for (x,) in loader:
            seen = tt.mean(step(x), weight=len(x))
            if epoch == 2 and me == 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        ranks = tt.gather(torch.tensor([me]), over="group").tolist()
    tt.report(seen=seen, ranks=len(ranks))


def with_buffers() -> None:
    """Only the main worker loads a state."""
    global model, optimizer
    model.register_buffer("shift", torch.zeros(3))
    model.register_buffer("count", torch.tensor(0))
    model.register_buffer("mask", torch.tensor([True, False, tt.is_main()]), persistent=False)
    model.register_buffer("table", torch.arange(9.0), persistent=False)
    if tt.is_main():
        model.load_state_dict({**model.state_dict(), "shift": torch.ones(3), "count": torch.tensor(7)})
    model, optimizer = tt.prepare(model, optimizer)
    optimizer.zero_grad()  # the job begins with the first use
    model(torch.ones(2, 4)).sum().backward()
    print(f"values buffers {me}: {[each.tolist() for each in model.buffers()]}", flush=True)


def every_call(over: str) -> list[object]:
    return [
        tt.mean(me + 0.5, over=over),
        tt.mean(float(me), weight=float(me), over=over) if over == "job" else 0.0,
        tt.mean(float("nan") if odd else 1.0, weight=0.0 if odd else 2.0, over=over),
        tt.sum(10**me, over=over),
        tt.sum(torch.tensor([True, odd]), over=over).tolist(),
        tt.max(me, over=over),
        tt.min(0.1 + me, over=over),
        tt.max(odd, over=over),
        tt.mean(torch.tensor([me, 1.0], dtype=torch.bfloat16), over=over).tolist(),
        tt.gather(torch.full((1 + me % 2, 1), me), over=over).flatten().tolist(),
        tt.gather(torch.zeros(me % 2, 2), over=over).shape[0],
        tt.broadcast(me, over=over),
        tt.sum(torch.full((5_000_000,), 1.0 + me), over=over)[-1].item(),
    ]


if mode == "dies":
    dies(Path(sys.argv[2]))
    sys.exit()
if mode == "buffers":
    with_buffers()
else:
    model, optimizer = tt.prepare(model, optimizer)
for turn in range(4):
    step(torch.ones(2, 4))
    if mode == "left out" and turn == 2 and odd:
        tt.mean(1.0)
if mode == "report":
    tt.report(late=lambda: tt.mean(1.0))
for over in ("group", "job") if mode == "agree" else ():
    print(f"values {over} {me}: {every_call(over)}", flush=True)
for _ in range(3):
    step(torch.ones(2, 4))
