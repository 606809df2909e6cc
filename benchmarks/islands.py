"""Islands: worker groups that train alone between exchanges, `python -m benchmarks.islands [--only I1 I6]`.

    I1   eight islands on an emulated link of 100 Mbit/s and 50 ms, against islands that never meet, and against DDP
    I2   the time to the held-out loss that DDP has after 90 % of its run (--loss-steps): steps times the step of I1
    I3   bytes of a worker, against arithmetic
    I5   workers are killed in turn: samples per second, and the longest gap between two steps of the others
    I6   workers of different speed, against the sum of the speeds
    I7   a server is killed, with and without a second copy
    I8   `benchmarks.goodput`: 10,000 islands, and the layouts with a published goodput
    I9   kE3M0: encoding and decoding of 1 MB
    I10  memory of a worker over that of the plain script

Rule: where processes sleep for a step (I5 to I7), two cores carry all of them, and the product's own work is a few
percent of a core. Those jobs keep a ledger with a cell for each sample, and each cell is looked at in the end.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import goodput
from benchmarks.compression import BODY, Bodies, clocked
from benchmarks.goodput import PUBLISHED, ChipFailures
from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.learning import run_program
from benchmarks.models import CharacterModel, parameters
from benchmarks.programs.characters import text
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster, gather
from benchmarks.slow_link import MBIT, shaped_ddp

NAME, TITLE = "islands", "Islands"
GOALS = ("I1", "I2", "I3", "I5", "I6", "I7", "I8", "I9", "I10")
CHARACTERS = Path(__file__).parent / "programs" / "characters.py"
TIMED = Path(__file__).parent / "programs" / "timed_steps.py"

ISLANDS, SYNC_FREQ, FRAGMENTS, OVERLAP = 8, 24, 6, 2
DELAY_MS = 50
SERVERS = 4
"""One server on one host would have to carry what all islands send."""
NESTEROV = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
LINK = f"link {{ bandwidth: {MBIT} delay: {DELAY_MS} }}"
STREAMING = f"sync_freq: {SYNC_FREQ} fragments: {FRAGMENTS} overlap: {OVERLAP}"
DECOUPLED = f"sync_freq: {SYNC_FREQ} fragments: {FRAGMENTS} quorum: 1"


def islands(inside: str, groups: int = ISLANDS, servers: int = SERVERS, top: str = "") -> str:
    """A conf of so many islands."""
    return cluster(1, servers, groups, inside=inside, top=top)


# --- I1, I2: a slow link ---


def ring_s(workers: int) -> float:
    """Seconds of an all-reduce in a ring over the link: of its bytes, and of its messages one after the other."""
    steps = 2 * (workers - 1)
    share = 4 * parameters(CharacterModel()) / workers
    return steps * (share * 8 / (MBIT * 1e6) + DELAY_MS / 1000)


def slow_link(rounds: int, loss_steps: int) -> list[Row]:
    """I1 and I2."""
    with Sides() as sides:
        alone = cluster(1, 1, ISLANDS, server_groups=0, separate=False)
        starts: dict[str, Callable[[], Side]] = {
            "streaming": lambda: sides.job("streaming", islands(f"{STREAMING} {NESTEROV} {LINK}"), ISLANDS, "char"),
            "decoupled": lambda: sides.job("decoupled", islands(f"{DECOUPLED} {NESTEROV} {LINK}"), ISLANDS, "char"),
            "never meet": lambda: sides.job("never meet", alone, ISLANDS, "char"),
            "plain": lambda: sides.peer("plain", "alone", ISLANDS, "char"),
            "DDP": lambda: shaped_ddp(sides, ISLANDS, "char", DELAY_MS),
        }
        living, missing = gather(starts)
        # Two rounds of every fragment, and three steps of DDP, which take as long.
        turns = {name: partial(side.run, 3 if name == "DDP" else 2 * SYNC_FREQ) for name, side in living.items()}
        found = interleave(turns, rounds, spare=0) if turns else {}
    rows = [_step_row(name, found, missing) for name in starts]
    if "plain" not in found:
        return rows
    computing = found["plain"].median
    how = "" if "DDP" in found else f"DDP by arithmetic, {computing + ring_s(ISLANDS):.2f} s a step ({missing['DDP']})"
    ddp = found.get("DDP", Samples((computing + ring_s(ISLANDS),) * rounds))
    least = 0.9 * (computing + ring_s(ISLANDS)) / computing
    for name in ("streaming", "decoupled"):
        what = f"{ISLANDS} islands, {name}, {MBIT} Mbit/s and {DELAY_MS} ms: samples per second"
        if name not in found:
            rows.append(absent("I1", what, "× never meet", missing[name], ">= 0.95"))
            continue
        mine = found[name]
        if "never meet" in found:
            rows.append(row("I1", what, found["never meet"].over(mine), "× never meet", ">= 0.95"))
        rows.append(row("", what, found["plain"].over(mine), "× plain processes"))
        rows.append(row("I1", what, ddp.over(mine), "× DDP", f">= {least:.1f}", how))
    if "streaming" in found:
        rows.append(_time_to_loss(loss_steps, ddp, found["streaming"], how))
    return rows


def _step_row(name: str, found: Mapping[str, Samples], missing: Mapping[str, str]) -> Row:
    what = f"{ISLANDS} processes, 0.47 M parameters: {name}, one step"
    if name in missing:
        return absent("", what, "ms", missing[name])
    return row("", what, found[name].figure.times(1e3), "ms")


def _time_to_loss(steps: int, ddp: Samples, mine: Samples, how: str) -> Row:
    what, unit, limit = f"{ISLANDS} islands, streaming: time to DDP's loss after 90 % of its run", "× faster", ">= 5"
    if not steps:
        return absent("I2", what, unit, "not asked for: --loss-steps 800 takes some minutes", limit)
    try:
        with Sides() as sides:
            together = cluster(ISLANDS, 1)
            theirs = _losses(sides, "ddp", together, ISLANDS, 400, 40)
            goal = theirs[360]
            own = _losses(sides, "islands", islands(f"{STREAMING} {NESTEROV}"), 1, steps, SYNC_FREQ)
    except Refused as reason:
        return absent("I2", what, unit, str(reason), limit)
    reached = next((step for step, loss in sorted(own.items()) if loss <= goal), 0)
    if not reached:
        best = min(own.values())
        return absent("I2", what, unit, f"{steps} steps end at {best:.4f}, DDP had {goal:.4f}: --loss-steps", limit)
    ratio = ddp.over(mine)
    words = (f"loss {goal:.4f}: DDP 360 steps, islands {reached}, times the steps above", how)
    factor = 360 / reached
    return row("I2", what, ratio.times(factor), unit, limit, "; ".join(filter(None, words)))


def _losses(sides: Sides, name: str, conf: str, workers: int, steps: int, every: int) -> dict[int, float]:
    """The held-out loss of the first worker after some of its steps. workers: in a group. Raises Refused."""
    say(f"  {name}: {steps} steps of {ISLANDS} workers")
    sizes = ("--samples", str(4 * ISLANDS * steps), "--batch", str(4 * workers))
    file = run_program(sides, name, conf, CHARACTERS, *sizes, "--every", str(every), limit_s=1200.0)
    return {int(step): loss for step, loss in map(json.loads, file.read_text().splitlines())}


# --- I3: bytes ---


def traffic() -> list[Row]:
    """I3: what a round of all fragments adds to the bytes of a worker."""
    elements, rows = parameters(CharacterModel(text()[2])), []
    ddp = 2 * 2 * (ISLANDS - 1) / ISLANDS * 4 * elements * SYNC_FREQ  # sent and received, as our bytes are
    for compression, up, down in (("kNone", 4.0, 4.0), ("kE3M0", 0.5 + 4 / 256, 2.0)):
        what = f"{ISLANDS} islands, {compression}: bytes of a worker in {SYNC_FREQ} steps, both ways"
        try:
            with Sides() as sides:
                inside = f"{STREAMING} {NESTEROV} compression: {compression} transport: kTcp"
                # Both have the same start and the same end.
                short, long = (_bytes(sides, islands(inside), rounds) for rounds in (2, 6))
        except Refused as reason:
            rows.append(absent("I3", what, "× arithmetic", reason.args[0], "<= 1.01"))
            continue
        measured, counted = (long - short) / 4, elements * (up + down)
        arithmetic = f"{elements} elements × {up + down:g} bytes"
        note = f"{measured / 1e6:.3f} MB, {arithmetic}; DDP {ddp / measured:.0f} times that, both ways"
        rows.append(row("I3", what, measured / counted, "× arithmetic", "<= 1.01", note))
    return rows


def _bytes(sides: Sides, conf: str, rounds: int) -> float:
    steps = rounds * SYNC_FREQ
    sizes = ("--samples", str(ISLANDS * steps), "--batch", "1", "--steps", str(steps))
    folder = run_program(sides, f"bytes {rounds}", conf, CHARACTERS, *sizes).parent
    report = json.loads((folder / "report.json").read_text())
    # The first worker also sends the first values and fetches the result.
    found = [each["bytes_out"] + each["bytes_in"] for each in report["processes"] if each["rank"]]
    return sum(found) / len(found)


# --- I5, I6, I7: steps that take a given time ---


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of the steps of a job, in seconds of the clock.

    Attributes:
        processes: by (rank, process id).
        killed: the times of the deaths.
        wrong: samples that did not count once.
    """

    processes: Mapping[tuple[int, int], Sequence[float]]
    killed: Sequence[float]
    wrong: int

    @property
    def rate(self) -> float:
        """Steps per second of all workers, while all of them were there."""
        first = max(times[0] for times in self.processes.values())
        last = min(times[-1] for times in self.processes.values())
        made = sum(first < time <= last for times in self.processes.values() for time in times)
        return made / (last - first)

    @property
    def rates(self) -> list[float]:
        """Steps per second of each process."""
        return [(len(times) - 1) / (times[-1] - times[0]) for times in self.processes.values()]

    @property
    def seconds(self) -> float:
        """From the first step of the job to its last one."""
        times = [time for its in self.processes.values() for time in its]
        return max(times) - min(times)

    @property
    def steps(self) -> int:
        """Those that were made, also if they did not count."""
        return sum(map(len, self.processes.values()))

    @property
    def longest_gap(self) -> float:
        """Seconds between two steps of one process, at most."""
        return max(b - a for times in self.processes.values() for a, b in pairwise(times))

    @property
    def longest_pause(self) -> float:
        """Seconds between two steps of one worker, over all its processes, at most."""
        ranks = {rank for rank, _ in self.processes}
        merged = [sorted(t for (of, _), its in self.processes.items() if of == rank for t in its) for rank in ranks]
        return max(b - a for times in merged for a, b in pairwise(times))


def timed(sides: Sides, name: str, conf: str, samples: int, speeds: Sequence[float], *more: str) -> StepTimes:
    """Run a job whose steps take a given time. Raises Refused."""
    say(f"  {name}: {samples} steps")
    words = ("--samples", str(samples), "--speeds", *map(str, speeds), *more)
    folder = run_program(sides, name, conf, TIMED, *words, limit_s=1800.0).parent
    from safetensors.torch import load_file

    cells = load_file(folder / "work" / "final.safetensors")["cells"]
    processes = {}
    for file in folder.glob("times-*"):
        _, rank, pid = file.name.split("-")
        if times := [float(line) for line in file.read_text().splitlines() if line]:
            processes[int(rank), int(pid)] = times
    killed = sorted(float(file.read_text()) for file in folder.glob("killed-*"))
    return StepTimes(processes, killed, int((cells != 1).sum()))


LEDGER = "reduce: kSum"
EXACT = f"sync_freq: {SYNC_FREQ} quorum: 1 transport: kTcp {MEAN}"
STEP_MS = 50.0


def deaths(seconds: float, every: float) -> list[Row]:
    """I5: a worker dies every so many seconds."""
    kills, speeds = max(1, int(seconds / every) - 1), [1.0] * ISLANDS
    samples = int(seconds * ISLANDS * 1000 / STEP_MS)
    what = f"{ISLANDS} islands, quorum 1, one dies every {every:g} s"
    try:
        with Sides() as sides:
            conf = islands(EXACT, servers=1, top=f"{LEDGER} restarts: {kills + 1}")
            calm = timed(sides, "no deaths", conf, samples, speeds)
            words = ("--kill-every", str(every), "--kills", str(kills))
            torn = timed(sides, "deaths", conf, samples, speeds, *words)
    except Refused as reason:
        return [absent("I5", f"{what}: samples per second", "× without deaths", str(reason), ">= 0.98")]
    note = f"{len(torn.killed)} deaths in {torn.seconds:.0f} s; {torn.steps - samples} steps were made twice"
    note += f"; {torn.wrong} samples did not count once" if torn.wrong else "; each sample counted once"
    more = 1e3 * (torn.longest_gap - calm.longest_gap)
    gap = (
        f"{torn.longest_gap * 1e3:.0f} ms; without deaths {calm.longest_gap * 1e3:.0f} ms; a step takes {STEP_MS:g} ms"
    )
    return [
        row("I5", f"{what}: samples per second", calm.seconds / torn.seconds, "× without deaths", ">= 0.98", note),
        row("I5", f"{what}: longest gap between two steps of the others", more, "ms more", "<= 50", gap),
    ]


SPEEDS = (1.0, 1.0, 0.7, 0.4)


def speeds(samples: int) -> list[Row]:
    """I6: workers of different speed."""
    count = len(SPEEDS)
    ways = {
        "decoupled": islands(EXACT, count, 1, LEDGER),
        "in step": islands(f"sync_freq: {SYNC_FREQ} transport: kTcp {MEAN}", count, 1, LEDGER),
        "never meet": cluster(1, 1, count, server_groups=0, separate=False),
    }
    what, found = "speeds 1:1:0.7:0.4: samples per second", dict[str, StepTimes]()
    try:
        with Sides() as sides:
            for name, conf in ways.items():
                found[name] = timed(sides, name, conf, samples, SPEEDS)
    except Refused as reason:
        return [absent("I6", what, "× the sum of the speeds", str(reason), ">= 0.97")]
    # Islands that never meet have a result each, of which the job saves one.
    total = sum(found["never meet"].rates)
    theory = len(SPEEDS) * min(SPEEDS) / sum(SPEEDS)
    rows = []
    for name, limit in (("decoupled", ">= 0.97"), ("in step", "")):
        its = found[name]
        note = f"{its.rate:.1f} of {total:.1f} steps per second; {its.wrong} samples did not count once"
        note += "" if limit else f"; theory {theory:.2f}"
        goal = "I6" if limit else ""
        rows.append(row(goal, f"{what}, {name}", its.rate / total, "× the sum of the speeds", limit, note))
    return rows


def server_deaths(samples: int) -> list[Row]:
    """I7: one of two servers dies."""
    rows = []
    for replicas in (2, 1):
        what = f"4 islands, quorum 1, replicas {replicas}: a server is killed"
        conf = islands(f"{EXACT} replicas: {replicas}", 4, 2, f"{LEDGER} snapshot_s: 2")
        try:
            with Sides() as sides:
                calm = timed(sides, "no death", conf, samples, [1.0] * 4)
                words = ("--server", "server 0/1", "--server-at", str(samples // 8))
                torn = timed(sides, "death", conf, samples, [1.0] * 4, *words)
        except Refused as reason:
            rows.append(absent("I7", f"{what}: longest pause of an island", "steps", str(reason)))
            continue
        pause = 1e3 * (torn.longest_pause - calm.longest_pause) / STEP_MS
        note = f"{torn.longest_pause:.2f} s; without a death {calm.longest_pause:.2f} s; {len(torn.killed)} killed"
        limit = "<= 1" if replicas == 2 else ""
        rows.append(row("I7" * bool(limit), f"{what}: longest pause of an island", pause, "steps more", limit, note))
        again = f"{torn.wrong} samples did not count once"
        rows.append(row("", f"{what}: steps that were made twice", float(torn.steps - samples), "steps", "", again))
    return rows


# --- I8: simulated islands ---

MANY = 10_000


def simulated() -> list[Row]:
    """I8: the time for many islands, and the goodput of the published layouts."""
    many = f"{MANY} simulated islands of 1.2 M chips"
    published = "simulated goodput of the published layouts, beside the published figures"
    began = time.perf_counter()
    goodput.simulated(ChipFailures(1_200_000), MANY)
    seconds = time.perf_counter() - began
    shares = [
        (goodput.simulated(ChipFailures(chips), islands).share, paper) for (chips, islands), paper in PUBLISHED.items()
    ]
    away = [100 * abs(share - paper) for share, paper in shares]
    figures = ", ".join(f"{100 * share:.0f}/{100 * paper:.0f}" for share, paper in shares)
    return [
        row("I8", many, seconds, "s", "<= 60"),
        row("I8", published, Figure(max(away), min(away), max(away)), "points, at worst", "<= 2", f"in %: {figures}"),
    ]


# --- I9, I10 ---


def coding(rounds: int) -> list[Row]:
    """I9: kE3M0 beside kInt8, in bodies of 1 MB."""
    torch.set_num_threads(1)
    bodies = {kind: Bodies(16 * BODY, kind) for kind in ("kE3M0", "kInt8")}
    sides = {}
    for kind, its in bodies.items():
        for way, run in (("encoded and decoded", its.alone), ("the same with error feedback", its.with_feedback)):
            sides[f"{kind}: 1 MB {way}"] = clocked(run)
    found = interleave(sides, max(rounds, 2 * ROUNDS))
    for its in bodies.values():
        its.check()
    limits = {"kE3M0: 1 MB encoded and decoded": "<= 0.4"}
    return [
        row("I9" * (name in limits), name, its.figure.times(1 / 16), "ms", limits.get(name, ""))
        for name, its in found.items()
    ]


SMALL_MB, LARGE_MB = 16, 144


def memory() -> list[Row]:
    """I10: the bytes that each byte of the model adds to the peak of a worker, less those of the plain script."""
    ways = {
        "plain": lambda sides, model: sides.peer(f"plain {model}", "alone", 1, model),
        "in step": lambda sides, model: _island(sides, model, f"sync_freq: 4 {NESTEROV}"),
        "with overlap": lambda sides, model: _island(sides, model, f"sync_freq: 4 overlap: 2 {NESTEROV}"),
        "decoupled": lambda sides, model: _island(sides, model, f"sync_freq: 4 quorum: 1 {NESTEROV}"),
    }
    slopes: dict[str, float] = {}
    rows = []
    for name, begin in ways.items():
        what = f"a worker, {name}: memory for each byte of the model"
        try:
            small, large = (_peak(partial(begin, model=f"memory:{mb * 10**6}")) for mb in (SMALL_MB, LARGE_MB))
        except Refused as reason:
            rows.append(absent("I10" * (name != "plain"), what, "bytes", str(reason)))
            continue
        slopes[name] = (large - small) / ((LARGE_MB - SMALL_MB) * 1e6)
        note = f"peaks {small / 1e6:.0f} MB and {large / 1e6:.0f} MB at {SMALL_MB} MB and {LARGE_MB} MB"
        if name == "plain" or "plain" not in slopes:
            rows.append(row("", what, slopes[name], "bytes", "", note))
        else:
            more = slopes[name] - slopes["plain"]
            rows.append(row("I10", f"{what}, over the plain script", more, "bytes", "<= 2", note))
    return rows


def _island(sides: Sides, model: str, inside: str) -> Side:
    # A short name: the path of a socket has at most 107 characters.
    return sides.job("island", islands(f"{inside} transport: kTcp", 1, 1), 1, model)


def _peak(begin: Callable[[Sides], Side]) -> float:
    with Sides() as sides:
        side = begin(sides)
        side.run(16)
        return float(max(answer["peak"] for answer in side.ask(check=True)))


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=GOALS, help="some of the goals; nothing is saved then")
    parser.add_argument("--trial", action="store_true", help="save nothing")
    parser.add_argument("--loss-steps", type=int, default=0, help="I2: steps of the islands; 800 take some minutes")
    parser.add_argument("--seconds", type=float, default=120.0, help="I5: of each of two jobs; 600 for the goal")
    parser.add_argument("--kill-every", type=float, default=29.0, help="I5: seconds from one death to the next")
    parser.add_argument("--steps", type=int, default=1600, help="I6 and I7: of all workers together")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    options.trial = options.trial or bool(options.only)
    parts: Mapping[str, Callable[[], list[Row]]] = {
        "I1": lambda: slow_link(options.rounds, options.loss_steps),
        "I3": traffic,
        "I5": lambda: deaths(options.seconds, options.kill_every),
        "I6": lambda: speeds(options.steps),
        "I7": lambda: server_deaths(options.steps),
        "I8": simulated,
        "I9": lambda: coding(options.rounds),
        "I10": memory,
    }
    wanted = set(options.only or GOALS)
    if "I2" in wanted:
        wanted.add("I1")  # its steps are multiplied
    rows: list[Row] = []
    for name, part in parts.items():
        if name in wanted:
            say(f"{name}")
            rows += part()
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
