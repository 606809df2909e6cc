"""What second copies, checks and TLS cost a synchronous step: MLP of 10.5 M parameters, 2 workers, 2 servers, TCP.

Rule: jobs that differ in one setting take turns on an idle machine. Second copies are meant for other hosts: here the
processes that hold them take their time from the same two cores, so the figure is what they cost where nothing is free.
"""

import argparse
import socket
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.record import run_table
from benchmarks.sides import Refused, Side, Sides, cluster

NAME, TITLE, GOALS = "safety", "What second copies, checks and TLS cost", ()

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
        for what, way, without, bound in RATIOS:
            two = [partial(_job, sides, name, options.model) for name in (without, way)]
            rows.append(_ratio(what, bound, two, options.rounds))
        two = [partial(_units, sides, host, options.model) for host in (lambda: "127.0.0.1", address)]
        rows.append(_ratio("under TLS, at an address that is not loopback", "", two, options.rounds))
    return rows


def _job(sides: Sides, name: str, model: str) -> Side:
    inside, top = WAYS[name]
    return sides.living.get(name) or sides.job(name, cluster(servers=2, inside=inside, top=top), 2, model, "kTcp")


def _units(sides: Sides, host: Callable[[], str], model: str) -> Side:
    where = host()
    return sides.units(f"at {where}", cluster(servers=2, top=HIDDEN), 4, 2, model, where)


def _ratio(what: str, bound: str, pair: Sequence[Callable[[], Side]], rounds: int) -> Row:
    """What the second one's step takes, over the first one's."""
    title = f"{WHAT}, {what}"
    try:
        without, way = (make() for make in pair)
    except Refused as reason:
        return absent("", title, "x", str(reason), bound)
    found = interleave({"without": lambda: without.run(STEPS), "with": lambda: way.run(STEPS)}, rounds)
    note = f"{found['without'].median * 1e3:.1f} ms without; {rounds} turns of {STEPS} steps each"
    return row("", title, found["with"].over(found["without"]), "x", bound, note)


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
