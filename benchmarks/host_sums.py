"""P14: two hosts with four workers of one group each, and servers elsewhere, on a slow link.

The workers of a host are added up before the link, and one pull serves all of them. "Each for itself" is the same
layout with `transport: kTcp`, with which the workers of a host share no memory: all else is the same. The link is
pretended in user space, 1 Gbit/s in each direction of a unit. Bytes are those of all workers over it, out and in.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Row, Samples, absent, interleave, row
from benchmarks.models import build, parameters
from benchmarks.record import run_table
from benchmarks.sides import Side, Sides, cluster, gather

NAME, TITLE, GOALS = "host_sums", "Workers of a host, summed before the link", ("P14",)

MBIT, HOSTS, WORKERS = 1000, 2, 4
MODEL = "memory:41943040"  # computing of eight workers on the cores of one machine would hide the link
SUMMED, EACH, ONE = "4 workers per host, summed", "4 workers per host, each for itself", "1 worker per host"
WAYS = {"kVisible": "", "kHidden": "grads: kHidden"}


def conf(workers: int, top: str) -> str:
    """Two units of so many workers of one group, and two units of one server each."""
    inside = f"nworkers_per_procs: {workers} link {{ bandwidth: {MBIT} }}"
    return cluster(HOSTS * workers, HOSTS, inside=inside, top=top)


def begin(sides: Sides, model: str, top: str) -> tuple[dict[str, Side], dict[str, str]]:
    """The sides that could be started, and why the others could not."""

    def started(name: str, workers: int, transport: str) -> Side:
        return sides.job(f"{name} {top}", conf(workers, top), HOSTS * workers, model, transport)

    starts = {
        SUMMED: partial(started, SUMMED, WORKERS, "kAuto"),
        EACH: partial(started, EACH, WORKERS, "kTcp"),
        ONE: partial(started, ONE, 1, "kAuto"),
    }
    return gather(starts)


def bytes_per_step(side: Side, steps: int) -> float:
    """Bytes over the link in a step: what some more steps add, so that the start does not count."""
    before = side.ask(link=True)
    side.run(steps)
    after = side.ask(link=True)
    return sum(later["link"] - earlier["link"] for earlier, later in zip(before, after, strict=True)) / steps


def compare(model: str, way: str, rounds: int, steps: int) -> list[Row]:
    """Bytes and seconds of a step in all sides, and their ratios."""
    size = parameters(build(model, 0).model) * 4 / 2**20
    with Sides() as sides:
        living, missing = begin(sides, model, WAYS[way])
        # The first round does not count: the workers of a host are connected after a step or two.
        turns = {name: partial(side.turn, steps) for name, side in living.items()}
        found: dict[str, Samples] = interleave(turns, rounds) if turns else {}
        sent = {name: bytes_per_step(side, steps) for name, side in living.items()}
    what, mode = f"{HOSTS} hosts at {MBIT} Mbit/s, {model} of {size:.0f} MiB", f"{way}, kAtStep"
    rows: list[Row] = []
    for name in (ONE, EACH, SUMMED):
        if name in found:
            rows.append(row("", f"{what}: {name}, over the link", sent[name] / 1e6, "MB a step", "", "", mode))
            step = row("", f"{what}: {name}", found[name].figure.times(1e3), "ms", "", "", mode)
            rows.append(step.costing(found[name], size))
    least, bound = f"{what}: bytes over the link, summed over each for itself", "<= 0.26"
    fast, limit = f"{what}: a step, summed over each for itself", "<= 0.35"
    if SUMMED in found and EACH in found:
        rows.append(row("P14", least, sent[SUMMED] / sent[EACH], "×", bound, "", mode))
        rows.append(row("P14", fast, found[SUMMED].over(found[EACH]), "×", limit, "", mode))
    else:
        why = "; ".join(missing.values())
        rows += [absent("P14", least, "×", why, bound, mode), absent("P14", fast, "×", why, limit, mode)]
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--model", default=MODEL)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    return [each for way in WAYS for each in compare(options.model, way, options.rounds, options.steps)]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
