"""Test jobs under faults, in virtual time.

Groups die, leave and join, two of them at once, connections end, processes pause, become slow or cannot be started
once, clocks jump, the whole job dies and restarts from its newest snapshot, also between two messages of its end, and
messages are delayed, duplicated or reordered. A ledger has a cell for every batch, and each batch must count once, at
the end and in every snapshot. If a seed violates this, its schedule is reduced to the faults that are needed.

    python tests/support/simulate.py --seed 7 --layout examples/conf/downpour.conf
    python tests/support/simulate.py --seeds 1000
"""

import time
from collections.abc import Sequence
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
            wrong = _many(range(seed, seed + seeds), job, where) if seeds > 1 else _one(seed, job, where, only)
        raise typer.Exit(int(wrong))


def _job(where: str) -> Job | None:
    if not where:
        return None
    if where in LAYOUTS:
        return LAYOUTS[where]
    if not where.endswith((".conf", ".yaml", ".yml")):
        raise ConfigError("--layout", where, f"must be a job file, or one of {', '.join(LAYOUTS)}")
    return prepared(load_with_warnings(where, (), None, ())[0], where)


def _one(seed: int, job: Job | None, name: str, only: str) -> bool:
    """Run one seed, and print its verdict. Return whether it went wrong."""
    name = name or layout_of(seed)
    used = job or LAYOUTS[name]
    schedule = schedule_of(used, name, seed)
    kept = _numbers(only, len(schedule.faults))
    verdict = run_trial(used, name, seed, chosen(schedule, kept) if only else schedule)
    print(_words(verdict, kept))
    if verdict.wrong and not only:
        _print_shortest(verdict, used)
    return bool(verdict.wrong)


def _numbers(only: str, count: int) -> Sequence[int]:
    """Return the numbers of the chosen faults; of all without a choice. Raises ConfigError."""
    if not only:
        return range(count)
    # A run without any fault shows whether the error needs one.
    words = [] if only == "-" else only.split(",")
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise ConfigError("--only", only, f"must be numbers below {count}, separated by commas, or -")
    return sorted({int(word) for word in words})


def _print_shortest(verdict: TrialVerdict, job: Job) -> None:
    """Print the shortest schedule that goes wrong, too, and the command that repeats it."""
    shortest, kept = shrink(job, verdict)
    words = f'--seed {verdict.seed} --layout "{verdict.layout}" --only {",".join(map(str, kept)) or "-"}'
    print(f"\nthe same with less:\n{_words(shortest, kept)}\n\nto repeat it: python tests/support/simulate.py {words}")


def _many(seeds: range, job: Job | None, name: str) -> bool:
    """Run many seeds, and print a summary. Return whether one went wrong."""
    begun, wrong = time.monotonic(), list[TrialVerdict]()
    counts = dict.fromkeys(("kills", "crashes", "moves", "snapshots", "messages"), 0)
    for verdict in run_seeds(seeds, job, name):
        for what in counts:
            counts[what] += getattr(verdict, what)
        if verdict.wrong:
            wrong.append(verdict)
    took, counted = time.monotonic() - begun, ", ".join(f"{count} {what}" for what, count in counts.items())
    named = ", ".join([*(str(v.seed) for v in wrong[:_SHOWN]), *(["..."] if len(wrong) > _SHOWN else [])])
    text = (
        f"{len(seeds)} seeds in {took:.0f} s ({len(seeds) / took:.0f} per second): {counted}; {len(wrong)} went wrong"
    )
    print(f"{text}: {named}" if wrong else text)
    if wrong:  # only the first, as shortening a schedule runs it many times
        print(_words(wrong[0], range(len(wrong[0].schedule.faults))))
        _print_shortest(wrong[0], job or LAYOUTS[wrong[0].layout])
    return bool(wrong)


def _words(verdict: TrialVerdict, numbers: Sequence[int]) -> str:
    """Return a verdict as text; numbers: of its faults."""
    schedule = verdict.schedule
    read = f"{schedule.batches} batches in {schedule.epochs} epoch{'s' * (schedule.epochs > 1)}, {schedule.mode}"
    lines = [f"seed {verdict.seed}, layout {verdict.layout}: {read}; network {schedule.network}"]
    for number, fault, moment in zip(numbers, schedule.faults, verdict.moments, strict=True):
        came = "did not come to it" if moment is None else f"{moment:.4f} s"
        lines.append(f"  {number}: {fault} [{came}]")
    found = f"WRONG: {verdict.wrong}" if verdict.wrong else "ledger: every batch counted once"
    passed = f"{verdict.messages} messages, {verdict.snapshots} snapshots, {verdict.seconds:.3f} s of virtual time"
    return "\n".join([*lines, f"{found}; {passed}; run {verdict.digest:08x}"])


if __name__ == "__main__":
    typer.run(simulate)
