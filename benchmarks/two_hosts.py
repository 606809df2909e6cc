"""Two hosts on a link that the kernel shapes: a job by `topotrain unit`, with TLS, beside torch's own ways.

The hosts are network namespaces with a token bucket between them, so all sides have the same link. A row has a side's
step over that of DDP as it is, in one run, with the processor time of all its processes and the bytes that one host has
sent. Needs root: without it nothing is measured.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from benchmarks.harness import ROUNDS, Row, absent, interleave, ratio
from benchmarks.link import Namespaces
from benchmarks.processor import Turn
from benchmarks.record import run_table, say
from benchmarks.sides import STEPPER, Side, Sides, cluster, gather

PEERS = {
    "DDP": "ddp",
    "the link alone": "link",
    "no exchange": "alone",
    "DDP, 4 MB buckets": "ddp+4mb",
    "DDP, fp16 hook": "ddp+fp16",
    "averager, 16 steps": "averager",
}
ROUND = 16
"""Steps of a turn of sides that exchange once in so many."""
BARE_LINK = STEPPER.with_name("bare_link.py")
OUTER = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"


def _pair(inside: str = "", top: str = "") -> str:
    return cluster(workers=2, servers=2, separate=False, inside=inside, top=top)


def _islands(inside: str = "") -> str:
    return cluster(workers=1, servers=2, groups=2, separate=False, inside=f"sync_freq: {ROUND} {OUTER} {inside}")


JOBS: Mapping[str, str] = {
    "topotrain": _pair(),
    "topotrain, kFp16": _pair("compression: kFp16"),
    "topotrain, kHidden": _pair(top="grads: kHidden"),
    "topotrain, kHidden, kFp16": _pair("compression: kFp16", "grads: kHidden"),
    f"topotrain, islands of {ROUND} steps": _islands(),
    f"topotrain, islands of {ROUND} steps, kInt8": _islands("compression: kInt8"),
}


class Hosts:
    """Two hosts and the sides on them."""

    def __init__(self, sides: Sides, network: Namespaces) -> None:
        self._sides, self._network = sides, network
        self.sent: dict[str, list[float]] = {}
        """MiB per step that the first host has sent, in each turn of a side."""

    def peer(self, name: str, model: str) -> Side:
        """Start a way of torch. Raises Refused."""
        more = {"GLOO_SOCKET_IFNAME": self._network.interface, "MASTER_ADDR": self._network.addresses[0]}
        script = BARE_LINK if PEERS[name] == "link" else STEPPER
        return self._sides.peer(name, PEERS[name], 2, model, self._network.commands, script, **more)

    def job(self, name: str, conf: str, model: str) -> Side:
        """Start a job of two units. Raises Refused."""
        return self._sides.units(name, conf, model, self._network.addresses, self._network.commands)

    def turn(self, side: Side, steps: int) -> Turn:
        """Let a side take so many steps."""
        before = self._network.sent(0)
        took = side.turn(steps)
        self.sent.setdefault(side.name, []).append((self._network.sent(0) - before) / steps / 2**20)
        return took


def compare(
    model: str, mbit: float, rounds: int, steps: int, jobs: Mapping[str, str], peers: Sequence[str]
) -> list[Row]:
    """Compare the sides on a model and a link."""
    label = f"{model.upper()}, {mbit:g} Mbit/s"
    network = Namespaces.hosts(2, mbit)
    if network is None:
        return [absent(label, "× DDP", "network namespaces need root")]
    with Sides() as sides:
        sides.also_close(network)
        hosts = Hosts(sides, network)
        starts: dict[str, Callable[[], Side]] = {name: partial(hosts.peer, name, model) for name in peers}
        starts |= {name: partial(hosts.job, name, conf, model) for name, conf in jobs.items()}
        living, missing = gather(starts)
        turns = {
            name: partial(hosts.turn, side, ROUND if "16 steps" in name else steps) for name, side in living.items()
        }
        found = interleave(turns, rounds) if turns else {}
    rows = [absent(f"{label}: {name}", "× DDP", why) for name, why in missing.items()]
    for name, samples in found.items():
        note = f"{samples.median * 1e3:.0f} ms, {median(hosts.sent[name]):.1f} MiB sent by a host"
        if "DDP" in found:
            cost = sum(samples.processor) / sum(found["DDP"].processor)
            note = f"{note}, {cost:.2f} × DDP's processor time"
        rows.append(ratio(f"{label}: {name}", found, missing, name, "DDP", "× DDP", note).costing(samples))
        say(f"  {rows[-1].what}: {rows[-1].figure or 0:.2f}, {note}")
    return rows


def declare(parser: argparse.ArgumentParser, mbit: float = 1000.0) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--models", nargs="+", choices=("mlp", "gpt", "cnn"), default=["mlp", "gpt", "cnn"])
    parser.add_argument("--mbit", nargs="+", type=float, default=[mbit])
    parser.add_argument("--sides", nargs="+", choices=[*PEERS, *JOBS], default=[*PEERS, *JOBS])
    parser.add_argument("--inside", default="", help="of all jobs' cluster blocks, such as 'slice_bytes: 65536'")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    jobs = {name: conf for name, conf in JOBS.items() if name in options.sides}
    for name, conf in tuple(jobs.items()) if options.inside else ():
        # Beside the job as it is, in the same run.
        jobs[f"{name}, {options.inside}"] = conf.replace("cluster {", f"cluster {{ {options.inside}")
    peers = [name for name in PEERS if name in options.sides]
    return [
        found
        for mbit in options.mbit
        for model in options.models
        for found in compare(model, mbit, options.rounds, options.steps, jobs, peers)
    ]


if __name__ == "__main__":
    run_table("two_hosts", "Two hosts on a link", measure, declare)
