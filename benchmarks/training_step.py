"""One training step of two workers on one host, beside DDP, ZeRO-1, FSDP2 and computing alone.

All sides of a model live at once and take turns. "alone" is two processes that train without hearing of each
other; "no update" is the same without an optimizer, which nobody can beat. The others keep one model, and must end with
DDP's parameters.
"""

import argparse
from collections.abc import Mapping, Sequence

from benchmarks.contest import ALONE, MODES, Contestant, Limits, contest, declare
from benchmarks.harness import Row
from benchmarks.record import run_table
from benchmarks.sides import cluster

DDP = "DDP"
PEERS: Mapping[str, str] = {"ZeRO-1": "zero", "FSDP2": "fsdp"}


def contestants() -> list[Contestant]:
    """All sides of a model."""
    found = [Contestant(ALONE, way="alone"), Contestant("no update", way="no_update"), Contestant(DDP, way="ddp")]
    found += [Contestant(name, way=way, same_as=DDP) for name, way in PEERS.items()]
    for mode, top in MODES.items():
        beside, separate = cluster(servers=2, separate=False, top=top), cluster(top=top)
        for name, conf, transport in (
            ("AllReduce", beside, ""),
            ("Sandblaster, shared memory", separate, "kShm"),
            ("Sandblaster, TCP", separate, "kTcp"),
        ):
            found.append(Contestant(name, conf=conf, transport=transport, over=DDP, same_as=DDP, mode=mode))
    return found


def measure(options: argparse.Namespace) -> Sequence[Row]:
    chosen = contestants()
    return [line for model in options.models for line in contest(model, chosen, options.rounds, Limits())]


if __name__ == "__main__":
    run_table("training_step", "A training step, 2 workers on one host", measure, declare)
