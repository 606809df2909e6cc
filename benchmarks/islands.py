"""Islands, worker groups that train alone between exchanges: `python -m benchmarks.islands [--only link loss ...]`.

    link     eight islands on an emulated link of 100 Mbit/s and 50 ms, against islands that never meet, and against DDP
    bytes    of a worker, against arithmetic
    deaths   workers are killed in turn: samples per second
    speeds   workers of different speed, against the sum of the speeds
    loss     the held-out loss of several ways to train, at equal samples (`islands_loss.py`)

Where processes sleep for a step (deaths, speeds), two cores carry all of them, and the product's own work is a
few percent of a core. Those jobs keep a ledger with a cell for each sample, and each cell is looked at in the end.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import islands_loss
from benchmarks.harness import ROUNDS, Row, Samples, absent, interleave, ratio, row
from benchmarks.learning import run_program
from benchmarks.models import CharacterModel, parameters
from benchmarks.programs.characters import text
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster, gather
from benchmarks.slow_link import MBIT, shaped_ddp

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


def ring_s(workers: int) -> float:
    """Seconds of an all-reduce in a ring over the link: of its bytes, and of its messages one after the other."""
    steps = 2 * (workers - 1)
    share = 4 * parameters(CharacterModel()) / workers
    return steps * (share * 8 / (MBIT * 1e6) + DELAY_MS / 1000)


def slow_link(rounds: int) -> list[Row]:
    """Samples per second on a slow link."""
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
    if "plain" not in found:
        raise Refused(missing["plain"])
    computing, how = found["plain"].median, ""
    if "DDP" not in found:
        how = f"DDP by arithmetic, {computing + ring_s(ISLANDS):.2f} s a step ({missing['DDP']})"
        found["DDP"] = Samples((computing + ring_s(ISLANDS),) * rounds)
    what = f"{ISLANDS} islands, {{}}, {MBIT} Mbit/s and {DELAY_MS} ms: samples per second"
    return [
        ratio(what.format(name), found, missing, over, name, f"× {over}", how if over == "DDP" else "")
        for name in ("streaming", "decoupled")
        for over in ("never meet", "DDP")
    ]


def traffic() -> list[Row]:
    """What a round of all fragments adds to the bytes of a worker."""
    elements, rows = parameters(CharacterModel(text()[2])), []
    for compression, up, down in (("kNone", 4.0, 4.0), ("kE3M0", 0.5 + 4 / 256, 2.0)):
        what = f"{ISLANDS} islands, {compression}: bytes of a worker in {SYNC_FREQ} steps, both ways"
        inside = f"{STREAMING} {NESTEROV} compression: {compression} transport: kTcp"
        with Sides() as sides:
            # Both have the same start and the same end.
            short, long = (_bytes(sides, islands(inside), rounds) for rounds in (2, 6))
        measured, counted = (long - short) / 4, elements * (up + down)
        note = f"{measured / 1e6:.3f} MB, {elements} elements × {up + down:g} bytes"
        rows.append(row(what, measured / counted, "× arithmetic", note))
    return rows


def _bytes(sides: Sides, conf: str, rounds: int) -> float:
    steps = rounds * SYNC_FREQ
    sizes = ("--samples", str(ISLANDS * steps), "--batch", "1")
    folder = run_program(sides, f"bytes {rounds}", conf, CHARACTERS, *sizes).parent
    report = json.loads((folder / "report.json").read_text())
    # The first worker also sends the first values and fetches the result.
    found = [each["bytes_out"] + each["bytes_in"] for each in report["processes"] if each["rank"]]
    return sum(found) / len(found)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of the steps of a job, in seconds of the clock.

    Attributes:
        processes: of each process, also of those that have died.
        deaths: how many died.
        wrong: samples that did not count once.
    """

    processes: Sequence[Sequence[float]]
    deaths: int
    wrong: int

    @property
    def rate(self) -> float:
        """Steps per second of all workers, while all of them were there."""
        first = max(times[0] for times in self.processes)
        last = min(times[-1] for times in self.processes)
        made = sum(first < time <= last for times in self.processes for time in times)
        return made / (last - first)

    @property
    def rates(self) -> list[float]:
        """Steps per second of each process."""
        return [(len(times) - 1) / (times[-1] - times[0]) for times in self.processes]

    @property
    def seconds(self) -> float:
        """From the first step of the job to its last one."""
        return max(times[-1] for times in self.processes) - min(times[0] for times in self.processes)

    @property
    def steps(self) -> int:
        """Those that were made, also if they did not count."""
        return sum(map(len, self.processes))


def timed(sides: Sides, name: str, conf: str, samples: int, speeds: Sequence[float], *more: str) -> StepTimes:
    """Run a job whose steps take a given time. Raises Refused."""
    say(f"  {name}: {samples} steps")
    words = ("--samples", str(samples), "--speeds", *map(str, speeds), *more)
    folder = run_program(sides, name, conf, TIMED, *words, limit_s=1800.0).parent
    from safetensors.torch import load_file

    cells = load_file(folder / "work" / "final.safetensors")["cells"]
    processes = [[float(line) for line in file.read_text().splitlines() if line] for file in folder.glob("times-*")]
    return StepTimes([its for its in processes if its], len(list(folder.glob("killed-*"))), int((cells != 1).sum()))


LEDGER = "reduce: kSum"
EXACT = f"sync_freq: {SYNC_FREQ} quorum: 1 transport: kTcp {MEAN}"
STEP_MS = 50.0


def deaths(seconds: float, every: float) -> list[Row]:
    """A worker dies every so many seconds."""
    kills, speeds = max(1, int(seconds / every) - 1), [1.0] * ISLANDS
    samples = int(seconds * ISLANDS * 1000 / STEP_MS)
    what = f"{ISLANDS} islands, quorum 1, one dies every {every:g} s"
    with Sides() as sides:
        conf = islands(EXACT, servers=1, top=f"{LEDGER} restarts: {kills + 1}")
        calm = timed(sides, "no deaths", conf, samples, speeds)
        words = ("--kill-every", str(every), "--kills", str(kills))
        torn = timed(sides, "deaths", conf, samples, speeds, *words)
    note = f"{torn.deaths} deaths in {torn.seconds:.0f} s; {torn.steps - samples} steps were made twice"
    note += f"; {torn.wrong} samples did not count once" if torn.wrong else "; each sample counted once"
    return [row(f"{what}: samples per second", calm.seconds / torn.seconds, "× without deaths", note)]


SPEEDS = (1.0, 1.0, 0.7, 0.4)


def speeds(samples: int) -> list[Row]:
    """Workers of different speed."""
    count = len(SPEEDS)
    ways = {
        "decoupled": islands(EXACT, count, 1, LEDGER),
        "in step": islands(f"sync_freq: {SYNC_FREQ} transport: kTcp {MEAN}", count, 1, LEDGER),
        "never meet": cluster(1, 1, count, server_groups=0, separate=False),
    }
    what = "speeds 1:1:0.7:0.4: samples per second"
    with Sides() as sides:
        found = {name: timed(sides, name, conf, samples, SPEEDS) for name, conf in ways.items()}
    # Islands that never meet have a result each, of which the job saves one.
    total = sum(found["never meet"].rates)
    theory = len(SPEEDS) * min(SPEEDS) / sum(SPEEDS)
    rows = []
    for name in ("decoupled", "in step"):
        its = found[name]
        note = f"{its.rate:.1f} of {total:.1f} steps per second; {its.wrong} samples did not count once"
        note += f"; theory {theory:.2f}" if name == "in step" else ""
        rows.append(row(f"{what}, {name}", its.rate / total, "× the sum of the speeds", note))
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts; nothing is saved then")
    parser.add_argument("--seconds", type=float, default=120.0, help="deaths: of each of two jobs")
    parser.add_argument("--kill-every", type=float, default=29.0, help="deaths: seconds from one to the next")
    parser.add_argument("--steps", type=int, default=1600, help="speeds: of all workers together")
    parser.add_argument("--seeds", type=int, default=3, help="loss: jobs of each way")
    parser.add_argument("--ways", nargs="+", choices=islands_loss.WAYS, default=list(islands_loss.WAYS), help="loss")


PARTS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "link": lambda options: slow_link(options.rounds),
    "bytes": lambda _: traffic(),
    "deaths": lambda options: deaths(options.seconds, options.kill_every),
    "speeds": lambda options: speeds(options.steps),
    "loss": lambda options: islands_loss.measure(options.ways, options.seeds),
}


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for name, part in PARTS.items():
        if name in (options.only or PARTS):
            say(name)
            try:
                rows += part(options)
            except Refused as reason:
                rows.append(absent(name, "×", str(reason)))
    return rows


if __name__ == "__main__":
    run_table("islands", "Islands", measure, declare)
