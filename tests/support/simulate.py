"""Test jobs under faults, in virtual time.

Groups die, leave and join, two of them at once, connections end, processes pause, become slow or cannot be started
once, clocks jump, the whole job dies and restarts from its newest snapshot, also between two messages of its end, and
messages are delayed, duplicated or reordered. A ledger has a cell for every batch, and each batch must count once, at
the end and in every snapshot. If a seed violates this, its schedule is reduced to the faults that are needed.

    python tests/support/simulate.py --seed 7 --layout examples/conf/downpour.conf
    python tests/support/simulate.py --seeds 1000
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from seeded_runs import LAYOUTS, TrialVerdict, chosen, layout_of, prepared, run_seeds, run_trial, schedule_of, shrink

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import load_with_warnings
from topotrain.tools.cli.job_arguments import refusing
from topotrain.tools.monitor.live_terminal import redraws
from topotrain.tools.simulator.one_core import one_core

_SHOWN = 20
"""Wrong seeds that are listed at most."""


def simulate(
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of all random choices.")] = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="COUNT", min=1, help="Simulate so many seeds, from N on.")
    ] = 1,
    where: Annotated[
        str,
        typer.Option("--layout", metavar="NAME|JOB.conf", help="Instead of one that the seed chooses."),
    ] = "",
    only: Annotated[
        str,
        typer.Option("--only", metavar="I,J", help="Only these of the seed's faults; a - alone: none."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Simulate a job under faults, on a simulated network in virtual time.

    It has the same servers as a real job; only the script's pushes are made up. Launcher and store have no part in
    it. Ends with code 1 if a batch was lost or counted twice, or if a process would wait for ever.
    """
    with refusing():
        job = _job(where)
        if seeds > 1 and only:
            raise ConfigError("--only", only, "is about the faults of one seed: leave --seeds out")
        with one_core():
            if seeds > 1:
                raise typer.Exit(_many(range(seed, seed + seeds), job, where, as_json))
            raise typer.Exit(_one(seed, job, where, only, as_json))


def _job(where: str) -> Job | None:
    if not where:
        return None
    if where in LAYOUTS:
        return LAYOUTS[where]
    if not where.endswith((".conf", ".yaml", ".yml")):
        raise ConfigError("--layout", where, f"must be a job file, or one of {', '.join(LAYOUTS)}")
    return prepared(load_with_warnings(where, (), None, ())[0], where)


@dataclass(frozen=True, slots=True)
class _Found:
    """A verdict, with the shortest schedule that gives the same if it is bad."""

    verdict: TrialVerdict
    shortest: TrialVerdict | None
    kept: tuple[int, ...]

    def command(self) -> str:
        """Return the command that repeats the shortest schedule."""
        only = ",".join(map(str, self.kept)) or "-"
        words = f'--seed {self.verdict.seed} --layout "{self.verdict.layout}" --only {only}'
        return f"python tests/support/simulate.py {words}"

    def as_data(self) -> dict[str, Any]:
        data = self.verdict.as_data()
        if self.shortest is not None:
            data["shortest"] = {**self.shortest.as_data(), "command": self.command()}
        return data


def _looked_into(verdict: TrialVerdict, job: Job | None) -> _Found:
    if not verdict.wrong:
        return _Found(verdict, None, ())
    return _Found(verdict, *shrink(job or LAYOUTS[verdict.layout], verdict))


def _one(seed: int, job: Job | None, name: str, only: str, as_json: bool) -> int:
    name = name or layout_of(seed)
    used = job or LAYOUTS[name]
    schedule = schedule_of(used, name, seed)
    kept = _numbers(only, len(schedule.faults))
    if kept is None:
        found = _looked_into(run_trial(used, name, seed, schedule), used)
    else:
        found = _Found(run_trial(used, name, seed, chosen(schedule, kept)), None, kept)
    print(json.dumps(found.as_data(), indent=2) if as_json else _words(found))
    return int(bool(found.verdict.wrong))


def _numbers(only: str, count: int) -> tuple[int, ...] | None:
    """Return the numbers of the chosen faults; None: all. Raises ConfigError."""
    if not only:
        return None
    # A run without any fault shows whether the error needs one.
    words = [] if only == "-" else only.split(",")
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise ConfigError("--only", only, f"must be numbers below {count}, separated by commas, or -")
    return tuple(sorted({int(word) for word in words}))


def _many(seeds: range, job: Job | None, name: str, as_json: bool) -> int:
    begun, wrong = time.monotonic(), list[TrialVerdict]()
    counts = dict.fromkeys(("kills", "crashes", "moves", "snapshots", "messages"), 0)
    shows = redraws(sys.stderr)
    for done, verdict in enumerate(run_seeds(seeds, job, name), 1):
        for what in counts:
            counts[what] += getattr(verdict, what)
        if verdict.wrong:
            wrong.append(verdict)
        if shows and done % 50 == 0:
            print(f"\r{done} of {len(seeds)} seeds, {len(wrong)} wrong", end="", file=sys.stderr, flush=True)
    if shows:
        print("\r\033[K", end="", file=sys.stderr)
    took = time.monotonic() - begun
    # Only the first: shortening a schedule runs it many times.
    first = _looked_into(wrong[0], job) if wrong else None
    if as_json:
        rate = {"seconds": round(took, 1), "seeds_per_s": round(len(seeds) / took, 1)}
        data = {"seeds": len(seeds), "wrong": [v.seed for v in wrong], **counts, **rate}
        print(json.dumps(data if first is None else {**data, "first": first.as_data()}, indent=2))
    else:
        print(_summary(len(seeds), wrong, counts, took))
        if first is not None:
            print(_words(first))
    return int(bool(wrong))


def _summary(seeds: int, wrong: Sequence[TrialVerdict], counts: dict[str, int], took: float) -> str:
    counted = ", ".join(f"{count} {what}" for what, count in counts.items())
    text = f"{seeds} seeds in {took:.0f} s ({seeds / took:.0f} per second): {counted}; {len(wrong)} went wrong"
    more = ", ..." if len(wrong) > _SHOWN else ""
    return text + (": " + ", ".join(str(v.seed) for v in wrong[:_SHOWN]) + more if wrong else "")


def _words(found: _Found) -> str:
    verdict = found.verdict
    schedule = verdict.schedule
    read = f"{schedule.batches} batches in {schedule.epochs} epoch{'s' * (schedule.epochs > 1)}, {schedule.mode}"
    lines = [f"seed {verdict.seed}, layout {verdict.layout}: {read}; network {schedule.network}"]
    numbers = found.kept if found.shortest is None and found.kept else range(len(schedule.faults))
    for number, fault, moment in zip(numbers, schedule.faults, verdict.moments, strict=True):
        came = "did not come to it" if moment is None else f"{moment:.4f} s"
        lines.append(f"  {number}: {fault} [{came}]")
    passed = f"{verdict.messages} messages, {verdict.snapshots} snapshots, {verdict.seconds:.3f} s of virtual time"
    if not verdict.wrong:
        return "\n".join([*lines, f"ledger: every batch counted once; {passed}; run {verdict.digest:08x}"])
    lines.append(f"WRONG: {verdict.wrong}; {passed}; run {verdict.digest:08x}")
    if found.shortest is not None:
        # Without a shortest one of its own, which would be printed without end.
        again = replace(found, verdict=found.shortest, shortest=None)
        lines += ["", "the same with less:", _words(again), "", f"to repeat it: {found.command()}"]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(simulate)
