"""What second copies and checks cost a synchronous step: MLP of 10.5 M parameters, 2 workers, 2 servers, over TCP.

Rule: jobs that differ in one setting take turns on an idle machine. Second copies are meant for other hosts: here the
processes that hold them take their time from the same two cores, so the figure is what they cost where nothing is free.
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.record import run_table
from benchmarks.sides import Refused, Side, Sides, cluster

NAME, TITLE, GOALS = "safety", "What second copies and checks cost", ()

WHAT, STEPS = "a synchronous step, 2 workers, 2 servers, TCP, MLP of 10.5 M parameters", 20
HIDDEN = "grads: kHidden"
WAYS = {  # name -> (setting inside the cluster block, setting outside)
    "plain": ("", HIDDEN),
    "unchecked": ("", f"{HIDDEN} nonfinite: kAllow"),
    "copies": ("replicas: 2", HIDDEN),
    "visible": ("", ""),
    "visible copies": ("replicas: 2", ""),
}
RATIOS = (  # what, its way, the way without it, bound
    ("with second copies", "copies", "plain", "< 1.10"),
    ("with second copies, grads: kVisible", "visible copies", "visible", "< 1.10"),
    ("with its gradients checked (nonfinite: kSkip against kAllow)", "plain", "unchecked", ""),
)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="mlp", help="another one to see whether this works: small")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    with Sides() as sides:
        jobs: dict[str, Side] = {}
        try:
            for name, (inside, top) in WAYS.items():
                jobs[name] = sides.job(name, cluster(servers=2, inside=inside, top=top), 2, options.model, "kTcp")
        except Refused as reason:
            return [absent("", WHAT, "x", str(reason), "< 1.10")]
        found = interleave({name: lambda job=job: job.run(STEPS) for name, job in jobs.items()}, options.rounds)
    rows = []
    for what, way, without, bound in RATIOS:
        note = f"{found[without].median * 1e3:.1f} ms without; {options.rounds} turns of {STEPS} steps each"
        rows.append(row("", f"{WHAT}, {what}", found[way].over(found[without]), "x", bound, note))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
