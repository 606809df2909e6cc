"""The long check of what goes on after deaths: `make chaos`, `python -m tests.soak.chaos [--only C B] [--kills 200]`.

Jobs of all frameworks are tormented until so many processes were killed; whether everything was counted is read from
their results. The other checks are tests of the suite with larger numbers, and rehearsals in virtual time.

A check that was not run is told as NOT RUN, with the reason. Every seed is shown, and every failure with the command
that repeats it. The findings go to chaos.json beside this file, and into the page about fault tolerance.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import ROOT, commit, environment, machine, say
from tests.soak.torment import Blows, Ground, Setting, Trial

PAGE, RECORD = ROOT / "benchmarks" / "RESULTS.md", Path(__file__).with_suffix(".json")
BEGIN, END = "<!-- measured: written by make chaos -->", "<!-- end of measured -->"
NOT_RUN = "NOT RUN"
KILLS, JOBS, SECONDS = 200, 10, 3600.0

OFTEN, HALF = "reduce: kSum snapshot_s: 1", "snapshot_s: 0.5"
APART, COPIES = "server_worker_separate: true", "transport: kTcp replicas: 2"
SYNCHRONOUS = f"nworkers_per_group: 3 nservers_per_group: 2 {APART}"
TWO_GROUPS = f"nworker_groups: 2 nworkers_per_group: 2 {APART}"
HALVES = ("--halves", "--epochs", "3", "--step-s", "0.02")
BACKUP = f"{OFTEN} grads: kHidden per_worker_batch: true"
NET = ("resuming.py", ("net", "--epochs", "8"), 0)

LEDGERS: Sequence[Setting] = (
    Setting("Sandblaster", SYNCHRONOUS, OFTEN),
    Setting("AllReduce", "nworkers_per_group: 3 nservers_per_group: 3", OFTEN),
    Setting("Downpour", f"{TWO_GROUPS} nservers_per_group: 2", OFTEN),
    Setting("Distributed Hogwild", "nworker_groups: 3 nserver_groups: 3", OFTEN),
    Setting("hybrid", f"{TWO_GROUPS} nserver_groups: 2", OFTEN),
    Setting("split model", f"nworkers_per_group: 2 {APART}", OFTEN, args=HALVES),
    Setting("Sandblaster, two copies", f"{SYNCHRONOUS} {COPIES}", OFTEN),
    Setting("Downpour, two copies", f"{TWO_GROUPS} nservers_per_group: 2 {COPIES}", OFTEN),
    Setting("backup workers", f"{SYNCHRONOUS} nservers_per_procs: 2 backup: 1", BACKUP),
)
"""One cell per sample; C and L1."""

BITS: Sequence[Setting] = (
    Setting("Sandblaster, two copies", f"{SYNCHRONOUS} {COPIES}", HALF, *NET),
    Setting("Sandblaster", SYNCHRONOUS, HALF, *NET),
    Setting("AllReduce", "nworkers_per_group: 2 nservers_per_group: 2", HALF, *NET),
)
"""BatchNorm, dropout, Adam and a schedule; B."""


class Line(NamedTuple):
    """A line of the table. `verdict`: "ok", "FAILED" or NOT_RUN."""

    id: str
    what: str
    verdict: str
    found: str


class Check(NamedTuple):
    """A check that is a command of its own: a file or a module, and its arguments."""

    id: str
    what: str
    words: tuple[str, ...]


def _suite(*files: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-rA", "-s", "-p", "no:cacheprovider", *(f"tests/{file}.py" for file in files))


_STRANGERS = ("comm/security/test_strangers", "support/test_unpickle_audit", "comm/security/test_secret")
_STAYS = "memory, descriptors, logs and workspace stay as they are"
CHECKS: Sequence[Check] = (
    Check("S1", "20,000 simulated schedules of faults", ("tests/support/simulate.py", "--seeds", "20000")),
    Check("S2", "every schedule of a small world", _suite("core/server/test_exhaustive")),
    Check("K", "4,000 damaged images of snapshots", _suite("extensions/checkpointing/test_damaged_snapshots")),
    Check("Z", "1,000,000 frames of hostile peers", _suite("comm/transport/test_fuzz")),
    Check("A", "20,000 strangers; secrets; nothing unpickled", _suite(*_STRANGERS)),
    Check("N", "NaN and Inf from workers", _suite("core/server/test_nonfinite")),
    Check("E", f"thousands of epochs with deaths: {_STAYS}", ("-m", "tests.soak.endurance")),
    Check("P", "links that are cut, one way or both; a store that is away", ("-m", "tests.soak.partitions")),
)
LARGER: Mapping[str, Mapping[str, str]] = {
    "K": {"TORTURE_IMAGES": "4000"},
    "Z": {"TOPOTRAIN_FUZZ_FRAMES": "1000000"},
    "A": {"TOPOTRAIN_FUZZ_FRAMES": "400000"},
}
"""Variables with which a check is larger than in the suite."""
WHAT: Mapping[str, str] = {
    "C": "processes killed and frozen at random",
    "L1": "ledgers: every sample counted as often as it was read",
    "B": "servers of synchronous jobs are killed: the bits are those of an undisturbed job",
    **{check.id: check.what for check in CHECKS},
}
IDS = tuple(WHAT)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.chaos", description="Kill, damage, forge, and count.")
    parser.add_argument("--only", nargs="*", default=list(IDS), choices=IDS, help="some of the checks; all without")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"processes to be killed; {KILLS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"no job is begun after that; {SECONDS:g}")
    parser.add_argument("--seed", type=int, default=1, help="of the first job; each has the next")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    missing = [i for i in IDS if i not in given.only]
    keep([Line(i, WHAT[i], NOT_RUN, "not asked for") for i in missing])
    lines: list[Line] = []
    for found in rows(given.only, given.kills, given.seed, time.monotonic() + given.seconds):
        keep(found)
        lines += found
    for line in lines:
        print(f"{line.id:3} {line.verdict:8} {line.what}: {line.found}")
    if missing:
        print(f"{NOT_RUN}, since it was not asked for: {', '.join(missing)}")
    raise SystemExit(any(line.verdict == "FAILED" for line in lines))


def rows(only: Sequence[str], kills: int, seed: int, until: float) -> Iterator[list[Line]]:
    """Run the checks that were asked for, and yield the lines of each one as soon as it has ended."""
    if {"C", "L1", "B"} & set(only):
        load = os.getloadavg()[0]
        with Ground() as ground:
            if {"C", "L1"} & set(only):
                trials = torment(ground, kills, seed, until)
                keep_waits(trials, seed, load)
                yield counted(trials, kills)
            if "B" in only:
                yield [identical(ground, seed, until)]
    for check in CHECKS:
        if check.id in only:
            yield [run(check, until)]


def blows_of(seed: int) -> Blows:
    """What a job suffers: always kills, then freezes, pairs, and moments that no clock finds."""
    kinds = Blows(), Blows(freeze=0.3), Blows(pairs=0.4), Blows("2s", at=("start", "again"))
    return (*kinds, Blows(freeze=0.2, pairs=0.2, at=("end",)))[seed % 5]


def torment(ground: Ground, kills: int, seed: int, until: float) -> list[Trial]:
    """Run jobs of all settings in turn until so many processes were killed."""
    found: list[Trial] = []
    while sum(trial.killed for trial in found) < kills and time.monotonic() < until:
        round_of, setting = seed + len(found), LEDGERS[len(found) % len(LEDGERS)]
        found.append(told(ground.trial(setting, blows_of(round_of // len(LEDGERS)), round_of)))
    return found


def told(trial: Trial) -> Trial:
    """Print one line, and for a failure all that repeats it."""
    what = "; ".join(trial.wrong) or "ok"
    say(f"  {trial.setting.framework}, seed {trial.seed}: {trial.killed} killed, {trial.frozen} frozen: {what}")
    if trial.wrong:
        say(f"  {trial.command}\n{trial.said}")
    return trial


def counted(trials: Sequence[Trial], kills: int) -> list[Line]:
    """Rows C and L1."""
    killed, wrong = sum(t.killed for t in trials), [t for t in trials if t.wrong]
    frozen, left = sum(t.frozen for t in trials), sum(t.left for t in trials)
    enough = "" if killed >= kills else f"; {kills} were asked for, the time was over"
    seeds = f"seeds {trials[0].seed} to {trials[-1].seed}" if trials else "no job was run"
    text = f"{killed} kills, {frozen} freezes, {len(trials)} jobs, {len(wrong)} of them wrong, {left} things left"
    verdict = "ok" if trials and not wrong and not enough else "FAILED"
    rights = [t for t in trials if not any("cells" in w or "hung" in w or "code" in w for w in t.wrong)]
    all_right = "ok" if trials and len(rights) == len(trials) else "FAILED"
    return [
        Line("C", WHAT["C"], verdict, f"{text}; {seeds}{enough}"),
        Line("L1", WHAT["L1"], all_right, f"{len(rights)} of {len(trials)} jobs"),
    ]


def identical(ground: Ground, seed: int, until: float) -> Line:
    """Row B. A worker group that starts again alone draws its random numbers anew, so only servers are killed."""
    found: list[Trial] = []
    while len(found) < JOBS and time.monotonic() < until:
        setting, blows = BITS[len(found) % len(BITS)], Blows("1s", "6s", whom="server")
        found.append(told(ground.trial(setting, blows, seed + len(found))))
    right = sum(not trial.wrong for trial in found)
    kills, seeds = sum(t.killed for t in found), f"seeds {seed} to {seed + len(found) - 1}"
    text = f"{right} of {len(found)} jobs, {kills} kills; {seeds}; from second copies, and from snapshots"
    if right == len(found) < JOBS:
        return Line("B", WHAT["B"], NOT_RUN, f"the time was over before {JOBS} jobs had been run; {text}")
    return Line("B", WHAT["B"], "ok" if right == len(found) else "FAILED", text)


def run(check: Check, until: float) -> Line:
    """Run a check that is a command to its end, if there is the time."""
    left = until - time.monotonic()
    if left <= 0:
        return Line(check.id, check.what, NOT_RUN, "the time was over")
    say(f"{check.id}: {check.what}")
    began, command, environ = (
        time.monotonic(),
        [sys.executable, *check.words],
        {**environment(), **LARGER.get(check.id, {})},
    )
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return Line(check.id, check.what, NOT_RUN, f"stopped after {left:.0f} s, the time was over")
    if done.returncode:
        say(done.stdout[-4000:] + done.stderr[-2000:])
    last = _last(done.stdout) or _last(done.stderr)
    if last.startswith(NOT_RUN):
        return Line(check.id, check.what, NOT_RUN, last.removeprefix(NOT_RUN).lstrip(": "))
    verdict = "FAILED" if done.returncode else "ok"
    return Line(check.id, check.what, verdict, f"{last} ({time.monotonic() - began:.0f} s)")


def _last(said: str) -> str:
    """What a check says of itself: its seeds, or how large its searches were, and its last line."""
    lines = [line.strip(" =") for line in said.splitlines() if line.strip(" =.")]
    seeds = [line for line in lines if re.match(r"\.?(seed \d+|Scope)", line)]
    return "; ".join([*(line.lstrip(".") for line in seeds[:3]), *lines[-1:]])[:300]


def _found() -> dict[str, Any]:
    nothing: dict[str, Any] = {"machine": machine(), "load": 0.0, "seed": 0, "lines": {}, "waits": []}
    return {**nothing, **(json.loads(RECORD.read_text()) if RECORD.exists() else {})}


def _keep(data: Mapping[str, Any]) -> None:
    """Write the record, and put it into the page."""
    RECORD.write_text(json.dumps(data, indent=1) + "\n")
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{page(data)}{END}{rest.split(END)[1]}", encoding="utf-8")


def keep(lines: Sequence[Line]) -> None:
    """Record what was found. A check that was not asked for keeps its former line, and the commit of that line."""
    data, state = _found(), commit()
    kept: dict[str, Any] = data["lines"]
    for line in lines:
        if line.found != "not asked for" or line.id not in kept:
            kept[line.id] = {**line._asdict(), "commit": state}
    _keep({**data, "lines": {i: kept[i] for i in IDS if i in kept}})


def keep_waits(trials: Sequence[Trial], seed: int, load: float) -> None:
    """Record how long the jobs of rows C and L1 waited, and where."""
    if trials:
        _keep({**_found(), "machine": machine(), "load": round(load, 1), "seed": seed, "waits": waited(trials)})


def waited(trials: Sequence[Trial]) -> list[list[Any]]:
    """Per framework, and role of the lost process: jobs, losses, and seconds until the next step (p50, p99, most)."""
    found: list[list[Any]] = []
    for setting in LEDGERS:
        mine = [t for t in trials if t.setting.framework == setting.framework]
        for role in ("worker", "server"):
            if waits := sorted(wait for t in mine for who, wait in t.waits if who == role):
                p50, p99 = waits[len(waits) // 2], waits[min(len(waits) - 1, int(0.99 * len(waits)))]
                numbers = [round(value, 2) for value in (p50, p99, waits[-1])]
                found.append([setting.framework, role, len(mine), len(waits), *numbers])
    return found


def _grid(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in cells)


def page(data: Mapping[str, Any]) -> str:
    """The part of the page that is made of figures."""
    ran = [v for v in data["lines"].values() if v["verdict"] != NOT_RUN]
    not_run = [v for v in data["lines"].values() if v["verdict"] == NOT_RUN]
    cells = [[v["id"], v["what"], v["verdict"], v["found"], f"`{v['commit']}`"] for v in ran]
    waits = _grid(["framework", "lost", "jobs", "losses", "median s", "99 of 100 s", "most s"], data["waits"])
    missing = "".join(f"* {v['id']}, {WHAT[v['id']]}: {v['found']}\n" for v in not_run)
    return f"""
{_grid(["", "check", "", "found", "commit"], cells)}

From the loss of a process to the next step of those that started again, with a load of {data["load"]} on
{data["machine"]}, where the other processes of the job were there, too:

{waits}

{NOT_RUN}:

{missing or "* nothing"}
"""


if __name__ == "__main__":
    main()
