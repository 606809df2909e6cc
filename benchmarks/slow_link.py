"""P8 and P9: what a topology brings on a slow link.

topotrain's link is pretended in user space (`cluster { link }`), DDP's by the kernel (a token bucket between network
namespaces): the same bandwidth for each host, in and out. Without root DDP's step is computed from its bytes, and the
row says so. DDP's time to an accuracy is its steps to it, counted on the fast link, times its measured step.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.learning import ddp, first, job
from benchmarks.link import Namespaces
from benchmarks.models import build, parameters
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster, gather

NAME, TITLE, GOALS = "slow_link", "Slow links", ("P8", "P9")

MBIT = 100
LINK = f"link {{ bandwidth: {MBIT} }}"
ACCURACY = 0.94
SYNC_FREQ = 64
HOGWILD = cluster(workers=1, groups=2, server_groups=2, separate=False, inside=f"sync_freq: {SYNC_FREQ} {LINK}")
LEARN = ("--model", "mlp", "--batch", "32", "--rate", "0.05", "--every", "4")
HIDDEN = "grads: kHidden"
ARRIVAL = "grads: kHidden apply: kOnArrival"


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
    """P8 in samples per second, and the wire's share of a push and a pull."""
    arithmetic = wire_s("mlp")
    with Sides() as sides:
        pair = cluster(workers=1, inside=LINK)
        starts = {
            "DDP": lambda: shaped_ddp(sides, 2, "mlp"),
            "Hogwild": lambda: sides.job("hogwild", HOGWILD, 2, "mlp"),
            "at step": lambda: sides.job("pair", pair, 1, "mlp"),
            "on arrival": lambda: sides.job("pair arrival", cluster(workers=1, inside=LINK, top=ARRIVAL), 1, "mlp"),
        }
        living, missing = gather(starts)
        turns = {name: partial(side.run, SYNC_FREQ if name == "Hogwild" else 1) for name, side in living.items()}
        # A side that says hello has taken its first step, and a link knows no caches: no round is spared.
        found = interleave(turns, rounds, spare=0) if turns else {}
    rows: list[Row] = []
    how = "" if "DDP" in found else f"DDP by arithmetic, {arithmetic:.2f} s a step ({missing.get('DDP')})"
    step = found.get("DDP", Samples((arithmetic,) * rounds))
    rows.append(row("", "MLP, 2 hosts: DDP, one step", step.figure, "s", "", how))
    what, unit = f"MLP, 2 hosts at {MBIT} Mbit/s: Distributed Hogwild, samples per second", "× DDP"
    if "Hogwild" in found:
        note = "; ".join(filter(None, (how, f"servers meet every {SYNC_FREQ} steps")))
        rows.append(row("P8", what, step.over(found["Hogwild"]), unit, ">= 20", note))
    else:
        rows.append(absent("P8", what, unit, missing["Hogwild"], ">= 20"))
    rows += [_time_to_accuracy(step, accuracy_rounds, how)]
    there = [name for name in ("at step", "on arrival") if name in found]
    best = min(there, key=lambda name: found[name].median) if there else ""
    what, unit = "MLP: push + pull, 1 worker and 1 server, computing included", "× wire time"
    for name, mode in (("at step", "kVisible, kAtStep"), ("on arrival", "kHidden, kOnArrival")):
        if name in found:
            limit = "<= 1.1" if name == best else ""
            rows.append(row("P8", what, found[name].figure.times(1 / arithmetic), unit, limit, "", mode))
        else:
            rows.append(absent("P8", what, unit, missing[name], "" if best else "<= 1.1", mode))
    return rows


def _time_to_accuracy(step: Samples, rounds: int, how: str) -> Row:
    what, unit = (
        f"MLP, 2 hosts at {MBIT} Mbit/s: Distributed Hogwild, time to {ACCURACY:.0%} held out",
        "× faster than DDP",
    )
    if not rounds:
        return absent("P8", what, unit, "not asked for: --accuracy-rounds 5 takes some 12 minutes", ">= 10")
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
        return absent("P8", what, unit, str(reason), ">= 10")
    theirs = Samples(tuple(count * step.median for count in steps))
    note = f"DDP: {Samples(tuple(map(float, steps))).median:g} steps (counted on a fast link) × its step"
    return row("P8", what, theirs.over(Samples(tuple(times))), unit, ">= 10", "; ".join(filter(None, (note, how))))


def four_workers(rounds: int, steps: int, counts: Sequence[int] = (1, 4)) -> list[Row]:
    """P9: 4.5 MB of gradients, dedicated servers against the ring, and servers of all `counts` (1 and 4, at least)."""
    with Sides() as sides:

        def servers(count: int, top: str) -> Side:
            return sides.job(f"{count} {top}", cluster(4, count, inside=LINK, top=top), 4, "small")

        def beside(algorithm: str) -> Side:
            inside = f"algorithm: {algorithm} {LINK}"
            return sides.job(algorithm, cluster(4, 4, separate=False, inside=inside, top=HIDDEN), 4, "small")

        starts = {
            "ring": lambda: beside("kRing"),
            "straight": lambda: beside("kAuto"),
            "DDP": lambda: shaped_ddp(sides, 4, "small"),
            **{f"{n} at step": lambda n=n: servers(n, HIDDEN) for n in counts},
            **{f"{n} on arrival": lambda n=n: servers(n, ARRIVAL) for n in counts},
        }
        living, missing = gather(starts)
        found = (
            interleave({name: lambda s=side: s.run(steps) for name, side in living.items()}, rounds, spare=0)
            if living
            else {}
        )
    rows = [_step(name, found, missing) for name in starts]
    for way in ("at step", "on arrival"):
        last = way == "on arrival" or "4 on arrival" not in found
        ring = "4 workers, 4.5 MB: ring over 4 dedicated servers", "ring", f"4 {way}", ">= 1.4", "theory 1.5"
        more = "4 workers, 4.5 MB: 1 server over 4 servers", f"1 {way}", f"4 {way}", ">= 3.7", "theory 4"
        for what, slow, fast, limit, note in (ring, more):
            mode = "kHidden, " + ("kAtStep" if way == "at step" else "kOnArrival")
            limit = limit if last else ""
            if slow in found and fast in found:
                rows.append(row("P9", what, found[slow].over(found[fast]), "×", limit, note, mode))
            else:
                rows.append(absent("P9", what, "×", missing.get(slow) or missing[fast], limit, mode))
    return rows


def _step(name: str, found: Mapping[str, Samples], missing: Mapping[str, str]) -> Row:
    theory = {"ring": 1.5, "straight": 1.5, "DDP": 1.5, "1": 4.0, "2": 2.0, "4": 1.0}[name.split()[0]]
    expected = wire_s("small", theory)
    label = name if not name[0].isdigit() else f"{name[0]} servers, {name[2:]}"
    what = f"4 workers, 4.5 MB: {label}"
    if name in missing:
        return absent("", what, "ms", missing[name])
    times: Figure = found[name].figure.times(1e3)
    note = f"the wire alone {expected * 1e3:.0f} ms" + ("; shaped by the kernel" if name == "DDP" else "")
    return row("", what, times, "ms", "", note)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=2, help="per turn, with four workers")
    parser.add_argument("--two", action="store_true", help="two servers, too, beside one and four")
    parser.add_argument("--accuracy-rounds", type=int, default=0, help="jobs that train to an accuracy; minutes each")
    parser.add_argument("--only", choices=GOALS, default=None)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    if options.only != "P9":
        rows += two_hosts(options.rounds, options.accuracy_rounds)
    if options.only != "P8":
        rows += four_workers(options.rounds, options.steps, (1, 2, 4) if options.two else (1, 4))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
