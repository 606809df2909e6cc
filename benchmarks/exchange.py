"""P1, P2 and P3: 40 MB of gradients pushed, summed, applied and pulled, without a backward around it.

Rule: the sides are real processes and a worker's real client (benchmarks/programs/pusher.py); all end with the value
that plain SGD has after as many steps, or have no figure.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Row, Samples, absent, interleave, row
from benchmarks.processor import Turn
from benchmarks.programs.pusher import ELEMENTS, MOMENTUM, RATE, SLOPE, TENSORS
from benchmarks.record import run_table, say
from benchmarks.sides import Side, Sides, attempt, cluster

NAME, TITLE, GOALS = "exchange", "40 MB pushed, applied and pulled", ("P1", "P2", "P3")

PUSHER = Path(__file__).parent / "programs" / "pusher.py"
PLAIN = Path(__file__).parent / "programs" / "plain_server.py"
STEPS = 10
MEGABYTES = TENSORS * ELEMENTS * 4 / 2**20
TOLERANCE = 1e-5
COPIES, GLOO_STEP, PROGRAM = "two copies + update", "Gloo all-reduce + step", "a plain program"
OVER_PROGRAM = "<= 1.2"
"""80 CPU ms where a plain program took 64 to 70: the goal of P2, for a machine of any speed."""

ARRIVAL = "grads: kHidden apply: kOnArrival"
HIDDEN = "grads: kHidden"


@dataclass(frozen=True, slots=True)
class Work:
    """A job of `workers` workers; `bounds` are (peer, bound), and `processor` is that of the CPU ms of a step."""

    goal: str
    what: str
    workers: int
    transport: str
    mode: str
    bounds: Mapping[str, str]
    processor: str = ""


WORKS = (
    Work("P1", "shared memory, 1 worker 1 server", 1, "kShm", ARRIVAL, {COPIES: "<= 0.5"}),
    Work("P1", "shared memory, 2 workers 1 server", 2, "kShm", ARRIVAL, {COPIES: "<= 0.8", GLOO_STEP: "<= 0.25"}),
    Work("P1", "shared memory, 2 workers 1 server", 2, "kShm", HIDDEN, {COPIES: "", GLOO_STEP: ""}),
    Work("P1", "shared memory, 2 workers 1 server", 2, "kShm", "", {COPIES: "", GLOO_STEP: ""}),
    Work("P2", "TCP, 1 worker 1 server", 1, "kTcp", ARRIVAL, {COPIES: "<= 1.3"}),
    Work("P2", "TCP, 2 workers 1 server", 2, "kTcp", ARRIVAL, {COPIES: "<= 2.6", GLOO_STEP: "<= 0.70"}),
    Work("P2", "TCP, 2 workers 1 server", 2, "kTcp", HIDDEN, {COPIES: "", GLOO_STEP: ""}, "<= 80"),
    Work("P2", "TCP, 2 workers 1 server", 2, "kTcp", "", {COPIES: "", GLOO_STEP: ""}),
)
RANKS = (2, 3, 4)


def name_of(work: Work) -> str:
    """What a side is called."""
    return f"{work.what}, {mode_of(work)}"


def mode_of(work: Work) -> str:
    """The mode in words."""
    return {ARRIVAL: "kHidden, kOnArrival", HIDDEN: "kHidden, kAtStep", "": "kVisible, kAtStep"}[work.mode]


def expected(steps: int) -> float:
    """The value of every parameter after so many steps of SGD with momentum and a constant gradient."""
    value, velocity = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for _ in range(steps):
        velocity = velocity * MOMENTUM + SLOPE
        value -= RATE * velocity
    return float(value)


def difference(side: Side, reduce: bool = False) -> str:
    """Why a side's figure does not count; empty if it does."""
    for answer in side.ask(check=True):
        wanted = SLOPE if reduce else expected(answer["steps"])
        if abs(answer["value"] - wanted) > TOLERANCE * abs(wanted):
            return f"wrong values: {answer['value']:.9g} where {wanted:.9g} was due"
    return ""


def _take(living: dict[str, Side], why: dict[str, str], name: str, start: Callable[..., Side], *args: object) -> None:
    found = attempt(start, *args)
    if isinstance(found, Side):
        living[name] = found
    else:
        why[name] = found
        say(f"  {name}: {found}")


def _exchanges(rounds: int) -> list[Row]:
    with Sides() as sides:
        living: dict[str, Side] = {}
        why: dict[str, str] = {}
        _take(living, why, COPIES, sides.plain, COPIES, PUSHER, "copies", 1)
        _take(living, why, GLOO_STEP, sides.plain, GLOO_STEP, PUSHER, "gloo step", 2)
        _take(living, why, PROGRAM, sides.plain, PROGRAM, PLAIN, "plain", 3)
        for work in WORKS:
            conf = cluster(workers=work.workers, top=work.mode)
            start = lambda w=work, c=conf: sides.job(name_of(w), c, w.workers, "step", w.transport, script=PUSHER)  # noqa: E731
            _take(living, why, name_of(work), start)
        found = interleave({name: _turn(side) for name, side in living.items()}, rounds)
        why.update({name: wrong for name, side in living.items() if (wrong := difference(side))})
    return [line for work in WORKS for line in _rows(work, found, why)]


def _turn(side: Side) -> Callable[[], Turn]:
    return lambda: side.turn(STEPS)


def _rows(work: Work, found: Mapping[str, Samples], why: Mapping[str, str]) -> list[Row]:
    mine = name_of(work)
    lines = []
    for peer, bound in work.bounds.items():
        text = f"{work.what}, over {peer}"
        missing = why.get(mine) or why.get(peer)
        if missing:
            lines.append(absent(work.goal, text, "x", missing, bound, mode_of(work)))
            continue
        theirs = median(found[peer].processor) * 1e3
        note = f"{found[mine].median * 1e3:.1f} ms; {peer} {found[peer].median * 1e3:.1f} ms, {theirs:.0f} CPU ms"
        line = row(work.goal, text, found[mine].over(found[peer]), "x", bound, note, mode_of(work))
        lines.append(line.costing(found[mine], MEGABYTES))
    if work.processor and mine not in why:
        spent = Samples(found[mine].processor).figure.times(1e3)
        text = f"{work.what}, processor time of a step"
        lines.append(row(work.goal, text, spent, "CPU ms", work.processor, mode=mode_of(work)))
        lines.append(_over_program(work, text, found, why))
    return lines


def _over_program(work: Work, text: str, found: Mapping[str, Samples], why: Mapping[str, str]) -> Row:
    """The processor time over that of a program with the same bytes and kernels, and nothing else."""
    what = f"{text}, over {PROGRAM} with plain sockets"
    if PROGRAM in why:
        return absent(work.goal, what, "x", why[PROGRAM], OVER_PROGRAM, mode_of(work))
    its = Samples(found[PROGRAM].processor)
    ratio = Samples(found[name_of(work)].processor).over(its)
    note = f"{PROGRAM}: {its.median * 1e3:.0f} CPU ms, {found[PROGRAM].median * 1e3:.1f} ms"
    return row(work.goal, what, ratio, "x", OVER_PROGRAM, note, mode_of(work))


def _all_reduces(ranks: int, rounds: int) -> list[Row]:
    text = f"40 MB all-reduce, {ranks} ranks on one host, over Gloo's"
    with Sides() as sides:
        living: dict[str, Side] = {}
        why: dict[str, str] = {}
        conf = cluster(workers=ranks, servers=ranks, separate=False)
        _take(living, why, "gloo", sides.plain, "gloo", PUSHER, "gloo reduce", ranks)
        _take(living, why, "ours", lambda: sides.job("ours", conf, ranks, "reduce", script=PUSHER))
        if why:
            return [absent("P3", text, "x", "; ".join(why.values()), "<= 0.25", "kVisible")]
        found = interleave({name: _turn(side) for name, side in living.items()}, rounds)
        wrong = difference(living["ours"], reduce=True)
    if wrong:
        return [absent("P3", text, "x", wrong, "<= 0.25", "kVisible")]
    note = f"{found['ours'].median * 1e3:.1f} ms; Gloo {found['gloo'].median * 1e3:.1f} ms"
    line = row("P3", text, found["ours"].over(found["gloo"]), "x", "<= 0.25", note, "kVisible")
    return [line.costing(found["ours"], MEGABYTES)]


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """All rows."""
    rows = [] if options.ranks else _exchanges(options.rounds)
    for ranks in options.ranks or RANKS:
        say(f"  {ranks} ranks")
        rows += _all_reduces(ranks, options.rounds)
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="only the all-reduce, with so many ranks")


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, _options)
