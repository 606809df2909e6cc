"""The command `topotrain unit`: run one unit of a job on this machine.

A user or any launcher starts it. Unit 0 shows the job. The unit that leads the job at its end makes the report; that is
unit 0, unless it was lost. The others print on stderr that they have started, and how the job ended.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from topotrain.config.job import Job
from topotrain.config.topology import validate
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import CommandFailed, check_writable, job_file, load_job
from topotrain.tools.monitor.monitored_run import display, show
from topotrain.tools.monitor.terminal import complain, say

if TYPE_CHECKING:
    from topotrain.config.topology import Topology
    from topotrain.launch.console_output import ConsoleOutput
    from topotrain.launch.multinode.node import NodeResult
    from topotrain.tools.monitor.job_monitor import JobMonitor


def unit(
    conf: Annotated[Path | None, job_file("For unit 0 at least, unless the job was submitted.")] = None,
    program: arguments.Program = None,
    args: arguments.Args = None,
    sets: arguments.Sets = None,
    rendezvous: Annotated[
        str,
        Option(
            metavar="URL",
            help="The store in which all units meet; without it, TOPOTRAIN_RENDEZVOUS, or MASTER_ADDR and MASTER_PORT.",
        ),
    ] = "",
    rank: Annotated[
        int | None, Option(metavar="R", help="The number of this unit, from 0; without it, a launcher's variable.")
    ] = None,
    nprocs: Annotated[
        int | None, Option(metavar="N", help="The number of units; without it, a launcher's variable.")
    ] = None,
    host: Annotated[
        str,
        Option(
            metavar="ADDR",
            help="The address at which other machines reach this one; without it, the local one of "
            "the connection to the store.",
        ),
    ] = "",
    report: Annotated[
        Path | None, Option(metavar="FILE", help="The unit that leads at the end writes the report to this file.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="The unit that leads at the end prints the report on stdout.")
    ] = False,
    quiet: arguments.Quiet = False,
    logs: arguments.Logs = None,
    metrics: arguments.Metrics = "",
    forkserver: arguments.Forkserver = "",
) -> None:
    """Run one unit of a job on this machine.

    Start it once per unit, by hand or by a launcher, in any order and on any hosts. The units find each other,
    train, and end together.

    Example:
      topotrain unit job.conf --rendezvous tcp://10.0.0.1:29400 --rank 0 --nprocs 2 train.py
    """
    with ExitStack() as stack:
        from topotrain.comm.security.secret import load_secret
        from topotrain.comm.store import StoreError
        from topotrain.comm.store.store_url import parse
        from topotrain.launch.launchers.env_tables import RENDEZVOUS, start_of
        from topotrain.launch.shared_forkserver import join

        job = None if conf is None else load_job(conf, sets, program, args)
        if job is not None:
            # Before the others wait for this unit.
            validate(job.cluster)
        # The environment comes before the job file: a launcher sets it for this start.
        named = "" if job is None or os.environ.get(RENDEZVOUS) else job.rendezvous
        start = start_of(os.environ, rank, nprocs, rendezvous or named, host)
        # Both only find mistakes here, before any process starts.
        parse(start.rendezvous)
        load_secret(os.environ)
        if report is not None and start.rank == 0:
            # The others write it only if unit 0 is lost. Their machines may not have its folder.
            check_writable("--report", report)
        exports = stack.enter_context(arguments.exports_of(job, logs, metrics, start.rank))
        # It loads torch while this process loads its own modules, and meets the other units.
        shared = None if forkserver else join(start.scope(os.environ))
        from topotrain.launch.multinode.node import Node
        from topotrain.tools.monitor.job_monitor import JobMonitor, rendezvous_notice
        from topotrain.tools.monitor.job_report import Report
        from topotrain.tools.recording.job_recorder import JobRecorder

        recorder = stack.enter_context(JobRecorder(exports))
        monitor: JobMonitor | None = None

        @contextmanager
        def watching(job: Job, topology: "Topology") -> "Iterator[tuple[JobMonitor, ConsoleOutput]]":
            """See `node.Watching`."""
            nonlocal monitor
            recorder.begin(job, topology)
            if start.rank:
                here = topology.units[start.rank]
                where = ", ".join(map(str, (*here.workers, *here.servers)))
                say(f"unit {start.rank} of {len(topology.units)}: {where}")
            with display(Report(job, topology), quiet, as_json, start.rank > 0) as (shown, outlet):
                monitor = JobMonitor(shown, recorder)
                yield monitor, outlet

        notice = rendezvous_notice(start.rank, start.nprocs)
        node = Node(start, job, watching, forkserver=forkserver, notice=notice, shared=shared, watch=recorder)
        try:
            ended = node.run()
        except StoreError as error:
            raise CommandFailed(str(error)) from None
        if monitor is not None:
            monitor.end(ended.outcome.code)
        _print_end(ended, monitor, report, as_json, quiet)
        raise Exit(ended.outcome.code)


def _print_end(
    ended: "NodeResult", monitor: "JobMonitor | None", report: Path | None, as_json: bool, quiet: bool
) -> None:
    """Print how the job ended; the leader also writes it as data."""
    outcome = ended.outcome
    if outcome.code:
        complain(_story(ended))
    elif ended.end.text:
        say(ended.end.text)
    if ended.rank and not outcome.code:
        say(f"unit {ended.rank} has ended well")
    if ended.leads and monitor is not None and ended.job is not None:
        from topotrain.tools.monitor.job_report import JobResult

        if ended.rank and report is None:
            # The options of unit 0, which is lost, are not known here.
            report = Path(ended.job.workspace) / "report.json"
            say(f"unit {ended.rank} has led the job, and writes {report}")
        show(JobResult(outcome, monitor.report), quiet, as_json, report)


def _story(ended: "NodeResult") -> str:
    """Return the first cause and its place.

    It is complete for the leader and the unit of the cause, and one line for the others.
    """
    end = ended.end
    if end.failed is None:
        return end.text or f"the job ended with code {end.code}"
    where = f"unit {end.unit} on {end.host}" if end.host else f"unit {end.unit}"
    if ended.job is None or ended.topology is None or not (ended.leads or ended.rank == end.unit):
        return f"{where}: {end.failed.who}: {end.failed.text}"
    from topotrain.tools.monitor.job_report import story

    return f"{where}: {story(end.failed, ended.job, ended.topology)}"
