"""Test jobs under faults, in virtual time.

Groups die, leave and join, two of them at once, connections end, processes pause, become slow or cannot be started
once, clocks jump, the whole job dies and restarts from its newest snapshot, also between two messages of its end, and
messages are delayed, duplicated or reordered. A ledger has a cell for every batch, and each batch must count once, at
the end and in every snapshot. If a seed violates this, its schedule is reduced to the faults that are needed.

    python tests/support/simulate.py --seed 7 --layout examples/conf/downpour.conf
    python tests/support/simulate.py --seeds 1000
"""

import time
from collections import Counter
from typing import Annotated

import typer
from seeded_runs import (
    LAYOUTS,
    TrialVerdict,
    chosen,
    layout_of,
    one_core,
    prepared,
    run_seeds,
    run_trial,
    schedule_of,
    shrink,
)

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import load_with_warnings
from topotrain.tools.cli.job_arguments import refusing

COUNTED = ("kills", "crashes", "moves", "snapshots", "messages")
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
        typer.Option("--only", metavar="I,J", help="Only these faults of one seed; a - alone: none."),
    ] = "",
) -> None:
    """Simulate a job under faults, on a simulated network in virtual time.

    It has the same servers as a real job; only the script's pushes are made up. Launcher and store have no part in
    it. Ends with code 1 if a batch was lost or counted twice, or if a process would wait for ever.
    """
    with refusing(), one_core():
        job = _job(where)
        begun, count, wrong = time.monotonic(), Counter[str](), list[TrialVerdict]()
        for verdict in [_chosen(seed, job, where, only)] if only else run_seeds(range(seed, seed + seeds), job, where):
            count.update({what: getattr(verdict, what) for what in COUNTED})
            if seeds == 1 or (verdict.wrong and not wrong):
                print(_words(verdict))
            wrong += [verdict] if verdict.wrong else []
        took, counted = time.monotonic() - begun, ", ".join(f"{count[what]} {what}" for what in COUNTED)
        print(f"{seeds} seeds in {took:.0f} s: {counted}; {len(wrong)} went wrong: {[v.seed for v in wrong[:_SHOWN]]}")
        if wrong and not only:
            # Only of the first one, as shortening a schedule runs it many times.
            shortest, kept = shrink(job or LAYOUTS[wrong[0].layout], wrong[0])
            print(
                f"\nthe same with less:\n{_words(shortest)}\n\nto repeat it: python tests/support/simulate.py", end=" "
            )
            faults = ",".join(map(str, kept)) or "-"
            print(f'--seed {shortest.seed} --layout "{shortest.layout}" --only {faults}')
        raise typer.Exit(int(bool(wrong)))


def _job(where: str) -> Job | None:
    if not where or where in LAYOUTS:
        return LAYOUTS.get(where)
    if not where.endswith((".conf", ".yaml", ".yml")):
        raise ConfigError("--layout", where, f"must be a job file, or one of {', '.join(LAYOUTS)}")
    return prepared(load_with_warnings(where, (), None, ())[0], where)


def _chosen(seed: int, job: Job | None, name: str, only: str) -> TrialVerdict:
    """Run one seed with only some of its faults; without any it shows whether the error needs one."""
    name = name or layout_of(seed)
    used = job or LAYOUTS[name]
    kept = [] if only == "-" else sorted(map(int, only.split(",")))
    return run_trial(used, name, seed, chosen(schedule_of(used, name, seed), kept))


def _words(verdict: TrialVerdict) -> str:
    """Return a verdict as text."""
    schedule = verdict.schedule
    read = f"{schedule.batches} batches in {schedule.epochs} epoch{'s' * (schedule.epochs > 1)}, {schedule.mode}"
    lines = [f"seed {verdict.seed}, layout {verdict.layout}: {read}; network {schedule.network}"]
    for number, (fault, moment) in enumerate(zip(schedule.faults, verdict.moments, strict=True)):
        came = "did not come to it" if moment is None else f"{moment:.4f} s"
        lines.append(f"  {number}: {fault} [{came}]")
    found = f"WRONG: {verdict.wrong}" if verdict.wrong else "ledger: every batch counted once"
    passed = f"{verdict.messages} messages, {verdict.snapshots} snapshots, {verdict.seconds:.3f} s of virtual time"
    return "\n".join([*lines, f"{found}; {passed}; run {verdict.digest:08x}"])


if __name__ == "__main__":
    typer.run(simulate)
