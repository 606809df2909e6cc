"""What `topotrain advise` advises, beside the named layouts, on this machine: `python -m benchmarks.advised [--trial]`.

For each model and network the program is probed, advice is asked for with this probe, and the job file that it writes
is run. The five layouts of `benchmarks.predictions` run in turn with it, in shuffled order. The regret is the time that
the advised layout takes for a sample, over that of the fastest layout of all. Below 1 there is nothing: where the
advised layout is the fastest one, the regret is 1.

Two hosts with a link are units of this machine, each with one core, and the link between them is emulated.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.predictions import FEWEST, LAYOUTS, NETWORKS, PROGRAM, TURN_S, WORKERS, Layout, Network, probe, turn
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, topotrain

NAME, TITLE = "advised", "The layout that is advised, beside the fastest"
ADVISED = "advised"
GOAL = "<= 1.05"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is to run.

    Attributes:
        network: of the layouts beside the advised one.
        link: between two hosts of one core each, as `--link` and `--emulate` have it. Empty: there is one host.
    """

    network: Network
    link: str = ""


FAR = "two hosts, 100 Mbit/s and 20 ms"
PLACES: Mapping[str, Place] = {
    "one host": Place(NETWORKS["shared memory"]),
    FAR: Place(NETWORKS["100 Mbit/s, 20 ms"], "100mbit,20ms"),
}
CASES = (("char", "one host"), ("small", "one host"), ("cnn", "one host"), ("char", FAR), ("small", FAR))


def advice(model: str, place: Place, file: Path, folder: Path) -> str:
    """Ask for advice; the text of the job file. Raises Refused."""
    out = folder / f"{model}.conf"
    hosts = ("--hosts", "2", "--cores", "1", "--link", place.link) if place.link else ()
    topotrain("advise", "--probe", str(file), *hosts, "--out", str(out), folder=folder)
    return out.read_text(encoding="utf-8")


def layout_of(conf: str) -> Layout:
    """The counts of an advised job that a measurement needs."""
    from topotrain.config import job_file

    cluster = job_file.loads(conf, ADVISED).cluster
    waits = cluster.outer is not None or cluster.nworker_groups == 1
    period = max(1, cluster.sync_freq) if waits else 0
    return Layout(cluster.nworkers_per_group, groups=cluster.nworker_groups, period=period)


def seconds_of_a_batch(side: Side, layout: Layout) -> Callable[[], float]:
    """A turn of a side: its seconds for as many samples as one batch of the loader has. Raises Refused."""
    step_s = turn(side, layout, FEWEST * max(1, layout.period), TURN_S / FEWEST)
    return lambda: turn(side, layout, layout.steps_of_turn(step_s), step_s) / layout.groups


def compared(model: str, where: str, rounds: int, probe_s: float) -> list[Row]:
    """The rows of one model at one place."""
    place, what = PLACES[where], f"{model}, {where}: the advised layout over the fastest of {len(LAYOUTS) + 1}"
    with Sides() as sides:
        try:
            folder = sides.room("probe")
            probe(model, folder, probe_s)
            conf = advice(model, place, folder / f"{model}.json", folder)
            layout = layout_of(conf)
            options = ("--emulate", place.link) if place.link else ()
            workers = layout.workers * layout.groups
            advised = sides.job(ADVISED, conf, workers, model, script=PROGRAM, options=options)
            turns = {ADVISED: seconds_of_a_batch(advised, layout)}
        except (Refused, ValueError) as reason:
            return [absent("", what, "×, regret", str(reason).splitlines()[0], GOAL)]
        missing: list[str] = []
        for name, each in LAYOUTS.items():
            start = partial(sides.job, name, each.conf(place.network), WORKERS, model, script=PROGRAM)
            try:
                turns[name] = seconds_of_a_batch(start(), each)
            except Refused as reason:
                missing.append(f"{name}: {reason}")
        found = interleave(turns, rounds, spare=0)
    fastest = min(found, key=lambda name: found[name].median)
    block = " ".join(conf.partition("cluster {")[2].split()).removesuffix("}").strip()
    note = "; ".join((f"advised {{ {block} }}; the fastest: {fastest}", *missing))
    rows = [row("", what, found[ADVISED].over(found[fastest]), "×, regret", GOAL, note)]
    return rows + [
        row("", f"{model}, {where}, {name}: a batch of samples", found[name].figure.times(1e3), "ms") for name in found
    ]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this table."""
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--probe-seconds", type=float, default=30.0)
    parser.add_argument("--only", default="", metavar="WORDS", help='only cases with all of these, as in "char one"')
    parser.add_argument("--trial", action="store_true", help="write nothing")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """The rows of all models and places."""
    rows: list[Row] = []
    for model, where in CASES:
        if all(word.lower() in f"{model}, {where}".lower() for word in options.only.split()):
            found = compared(model, where, options.rounds, options.probe_seconds)
            rows += found
            say(f"  {model}, {where}: {found[0].figure}, {found[0].note}")
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
