"""What a topology brings on a slow link.

topotrain's link is pretended in user space (`cluster { link }`), DDP's by the kernel (a token bucket between network
namespaces): the same bandwidth for each host, in and out. Without root DDP's step is computed from its bytes, and the
row says so. DDP's time to an accuracy is its steps to it, counted on the fast link, times its measured step.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Row, Samples, absent, interleave, ratio, row
from benchmarks.learning import ddp, first, job
from benchmarks.link import Namespaces
from benchmarks.models import build, parameters
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster, gather

MBIT = 100
LINK = f"link {{ bandwidth: {MBIT} }}"
ACCURACY = 0.94
SYNC_FREQ = 64
HOGWILD = cluster(workers=1, groups=2, server_groups=2, separate=False, inside=f"sync_freq: {SYNC_FREQ} {LINK}")
LEARN = ("--model", "mlp", "--batch", "32", "--rate", "0.05", "--every", "4")
HIDDEN = "grads: kHidden"
ARRIVAL = "grads: kHidden apply: kOnArrival"
TWO_HOSTS = f"MLP, 2 hosts at {MBIT} Mbit/s: Distributed Hogwild"


def wire_s(model: str, factor: float = 1.0) -> float:
    """Seconds in which the link carries `factor` times a model's parameters, one way."""
    return factor * 4 * parameters(build(model, 0).model) * 8 / (MBIT * 1e6)


def shaped_ddp(sides: Sides, size: int, model: str, delay_ms: float = 0.0) -> Side:
    """DDP on hosts that the kernel's link connects. Raises Refused without root."""
    hosts = Namespaces.hosts(size, MBIT, delay_ms=delay_ms)
    if hosts is None:
        raise Refused("network namespaces need root" + (", and a delay needs the module sch_netem" if delay_ms else ""))
    sides.also_close(hosts)
    more = {"GLOO_SOCKET_IFNAME": hosts.interface, "MASTER_ADDR": hosts.addresses[0]}
    return sides.peer(f"DDP {size} {model}", "ddp", size, model, wrap=hosts.commands, **more)


def two_hosts(rounds: int, accuracy_rounds: int) -> list[Row]:
    """Samples per second of two hosts, and the time to an accuracy."""
    arithmetic = wire_s("mlp")
    with Sides() as sides:
        starts: dict[str, Callable[[], Side]] = {
            "DDP": lambda: shaped_ddp(sides, 2, "mlp"),
            "Hogwild": lambda: sides.job("hogwild", HOGWILD, 2, "mlp"),
        }
        living, missing = gather(starts)
        turns = {name: partial(side.run, SYNC_FREQ if name == "Hogwild" else 1) for name, side in living.items()}
        # A side that says hello has taken its first step, and a link knows no caches: no round is spared.
        found = interleave(turns, rounds, spare=0) if turns else {}
    how = "" if "DDP" in found else f"DDP by arithmetic, {arithmetic:.2f} s a step ({missing.get('DDP')})"
    step = found.setdefault("DDP", Samples((arithmetic,) * rounds))
    note = "; ".join(filter(None, (how, f"servers meet every {SYNC_FREQ} steps")))
    rows = [
        row("MLP, 2 hosts: DDP, one step", step.figure, "s", how),
        ratio(f"{TWO_HOSTS}, samples per second", found, missing, "DDP", "Hogwild", "× DDP", note),
    ]
    return [*rows, _time_to_accuracy(step, accuracy_rounds, how)] if accuracy_rounds else rows


def _time_to_accuracy(step: Samples, rounds: int, how: str) -> Row:
    what, unit = f"{TWO_HOSTS}, time to {ACCURACY:.0%} held out", "× faster than DDP"
    times: list[float] = []
    steps: list[int] = []
    try:
        with Sides() as sides:
            for seed in range(1, rounds + 1):
                say(f"  time to accuracy, seed {seed}")
                args = (*LEARN, "--steps", "200", "--seed", str(seed))
                times.append(first(job(sides, "hogwild", HOGWILD, *args), accuracy=ACCURACY).seconds)
                steps.append(first(ddp(sides, "ddp", 2, *args), accuracy=ACCURACY).step)
    except Refused as reason:
        return absent(what, unit, str(reason))
    theirs = Samples(tuple(count * step.median for count in steps))
    note = f"DDP: {Samples(tuple(map(float, steps))).median:g} steps (counted on a fast link) × its step"
    return row(what, theirs.over(Samples(tuple(times))), unit, "; ".join(filter(None, (note, how))))


def four_workers(rounds: int, steps: int) -> list[Row]:
    """4.5 MB of gradients: dedicated servers against the ring, and one server against four."""
    with Sides() as sides:

        def servers(count: int, top: str) -> Side:
            return sides.job(f"{count} {top}", cluster(4, count, inside=LINK, top=top), 4, "small")

        def beside(algorithm: str) -> Side:
            inside = f"algorithm: {algorithm} {LINK}"
            return sides.job(algorithm, cluster(4, 4, separate=False, inside=inside, top=HIDDEN), 4, "small")

        starts: dict[str, Callable[[], Side]] = {
            "ring": lambda: beside("kRing"),
            "straight": lambda: beside("kAuto"),
            "DDP": lambda: shaped_ddp(sides, 4, "small"),
            **{f"{n} servers, at step": partial(servers, n, HIDDEN) for n in (1, 4)},
            **{f"{n} servers, on arrival": partial(servers, n, ARRIVAL) for n in (1, 4)},
        }
        living, missing = gather(starts)
        turns = {name: partial(side.run, steps) for name, side in living.items()}
        found = interleave(turns, rounds, spare=0) if turns else {}
    return [_step(name, found, missing) for name in starts]


def _step(name: str, found: Mapping[str, Samples], missing: Mapping[str, str]) -> Row:
    what = f"4 workers, 4.5 MB: {name}"
    if name in missing:
        return absent(what, "ms", missing[name])
    theory = {"1": 4.0, "4": 1.0}.get(name.split()[0], 1.5)
    note = f"the wire alone {wire_s('small', theory) * 1e3:.0f} ms" + ("; shaped by the kernel" * (name == "DDP"))
    return row(what, found[name].figure.times(1e3), "ms", note)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=2, help="per turn, with four workers")
    parser.add_argument("--accuracy-rounds", type=int, default=0, help="jobs that train to an accuracy; minutes each")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    return [*two_hosts(options.rounds, options.accuracy_rounds), *four_workers(options.rounds, options.steps)]


if __name__ == "__main__":
    run_table("slow_link", "Slow links", measure, declare)
