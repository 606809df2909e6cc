"""What second copies, checks and TLS cost a synchronous step: MLP of 10.5 M parameters, 2 workers, 2 servers, TCP.

Rule: jobs that differ in one setting take turns on an idle machine. With two workers on two cores second copies take
their time from the cores of all others, so the figure is what they cost where nothing is free. With one worker
a core is free while it computes, and the second copies apply the last step on it. This stands for copies that have
cores of their own. What the copies compute is in the column of processor time in both.
"""

import argparse
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.record import run_table
from benchmarks.sides import Refused, Side, Sides, cluster

NAME, TITLE, GOALS = "safety", "What second copies, checks and TLS cost", ("P15",)

WHAT, STEPS = "a synchronous step, {} worker{}, 2 servers, TCP, MLP of 10.5 M parameters", 20
HIDDEN = "grads: kHidden"
WAYS = {  # name -> (setting inside the cluster block, setting outside)
    "plain": ("", HIDDEN),
    "unchecked": ("", f"{HIDDEN} nonfinite: kAllow"),
    "copies": ("replicas: 2", HIDDEN),
    "visible": ("", ""),
    "visible copies": ("replicas: 2", ""),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A row: what a step takes in one way, over what it takes in another one."""

    what: str
    way: str
    without: str
    goal: str = ""
    bound: str = ""
    workers: int = 2

    @property
    def title(self) -> str:
        return f"{WHAT.format(self.workers, 's' * (self.workers > 1))}, {self.what}"


RATIOS = (
    Ratio("with second copies, cores shared", "copies", "plain", "P15", "<= 1.15"),
    Ratio("with second copies, cores shared, grads: kVisible", "visible copies", "visible", "P15", "<= 1.15"),
    Ratio("with second copies, a core free for them", "copies", "plain", "P15", "<= 1.10", 1),
    Ratio("with its gradients checked (nonfinite: kSkip against kAllow)", "plain", "unchecked"),
)
UNDER_TLS = Ratio("under TLS, at an address that is not loopback", "", "")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="mlp", help="another one to see whether this works: small")


def address() -> str:
    """An address of this machine at which TLS is spoken: any that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError as error:
            raise Refused(f"this machine has no address but loopback ({error.strerror})") from None
        found = str(one.getsockname()[0])
    if found.startswith("127."):
        raise Refused("this machine has no address but loopback")
    return found


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows = []
    with Sides() as sides:
        for ratio in RATIOS:
            two = [partial(_job, sides, name, options.model, ratio.workers) for name in (ratio.without, ratio.way)]
            rows.append(_row(ratio, two, options.rounds))
        two = [partial(_units, sides, host, options.model) for host in (lambda: "127.0.0.1", address)]
        rows.append(_row(UNDER_TLS, two, options.rounds))
    return rows


def _job(sides: Sides, way: str, model: str, workers: int) -> Side:
    inside, top = WAYS[way]
    name = f"{way}, {workers}"
    conf = cluster(workers, servers=2, inside=inside, top=top)
    return sides.living.get(name) or sides.job(name, conf, workers, model, "kTcp")


def _units(sides: Sides, host: Callable[[], str], model: str) -> Side:
    where = host()
    return sides.units(f"at {where}", cluster(servers=2, top=HIDDEN), 4, 2, model, where)


def _row(ratio: Ratio, pair: Sequence[Callable[[], Side]], rounds: int) -> Row:
    """What the second one's step takes, over the first one's."""
    try:
        without, way = (make() for make in pair)
    except Refused as reason:
        return absent(ratio.goal, ratio.title, "x", str(reason), ratio.bound)
    found = interleave({"without": lambda: without.turn(STEPS), "with": lambda: way.turn(STEPS)}, rounds)
    spent = median(found["without"].processor) * 1e3
    note = (
        f"{found['without'].median * 1e3:.1f} ms and {spent:.0f} CPU ms without; {rounds} turns of {STEPS} steps each"
    )
    figure = found["with"].over(found["without"])
    return row(ratio.goal, ratio.title, figure, "x", ratio.bound, note).costing(found["with"])


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
