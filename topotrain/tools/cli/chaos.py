"""The command `topotrain chaos`: kill processes of a running job, and report."""

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from topotrain.config.job import ConfigError, OnFailure
from topotrain.tools.amounts import seconds
from topotrain.tools.cli.job_arguments import Args, Conf, Forkserver, Program, Quiet, Sets, load_job
from topotrain.tools.monitor.monitored_run import train

if TYPE_CHECKING:
    from topotrain.tools.fault_injector import FaultInjector
    from topotrain.tools.monitor.job_report import JobResult

_NO_CAP = 1_000_000
"""Restarts: in this command the fault plan, not a cap, ends the faults of a job."""


def chaos(
    conf: Conf,
    program: Program = None,
    args: Args = None,
    sets: Sets = None,
    kill_every: Annotated[str, Option(metavar="TIME", help="Mean time between two faults, such as 500ms.")] = "2s",
    lasting: Annotated[
        str, Option("--for", metavar="TIME", help="How long faults are injected, from the first step on.")
    ] = "60s",
    seed: Annotated[int, Option(metavar="N", help="The seed of the random choice of time, kind and victim.")] = 0,
    freeze: Annotated[
        float,
        Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="This share of the faults stops a process for 0.1 to 3 s instead of killing it. "
            "After 2 s the job ends it.",
        ),
    ] = 0.0,
    role: Annotated[str, Option("--whom", metavar="ROLE", help="worker or server, instead of both.")] = "",
    pairs: Annotated[
        float, Option(metavar="SHARE", min=0.0, max=1.0, help="This share of the kills hits two processes at once.")
    ] = 0.0,
    moments: Annotated[
        list[str] | None,
        Option(
            "--at",
            metavar="MOMENT",
            help="Also kill, with a chance of 1 in 4, what has just started (start), started again (again) or finished "
            "(end). With back, each fault follows the first step of the process that replaces the last victim, and "
            "not the clock.",
        ),
    ] = None,
    kills: Annotated[
        int, Option(metavar="N", min=0, help="Stop injecting after so many faults; 0: only --for ends them.")
    ] = 0,
    as_json: Annotated[bool, Option("--json", help="Print the summary as JSON on stdout.")] = False,
    quiet: Quiet = False,
    forkserver: Forkserver = "",
) -> None:
    """Train a job on this machine while its processes are killed.

    Ends with a verdict, and with the job's exit code: 0 if the job finished all the same.

    Example:
      topotrain chaos --kill-every 2s --for 20s --seed 7 examples/conf/downpour.conf examples/digits.py
    """
    from topotrain.config.topology import layout
    from topotrain.tools.fault_injector import MOMENTS, FaultInjector, FaultPlan

    if role not in ("", "worker", "server"):
        raise ConfigError("--whom", role, "must be worker or server")
    at = frozenset(moments or ())
    if not at <= set(MOMENTS):
        raise ConfigError("--at", ", ".join(at - set(MOMENTS)), f"must be one of {', '.join(MOMENTS)}")
    every_s, for_s = seconds("--kill-every", kill_every), seconds("--for", lasting)
    faults = FaultPlan(
        every_s=every_s, for_s=for_s, seed=seed, freeze=freeze, role=role, pairs=pairs, moments=at, kills=kills
    )
    # With any other reaction the first fault would end the job.
    job = replace(load_job(conf, sets, program, args), on_failure=OnFailure.kContinue, restarts=_NO_CAP)
    with FaultInjector(faults) as injector:
        result = train(job, layout(job.cluster), injector, quiet=quiet, as_json=as_json, forkserver=forkserver)
    found = verdict(result, injector)
    print(json.dumps(found, indent=2) if as_json else _summary(found), file=sys.stdout if as_json else sys.stderr)
    raise Exit(result.outcome.code)


def verdict(result: "JobResult", injector: "FaultInjector") -> dict[str, Any]:
    """Return the faults, the job's reaction to them, and its own counts."""
    report = result.report.as_data(result.outcome)
    # Training may not have waited, or never have gone on.
    waits = sorted(found["waited_s"] for found in report["incidents"] if found["waited_s"] is not None)
    return {
        "code": result.outcome.code,
        "seed": injector.seed,
        "killed": sum(not fault.frozen_s for fault in injector.injected),
        "frozen": sum(bool(fault.frozen_s) for fault in injector.injected),
        "faults": [asdict(fault) for fault in injector.injected],
        "incidents": report["incidents"],
        # From the first recovery to the last.
        "grown": [[last - first for first, last in zip(held[0], held[-1])] for held in injector.held.values()],
        "recovery_s": {"p50": _quantile(waits, 0.5), "p99": _quantile(waits, 0.99), "max": _quantile(waits, 1.0)},
    }


def _quantile(values: list[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def _summary(found: dict[str, Any]) -> str:
    waits = found["recovery_s"]
    took = "" if waits["p50"] is None else f"; back after {waits['p50']:.2f} s (median), {waits['max']:.2f} s at most"
    frozen = f", {found['frozen']} times frozen" if found["frozen"] else ""
    end = "the job came to its end" if found["code"] == 0 else f"THE JOB FAILED with code {found['code']}"
    return f"topotrain: {found['killed']} processes killed{frozen} (seed {found['seed']}): {end}{took}"
