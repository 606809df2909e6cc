"""P13: the same 40 MiB as 10, 200 and 2,000 tensors, and a model of 400 tensors beside DDP.

Rule: processor time of all processes of a job counts, because more tensors cost Python, and not bytes. The values are
checked as in `exchange`. The update of a server is also measured by itself, for every optimizer that works on slices.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import models
from benchmarks.exchange import HIDDEN, MEGABYTES, PUSHER, STEPS, difference
from benchmarks.harness import Row, Samples, absent, interleave, row
from benchmarks.processor import Turn
from benchmarks.record import run_table, say
from benchmarks.sides import Side, Sides, attempt, cluster
from topotrain.config.sharding import ALIGN
from topotrain.core.optim.adapter import ELEMENTWISE, SliceUpdate, describe, hyper

NAME, TITLE, GOALS = "tensors", "Many tensors", ("P13",)

COUNTS = (10, 200, 2000)
BUCKETS, ELEMENTS = 40, 1 << 18
PIECES = (1, 50)
"""Tensors of a bucket, in an update by itself: 40 and 2,000 in all."""
PLAIN: Mapping[str, Any] = {"foreach": False}
UPDATES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("SGD", {"lr": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, **PLAIN}),
    ("Adam", {}),
    ("Adam", PLAIN),
    *((name, {}) for name in ELEMENTWISE if name not in ("SGD", "Adam")),
)
TRANSPORTS = {"kShm": "shared memory", "kTcp": "TCP"}
BOUND, BOUND_DDP = "<= 1.15", "<= 0.95"
DDP, OURS = "DDP", "AllReduce"


def _pushed(transport: str, rounds: int) -> list[Row]:
    """The rows of one transport: 2 workers and 1 server push, apply and pull."""
    with Sides() as sides:
        living: dict[str, Side] = {}
        missing: dict[str, str] = {}
        for count in COUNTS:
            start = lambda n=count: sides.job(  # noqa: E731
                f"{transport} {n}", cluster(top=HIDDEN), 2, f"step:{n}", transport, script=PUSHER
            )
            _keep(living, missing, str(count), attempt(start))
        found = _measured(living, rounds, STEPS)
        missing.update({name: wrong for name, side in living.items() if (wrong := difference(side))})
    least = str(COUNTS[0])
    rows = []
    for count in map(str, COUNTS):
        what = f"{TRANSPORTS[transport]}, 2 workers 1 server: {count} tensors, processor time"
        bound = "" if count == least else BOUND
        if why := missing.get(count) or missing.get(least):
            rows.append(absent("P13", what, f"× {least} tensors", why, bound, "kHidden, kAtStep"))
            continue
        mine, its = (Samples(found[name].processor) for name in (count, least))
        note = f"time {found[count].over(found[least]).value:.2f} ×"
        line = row("P13", what, mine.over(its), f"× {least} tensors", bound, note, "kHidden, kAtStep")
        rows.append(line.costing(found[count], MEGABYTES))
    return rows


def _trained(rounds: int) -> list[Row]:
    """A training step of the model of 400 tensors over shared memory."""
    what = "ViT of 400 tensors: AllReduce, shared memory"
    with Sides() as sides:
        living: dict[str, Side] = {}
        missing: dict[str, str] = {}
        conf = cluster(servers=2, separate=False)
        _keep(living, missing, DDP, attempt(sides.peer, "vit ddp", "ddp", 2, "vit"))
        _keep(living, missing, OURS, attempt(sides.job, "vit", conf, 2, "vit"))
        if missing:
            return [absent("P13", what, "× DDP", "; ".join(missing.values()), BOUND_DDP, "kVisible, kAtStep")]
        found = _measured(living, rounds, 4)
    ratio, size = found[OURS].over(found[DDP]), models.megabytes("vit")
    peer = row("", "ViT of 400 tensors: DDP, one step", found[DDP].figure.times(1e3), "ms")
    ours = row("P13", what, ratio, "× DDP", BOUND_DDP, "", "kVisible, kAtStep")
    return [peer.costing(found[DDP], size), ours.costing(found[OURS], size)]


class MeasuredUpdate:
    """The update of a server in this process: 40 MiB in buckets, with so many tensors in each."""

    def __init__(self, name: str, settings: Mapping[str, Any], pieces: int) -> None:
        # No multiple of a vector: each tensor has an end that a kernel computes by itself.
        size = ELEMENTS // pieces - 5
        every = -(-size // ALIGN) * ALIGN
        own = [torch.nn.Parameter(torch.zeros(size)) for _ in range(pieces)]
        optimizer = getattr(torch.optim, name)(own, **settings)
        spec, self._hyper = describe(optimizer, own), hyper(optimizer)
        self._updates = []
        for _ in range(BUCKETS):
            values, gradients = torch.rand(2, every * pieces)
            rows = [(i, i, values[i * every : i * every + size]) for i in range(pieces)]
            parts = {i: gradients[i * every : i * every + size] for i in range(pieces)}
            self._updates.append((SliceUpdate(spec, rows), parts))

    def turn(self) -> Turn:
        """One step."""
        began, spent = time.perf_counter(), time.process_time()
        for update, gradients in self._updates:
            update.apply(self._hyper, gradients)
        return Turn(time.perf_counter() - began, time.process_time() - spent)


def _updated(rounds: int) -> list[Row]:
    """The update by itself, for each optimizer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in servers
    rows = []
    for name, settings in UPDATES:
        sides = {str(count): MeasuredUpdate(name, settings, count) for count in PIECES}
        # The first steps make state, and lists of tensors.
        found = interleave({count: side.turn for count, side in sides.items()}, rounds, spare=3)
        few, many = (found[str(count)] for count in PIECES)
        ratio = Samples(many.processor).over(Samples(few.processor))
        told = "".join(f", {key} {value}" for key, value in settings.items() if key != "lr")
        text = f"update by {name}{told}: {BUCKETS * PIECES[1]} tensors, processor time"
        line = row("", text, ratio, f"× {BUCKETS * PIECES[0]} tensors")
        rows.append(line.costing(many, BUCKETS * ELEMENTS * 4 / 2**20))
    torch.set_num_threads(threads)
    return rows


def _keep(living: dict[str, Side], missing: dict[str, str], name: str, side: Side | str) -> None:
    if isinstance(side, Side):
        living[name] = side
    else:
        missing[name] = side
        say(f"  {name}: {side}")


def _measured(living: dict[str, Side], rounds: int, steps: int) -> dict[str, Samples]:
    turns: dict[str, Callable[[], Turn]] = {name: lambda s=side: s.turn(steps) for name, side in living.items()}
    return interleave(turns, rounds) if turns else {}


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """All rows."""
    rows: list[Row] = []
    for transport in TRANSPORTS:
        say(f"  {TRANSPORTS[transport]}")
        rows += _pushed(transport, options.rounds)
    say("  updates")
    rows += _updated(options.rounds)
    say("  ViT")
    return rows + _trained(options.rounds)


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, lambda parser: parser.add_argument("--rounds", type=int, default=5))
