"""One training step of two workers on one host, beside DDP, ZeRO-1, FSDP2 and computing alone.

All sides of a model live at once and take turns. "alone" is two processes that train without hearing of each
other; "no update" is the same without an optimizer, which nobody can beat. All sides that keep one model must end with
the same parameters: the mean magnitude of each side's is compared with DDP's, and a side that differs has no figure.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import models
from benchmarks.harness import Row, Samples, absent, interleave, row
from benchmarks.link import Namespaces
from benchmarks.processor import Turn
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster, gather

MODES: Mapping[str, str] = {
    "kVisible, kAtStep": "",
    "kHidden, kAtStep": "grads: kHidden",
    "kHidden, kOnArrival": "grads: kHidden apply: kOnArrival",
    "kHidden, kOnArrival, kLazy": "grads: kHidden apply: kOnArrival pull: kLazy",
}
"""Ways of a synchronous step, the default first."""

PEERS: Mapping[str, str] = {"no update": "no_update", "alone": "alone", "DDP": "ddp", "ZeRO-1": "zero", "FSDP2": "fsdp"}
RENO = "DDP, reno"
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A topology and a transport."""

    name: str
    servers: int
    separate: bool
    transport: str


ARRANGEMENTS = (
    Arrangement("AllReduce", 2, False, ""),
    Arrangement("Sandblaster, shared memory", 1, True, "kShm"),
    Arrangement("Sandblaster, TCP", 1, True, "kTcp"),
)


def conf(arrangement: Arrangement, mode: str) -> str:
    """The job of an arrangement in a mode."""
    return cluster(servers=arrangement.servers, separate=arrangement.separate, top=MODES[mode])


def start(sides: Sides, model: str) -> tuple[dict[str, Side], dict[str, str]]:
    """All sides of a model, and why others are missing."""
    starts: dict[str, Callable[[], Side]] = {
        name: partial(sides.peer, f"{model} {name}", way, 2, model) for name, way in PEERS.items()
    }
    starts[RENO] = partial(_ddp_with_reno, sides, model)
    for arrangement in ARRANGEMENTS:
        for mode in MODES:
            name = f"{arrangement.name}: {mode}"
            job = (f"{model} {name}", conf(arrangement, mode), 2, model, arrangement.transport)
            starts[name] = partial(sides.job, *job)
    return gather(starts)


def _ddp_with_reno(sides: Sides, model: str) -> Side:
    """DDP in a network namespace of its own with the congestion control our transport asks for, no default."""
    names = Namespaces.loopback("reno")
    if names is None:
        raise Refused("needs root, for a network namespace with another congestion control")
    sides.also_close(names)
    return sides.peer(f"{model} {RENO}", "ddp", 2, model, wrap=names.commands * 2)


def measure_model(model: str, rounds: int, steps: int) -> list[Row]:
    """All rows of one model."""
    with Sides() as sides:
        living, missing = start(sides, model)
        if "DDP" not in living:
            return [absent(model.upper(), "× DDP", missing["DDP"])]
        turns: dict[str, Callable[[], Turn]] = {n: lambda side=side: side.turn(steps) for n, side in living.items()}
        found = interleave(turns, rounds, lambda name: living[name].run(1))
        sums = {name: [a["checksum"] for a in side.ask(check=True)] for name, side in living.items()}
    for name, values in sums.items():
        if name not in ("no update", "alone") and any(abs(v / sums["DDP"][0] - 1) > TOLERANCE for v in values):
            missing[name] = f"ends with other parameters than DDP ({values[0]:.8g}, not {sums['DDP'][0]:.8g})"
    return [*_peers(model, found, missing), *_ours(model, found, missing)]


def _peers(model: str, found: Mapping[str, Samples], missing: Mapping[str, str]) -> list[Row]:
    label = model.upper()
    size = models.megabytes(model)
    alone = row(f"{label}: alone, one step", found["alone"].figure.times(1e3), "ms")
    rows = [alone.costing(found["alone"], size)]
    for name in (*PEERS, RENO):
        if name in missing:
            rows.append(absent(f"{label}: {name}", "× alone", missing[name]))
        elif name != "alone":
            line = row(f"{label}: {name}", found[name].over(found["alone"]), "× alone")
            rows.append(line.costing(found[name], size))
    return rows


def _ours(model: str, found: Mapping[str, Samples], missing: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    for arrangement in ARRANGEMENTS:
        names = {mode: f"{arrangement.name}: {mode}" for mode in MODES}
        there = [mode for mode in MODES if names[mode] not in missing]
        best = min(there, key=lambda mode: found[names[mode]].median, default="")
        what = f"{model.upper()}: {arrangement.name}"
        for mode in MODES:
            if mode not in there:
                rows.append(absent(what, "× DDP", missing[names[mode]], mode))
                continue
            samples = found[names[mode]]
            ratio = samples.over(found["DDP"])
            notes = [f"{samples.over(found['alone']).value:.2f} × alone"]
            if RENO in found and RENO not in missing:
                notes.append(f"{samples.over(found[RENO]).value:.2f} × DDP with reno")
            if mode == best:
                notes.insert(0, "the fastest legal mode")
            if mode == best and "no update" in found:
                notes.append(f"without any update {found['no update'].over(found['DDP']).value:.2f} × DDP")
            line = row(what, ratio, "× DDP", "; ".join(notes), mode)
            rows.append(line.costing(samples, models.megabytes(model)))
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=models.TRAINED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="per turn; 0: some 0.3 to 0.5 seconds'")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for model in options.models:
        say(f"  {model}")
        rows += measure_model(model, options.rounds, options.steps or {"mlp": 4, "gpt": 2, "cnn": 4}[model])
    return rows


if __name__ == "__main__":
    run_table("training_step", "A training step, 2 workers on one host", measure, declare)
