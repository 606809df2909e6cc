"""The long check of what goes on after deaths: `make chaos`, `python -m benchmarks.chaos [--only C B] [--kills 200]`.

Jobs of all frameworks are tormented until so many processes were killed; whether everything was counted is read from
their results. The other checks are tests of the suite with larger numbers, and rehearsals in virtual time.

Rule: a check that was not run is told as NOT RUN, with the reason, never as one that went well. Every seed is shown,
and every failure with the command that repeats it. What was found goes to results/chaos.json, and into the page.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.markdown import grid
from benchmarks.record import RESULTS, ROOT, commit, machine, say
from benchmarks.sides import environment
from benchmarks.torment import SERVERS, Blows, Ground, Setting, Trial

PAGE = ROOT / "docs" / "fault-tolerance.md"
BEGIN, END = "<!-- measured: written by make chaos -->", "<!-- end of measured -->"
NOT_RUN = "NOT RUN"
KILLS, JOBS, SECONDS = 200, 10, 3600.0

OFTEN = "reduce: kSum snapshot_s: 1"
SYNCHRONOUS = "nworkers_per_group: 3 nservers_per_group: 2 server_worker_separate: true"
COPIES = "transport: kTcp replicas: 2"
HALVES = ("--halves", "--epochs", "3", "--step-s", "0.02")

LEDGERS: Sequence[Setting] = (
    Setting("Sandblaster", "Sandblaster", SYNCHRONOUS, OFTEN),
    Setting("AllReduce", "AllReduce", "nworkers_per_group: 3 nservers_per_group: 3", OFTEN),
    Setting("Downpour", "Downpour", f"nworker_groups: 2 nworkers_per_group: 2 nservers_per_group: 2 {SERVERS}", OFTEN),
    Setting("Hogwild", "Distributed Hogwild", "nworker_groups: 3 nserver_groups: 3", OFTEN),
    Setting("hybrid", "hybrid", f"nworker_groups: 2 nworkers_per_group: 2 nserver_groups: 2 {SERVERS}", OFTEN),
    Setting("split model", "split model", f"nworkers_per_group: 2 {SERVERS}", OFTEN, args=HALVES),
    Setting("Sandblaster, copies", "Sandblaster, two copies", f"{SYNCHRONOUS} {COPIES}", OFTEN),
    Setting(
        "Downpour, copies",
        "Downpour, two copies",
        f"nworker_groups: 2 nworkers_per_group: 2 nservers_per_group: 2 {SERVERS} {COPIES}",
        OFTEN,
    ),
    Setting(
        "backup workers",
        "backup workers",
        f"{SYNCHRONOUS} nservers_per_procs: 2 backup: 1",
        f"{OFTEN} grads: kHidden per_worker_batch: true",
    ),
)
"""One cell per sample; C and L1."""

BITS: Sequence[Setting] = (
    Setting(
        "Sandblaster, copies",
        "Sandblaster, two copies",
        f"{SYNCHRONOUS} {COPIES}",
        "snapshot_s: 0.5",
        "resuming.py",
        ("net", "--epochs", "8"),
        0,
    ),
    Setting("Sandblaster", "Sandblaster", SYNCHRONOUS, "snapshot_s: 0.5", "resuming.py", ("net", "--epochs", "8"), 0),
    Setting(
        "AllReduce",
        "AllReduce",
        "nworkers_per_group: 2 nservers_per_group: 2",
        "snapshot_s: 0.5",
        "resuming.py",
        ("net", "--epochs", "8"),
        0,
    ),
)
"""BatchNorm, dropout, Adam and a schedule; B."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table. `verdict`: "ok", "FAILED" or NOT_RUN."""

    id: str
    what: str
    verdict: str
    found: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check that is a command of its own. needs: without this file there is no such check yet; "" : there is none."""

    id: str
    what: str
    needs: str
    words: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


def _suite(*files: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-rA", "-s", "-p", "no:cacheprovider", *files)


CHECKS: Sequence[Check] = (
    Check(
        "S1",
        "20,000 simulated schedules of faults",
        "tests/support/simulate.py",
        ("tests/support/simulate.py", "--seeds", "20000"),
    ),
    Check(
        "S2",
        "every schedule of a small world",
        "tests/core/server/test_exhaustive.py",
        _suite("tests/core/server/test_exhaustive.py"),
    ),
    Check(
        "K",
        "4,000 damaged images of snapshots",
        "tests/extensions/checkpointing/test_damaged_snapshots.py",
        _suite("tests/extensions/checkpointing/test_damaged_snapshots.py"),
        {"TORTURE_IMAGES": "4000"},
    ),
    Check(
        "Z",
        "1,000,000 frames of hostile peers",
        "tests/comm/transport/test_fuzz.py",
        _suite("tests/comm/transport/test_fuzz.py"),
        {"TOPOTRAIN_FUZZ_FRAMES": "1000000"},
    ),
    Check(
        "A",
        "20,000 strangers; secrets; nothing unpickled",
        "tests/comm/security/test_strangers.py",
        _suite(
            "tests/comm/security/test_strangers.py",
            "tests/support_tests/test_unpickle_audit.py",
            "tests/comm/security/test_secret.py",
        ),
        {"TOPOTRAIN_FUZZ_FRAMES": "800000"},
    ),
    Check(
        "N",
        "NaN and Inf from workers",
        "tests/core/server/test_nonfinite.py",
        _suite("tests/core/server/test_nonfinite.py"),
    ),
    Check(
        "E",
        "thousands of epochs with deaths: memory, descriptors, logs and workspace stay as they are",
        "benchmarks/endurance.py",
        ("-m", "benchmarks.endurance"),
    ),
    Check(
        "P",
        "links that are cut, one way or both; a store that is away",
        "benchmarks/partitions.py",
        ("-m", "benchmarks.partitions"),
    ),
)
WHAT: Mapping[str, str] = {
    "C": "processes killed and frozen at random",
    "L1": "ledgers: every sample counted as often as it was read",
    "B": "servers of synchronous jobs are killed: the bits are those of an undisturbed job",
    **{check.id: check.what for check in CHECKS},
}
IDS = tuple(WHAT)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="Kill, damage, forge, and count.")
    parser.add_argument("--only", nargs="*", default=list(IDS), choices=IDS, help="some of the checks; all without")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"processes to be killed; {KILLS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"no job is begun after that; {SECONDS:g}")
    parser.add_argument("--seed", type=int, default=1, help="of the first job; each has the next")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    given = parser.parse_args()
    if given.render:
        render()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    until = time.monotonic() + given.seconds
    keep([Line(i, WHAT[i], NOT_RUN, "not asked for") for i in IDS if i not in given.only])
    lines: list[Line] = []
    for found in rows(given.only, given.kills, given.seed, until):
        keep(found)
        lines += found
    for line in lines:
        print(f"{line.id:3} {line.verdict:8} {line.what}: {line.found}")
    missing = ", ".join(i for i in IDS if i not in given.only)
    if missing:
        print(f"{NOT_RUN}, since it was not asked for: {missing}")
    raise SystemExit(any(line.verdict == "FAILED" for line in lines))


def rows(only: Sequence[str], kills: int, seed: int, until: float) -> Iterator[list[Line]]:
    """Run what is wanted; the lines of each check as soon as there are any: the next may take long."""
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


# --- jobs whose processes are killed ---------------------------------------------------------------------------------


def blows_of(seed: int) -> Blows:
    """What a job suffers: always kills, then freezes, pairs, and moments that no clock finds."""
    kinds = (
        Blows("1s"),
        Blows("1s", freeze=0.3),
        Blows("1s", pairs=0.4),
        Blows("2s", at=("start", "again")),
        Blows("1s", freeze=0.2, pairs=0.2, at=("end",)),
    )
    return kinds[seed % len(kinds)]


def torment(ground: Ground, kills: int, seed: int, until: float) -> list[Trial]:
    """Jobs of all settings in turn until so many processes were killed, and every setting had its turn."""
    found: list[Trial] = []
    while sum(trial.killed for trial in found) < kills and time.monotonic() < until:
        round_of = seed + len(found)
        trial = ground.trial(LEDGERS[len(found) % len(LEDGERS)], blows_of(round_of // len(LEDGERS)), round_of)
        found.append(trial)
        tell(trial)
    return found


def tell(trial: Trial) -> None:
    """One line, and for what went wrong all that repeats it."""
    what = "; ".join(trial.wrong) or "ok"
    say(f"  {trial.setting.name}, seed {trial.seed}: {trial.killed} killed, {trial.frozen} frozen: {what}")
    if trial.wrong:
        say(f"  {trial.command}\n{trial.said}")


def counted(trials: Sequence[Trial], kills: int) -> list[Line]:
    """Rows C and L1."""
    killed, wrong = sum(t.killed for t in trials), [t for t in trials if t.wrong]
    frozen, left = sum(t.frozen for t in trials), sum(t.left for t in trials)
    enough = "" if killed >= kills else f"; {kills} were asked for, the time was over"
    seeds = f"seeds {trials[0].seed} to {trials[-1].seed}" if trials else "no job was run"
    text = f"{killed} kills, {frozen} freezes, {len(trials)} jobs, {len(wrong)} of them wrong, {left} things left"
    verdict = "ok" if trials and not wrong and not enough else "FAILED"
    rights = [t for t in trials if not any("cells" in w or "hung" in w or "code" in w for w in t.wrong)]
    return [
        Line("C", WHAT["C"], verdict, f"{text}; {seeds}{enough}"),
        Line(
            "L1",
            WHAT["L1"],
            "ok" if trials and len(rights) == len(trials) else "FAILED",
            f"{len(rights)} of {len(trials)} jobs",
        ),
    ]


def identical(ground: Ground, seed: int, until: float) -> Line:
    """Row B: servers of synchronous jobs are killed, and the bits are those of an undisturbed job.

    A worker group that starts again alone draws its random numbers anew from the beginning of its epoch; that is no
    part of this row.
    """
    found: list[Trial] = []
    for number in range(JOBS):
        if time.monotonic() > until:
            break
        found.append(ground.trial(BITS[number % len(BITS)], Blows("1s", "6s", whom="server"), seed + number))
        tell(found[-1])
    right = sum(not trial.wrong for trial in found)
    kills, seeds = sum(t.killed for t in found), f"seeds {seed} to {seed + len(found) - 1}"
    text = f"{right} of {len(found)} jobs, {kills} kills; {seeds}; from second copies, and from snapshots"
    if right == len(found) < JOBS:
        return Line("B", WHAT["B"], NOT_RUN, f"the time was over before {JOBS} jobs had been run; {text}")
    return Line("B", WHAT["B"], "ok" if right == len(found) else "FAILED", text)


# --- checks that are commands ----------------------------------------------------------------------------------------


def run(check: Check, until: float) -> Line:
    """Run one of them to its end, if there is the time."""
    if not check.needs or not (ROOT / check.needs).exists():
        return Line(check.id, check.what, NOT_RUN, "there is no such check yet")
    left = until - time.monotonic()
    if left <= 0:
        return Line(check.id, check.what, NOT_RUN, "the time was over")
    say(f"{check.id}: {check.what}")
    began = time.monotonic()
    command = [sys.executable, *check.words]
    environ = {**environment(), **check.environ}
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


# --- what was found --------------------------------------------------------------------------------------------------


def _found() -> dict[str, Any]:
    path = RESULTS / "chaos.json"
    nothing: dict[str, Any] = {"machine": machine(), "load": 0.0, "seed": 0, "lines": {}, "waits": []}
    return {**nothing, **(json.loads(path.read_text()) if path.exists() else {})}


def _keep(data: Mapping[str, Any]) -> None:
    (RESULTS / "chaos.json").write_text(json.dumps(data, indent=1) + "\n")
    render()


def keep(lines: Sequence[Line]) -> None:
    """Store what was found, and show it; a check that was not asked for keeps what was found before, and its commit."""
    data, state = _found(), commit()
    kept: dict[str, Any] = data["lines"]
    for line in lines:
        if line.found != "not asked for" or line.id not in kept:
            kept[line.id] = {**asdict(line), "commit": state}
    _keep({**data, "lines": {i: kept[i] for i in IDS if i in kept}})


def keep_waits(trials: Sequence[Trial], seed: int, load: float) -> None:
    """Store how long the jobs of rows C and L1 waited, and where."""
    if trials:
        _keep({**_found(), "machine": machine(), "load": round(load, 1), "seed": seed, "waits": waited(trials)})


def waited(trials: Sequence[Trial]) -> list[list[Any]]:
    """Per framework, and whom it lost: jobs, losses, and seconds until the next step (p50, p99, most)."""
    rows: list[list[Any]] = []
    for setting in LEDGERS:
        mine = [t for t in trials if t.setting.framework == setting.framework]
        for role in ("worker", "server"):
            waits = sorted(wait for t in mine for who, wait in t.waits if who == role)
            if waits:
                p50, p99 = waits[len(waits) // 2], waits[min(len(waits) - 1, int(0.99 * len(waits)))]
                numbers = [round(value, 2) for value in (p50, p99, waits[-1])]
                rows.append([setting.framework, role, len(mine), len(waits), *numbers])
    return rows


def render() -> None:
    """Put what was found into the page."""
    path = RESULTS / "chaos.json"
    if not path.exists():
        return
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(f"{head}{BEGIN}\n{page(json.loads(path.read_text()))}{END}{tail}", encoding="utf-8")


def page(data: Mapping[str, Any]) -> str:
    """The part of the page that is made of figures."""
    ran = [v for v in data["lines"].values() if v["verdict"] != NOT_RUN]
    not_run = [v for v in data["lines"].values() if v["verdict"] == NOT_RUN]
    table = grid(
        ["", "check", "", "found", "commit"],
        [[v["id"], v["what"], v["verdict"], v["found"], f"`{v['commit']}`"] for v in ran],
    )
    waits = grid(
        ["framework", "lost", "jobs", "losses", "median s", "99 of 100 s", "most s"],
        [[str(cell) for cell in row] for row in data["waits"]],
    )
    missing = "".join(f"* {v['id']}, {WHAT[v['id']]}: {v['found']}\n" for v in not_run)
    return f"""
{table}

From the loss of a process to the next step of those that started again, with a load of {data["load"]} on
{data["machine"]}, where the other processes of the job were there, too:

{waits}

{NOT_RUN}:

{missing or "* nothing"}
"""


if __name__ == "__main__":
    main()
