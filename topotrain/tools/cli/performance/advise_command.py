"""The command `topotrain advise`: which layout is the fastest, and why."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from topotrain.config.job import Job
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import BadInput, check_program, check_writable, load_job, writing
from topotrain.tools.cli.performance.predict_command import Cores, LinkOption, Memory, Mtbf
from topotrain.tools.monitor.terminal import progress_line, say

if TYPE_CHECKING:
    from topotrain.tools.advice.advice import Advice
    from topotrain.tools.advice.trial_runs import Trial
    from topotrain.tools.prediction.machines import Machines
    from topotrain.tools.probe.probe_file import Probe

TRY_S = 5.0
"""Seconds of steps that a trial measures."""
RUNNING = (
    "--running was removed: `topotrain predict` says how fast a block would be, and `topotrain compare` runs several; "
    "`topotrain jobs leave` and `join` change a job that runs"
)


def advise(
    program: Annotated[
        str | None, Argument(metavar="PROGRAM", help="The training script, which is measured first.")
    ] = None,
    args: arguments.Args = None,
    probe: Annotated[
        Path | None, Option(metavar="FILE", help="What `topotrain probe` has written; then nothing is measured.")
    ] = None,
    hosts: Annotated[str, Option(metavar="N", help="How many hosts, each of them one unit; 1 without it.")] = "",
    link: LinkOption = "",
    cores: Cores = "",
    memory: Memory = "",
    mtbf: Mtbf = "",
    straggler: Annotated[
        str,
        Option(
            metavar="NxTIMES",
            help="Host N, from 0, computes so many times as long, such as 1x4; with one host: worker N.",
        ),
    ] = "",
    job: Annotated[
        Path | None,
        Option(metavar="JOB.conf", help="A job whose other fields are kept, and whose layout is a candidate."),
    ] = None,
    sync: Annotated[bool, Option("--sync", help="Only layouts that compute the same as one process.")] = False,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the advised layout as a job file, with the reason as a comment."),
    ] = None,
    tried: Annotated[
        int,
        Option(
            "--try",
            metavar="N",
            min=0,
            help="Run the advised layout and the next N - 1 here for 5 seconds of steps each, and print "
            "predicted beside measured.",
        ),
    ] = 0,
    within: Annotated[
        str, Option(metavar="TIME", help="After this time no further layout is rehearsed; the others have bounds only.")
    ] = "60s",
    as_json: Annotated[bool, Option("--json", help="Print the advice as JSON on stdout.")] = False,
    forkserver: arguments.Forkserver = "",
    running: Annotated[str | None, Option(hidden=True, help="It was removed.")] = None,
) -> None:
    """Say which layout trains a program fastest on some hosts, and why.

    The program is measured in one process, unless there is a probe. About a dozen blocks are then rehearsed in virtual
    time, with the servers of a real job.

    Example:
      topotrain advise --hosts 8 --link 1gbit,1ms --memory 16GB --out best.conf train.py
      topotrain advise --probe probe.json --hosts 8 --link 1gbit,1ms --sync
    """
    if running is not None:  # for the users of an earlier version
        raise BadInput(RUNNING)
    from topotrain.tools.advice.advice import advise as advised
    from topotrain.tools.advice.advice_text import explain, job_text
    from topotrain.tools.amounts import seconds
    from topotrain.tools.prediction.machines import parse_machines

    machines = parse_machines(hosts, link, straggler, memory, mtbf, cores)
    within_s = seconds("--within", within)
    given = _job(job, program, args)
    _check_options(given, probe, machines, out, tried)
    measured = _probe(given, probe, tried, forkserver)
    # Without a job file there is no block to compare with.
    base = given if job is not None else replace(given, cluster=replace(given.cluster, auto=True))
    with progress_line() as line:
        found = advised(measured, machines, base, sync, within_s, show=line.show)
    if not as_json:
        print(explain(found))
    if out is not None:
        with writing("--out", out):
            out.write_text(job_text(found), encoding="utf-8")
        if not as_json:
            print(f"written: {out}")
    trials = list(trials_of(found, measured, tried, as_json, forkserver))
    if as_json:
        more = {"tried": [asdict(each) for each in trials]} if tried else {}
        print(json.dumps(found.as_data() | more, indent=2))


def _job(conf: Path | None, program: str | None, args: list[str] | None) -> Job:
    """Return the job for which a layout is sought."""
    if conf is not None:
        return load_job(conf, None, program, args, needs_program=False)
    if program is not None:
        check_program(program)
    return Job(program=program or "", args=tuple(args or ()))


def _check_options(job: Job, probe: Path | None, machines: "Machines", out: Path | None, tried: int) -> None:
    """Raise BadInput for options that do not fit together."""
    if probe is None and not job.program:
        raise BadInput("no program: give PROGRAM, -m MODULE, or --probe FILE, which `topotrain probe` has written")
    if machines.link is not None and machines.hosts < 2:
        raise BadInput("--link: needs --hosts of at least 2, because a link is between hosts")
    if tried and not job.program:
        raise BadInput("--try: needs a PROGRAM to run")
    if out is not None:
        if out.suffix != ".conf":
            raise BadInput(f"--out {out}: must end in .conf")
        check_writable("--out", out)


def _probe(job: Job, file: Path | None, tried: int, forkserver: str) -> "Probe":
    """Return the probe of a file, checked if the program runs, or measure it."""
    from topotrain.tools.cli.performance.probe_command import check_model_of, probe_of, unlike_this_machine

    if file is None:
        return probe_of(job.program, job.args, forkserver=forkserver)
    from topotrain.tools.probe.probe_file import load_probe

    found = load_probe(file)
    if tried:
        check_model_of(found, job.program, job.args, forkserver)
        # A prediction of other machines needs no check. One of this machine is as good as the probe is like it.
        differs = unlike_this_machine(found)
        if differs:
            say(f"warning: {file} was not made here, so its figures may not hold: {differs}")
    elif job.program:
        say(f"all figures are those of {file}, made with {found.program}: {job.program} is not run")
    return found


def trials_of(advice: "Advice", probe: "Probe", tried: int, as_json: bool, forkserver: str = "") -> "Iterator[Trial]":
    """Run the best layouts here, and print each when it is measured."""
    from topotrain.tools.advice.trial_runs import tried as trial_runs

    if not tried:
        return
    where = "this machine" if advice.machines.hosts <= 1 else "this machine, with all hosts on it"
    print(f"trying on {where}, {TRY_S:g} s each:", file=sys.stderr if as_json else sys.stdout, flush=True)
    for trial in trial_runs(advice.preferred[:tried], probe, TRY_S, forkserver):
        if not as_json:
            print(f"  {trial.explain()}", flush=True)
        yield trial
