"""A local run of a job with its displays and its report."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from topotrain.config.job import Job
from topotrain.tools.monitor.terminal import complain, complaining_of, console

if TYPE_CHECKING:
    from topotrain.config.topology import Topology
    from topotrain.launch import EventListener
    from topotrain.launch.agent.workspace import RunFolder
    from topotrain.launch.console_output import ConsoleOutput
    from topotrain.tools.monitor.job_report import JobResult, Report
    from topotrain.tools.monitor.progress_display import QuietProgress
    from topotrain.tools.recording.job_recorder import JobRecorder


def train(
    job: Job,
    topology: "Topology",
    listener: "EventListener | None" = None,  # also receives every event
    *,
    quiet: bool = False,  # no progress is shown
    as_json: bool = False,  # stdout is for JSON and not for the program
    forkserver: str = "",  # the socket of a running forkserver; "": the job starts its own
    profile: int = 0,  # the step to profile; 0: none
    resume: str | None = None,  # the folder of a snapshot; "": none; None: as the job says
    recorder: "JobRecorder | None" = None,  # of this job; None: of its own
    folder: "RunFolder | None" = None,  # fills the run directory of each start
) -> "JobResult":
    from topotrain.launch.shared_forkserver import for_one_job

    with ExitStack() as stack:
        # It loads torch, while this process loads its own modules.
        shared = None if forkserver else stack.enter_context(for_one_job())
        from topotrain.launch.agent.workspace import RunFolder
        from topotrain.launch.grace_period import hint
        from topotrain.launch.local import LocalLauncher
        from topotrain.launch.recovery.resume_point import asked_for
        from topotrain.tools.monitor.job_monitor import JobMonitor
        from topotrain.tools.monitor.job_report import JobResult, Report, story
        from topotrain.tools.recording.job_recorder import JobRecorder

        topology = with_loopback(topology)
        resume = asked_for(job, Path(job.workspace)) if resume is None else resume
        report = Report(job, topology)
        recorder = stack.enter_context(recorder or JobRecorder())
        window, outlet = stack.enter_context(display(report, quiet, as_json))
        recorder.begin(job, topology)
        recorder.lead(bool(resume), ())
        monitor = JobMonitor(window, recorder, listener)
        launcher = LocalLauncher(
            forkserver=forkserver,
            shared=shared,
            profile=profile,
            resume=resume,
            outlet=outlet,
            watch=recorder,
            folder=folder or RunFolder(),
        )
        outcome = launcher.start(job, topology, monitor)
        monitor.end(outcome.code)
    if outcome.cause is not None:
        # After the display has ended, so that the error is the last thing on the terminal.
        complain(story(outcome.cause, job, report.topology))
    # 128 + the number of the signal, as a shell reports it.
    elif outcome.code >= 128:
        more = hint(monitor.saved, job.workspace)
        complain(f"ended by {signal.Signals(outcome.code - 128).name}, no process is left" + f"\n{more}" * bool(more))
    elif outcome.code:
        complain(f"the job ended with code {outcome.code}; its logs are in {job.workspace}/logs")
    return JobResult(outcome, report)


def with_loopback(topology: "Topology") -> "Topology":
    """Return the topology of a job on one host, sliced for the speed of its sockets."""
    from topotrain.comm.link_speed import loopback_mbit
    from topotrain.config.job import TransportChoice

    slow = topology.fits_slices and topology.cluster.transport is TransportChoice.kTcp
    return replace(topology, link_mbit=loopback_mbit()) if slow else topology


@contextmanager
def display(
    report: "Report", quiet: bool, as_json: bool, hidden: bool = False
) -> "Iterator[tuple[QuietProgress, ConsoleOutput]]":
    """Display the report of a job while it runs. The display takes its events.

    quiet, as_json: as for `train`. hidden: no progress is shown, in a process that is not the main one.
    """
    from topotrain.launch.console_output import out_of, outlet
    from topotrain.tools.monitor.progress_display import progress

    terminal = console(stderr=True)
    # On a terminal the program's lines must go through the live table; elsewhere stdout stays stdout.
    chatty = not as_json and not (terminal.is_terminal and sys.stdout.isatty() and not quiet)
    with (
        outlet(terminal, f"{report.job.workspace}/logs") as made,
        progress(report, terminal, quiet or hidden, out_of(made, chatty)) as shown,
    ):
        yield shown, made


def show(result: "JobResult", quiet: bool, as_json: bool, report: Path | None) -> None:
    """Show the results of a job: as data where the user asks for it, and as a line."""
    from topotrain.tools.monitor.result_tables import summary

    data = result.report.as_data(result.outcome)
    text = json.dumps(data, indent=2)
    if report is not None:
        # The user has named this file, so its mode is what the umask gives.
        with complaining_of(report):
            report.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
    if result.outcome.code == 0 and not quiet:
        terminal = console(stderr=True)
        terminal.print(summary(data), soft_wrap=True)
        for text in data["notices"]:
            # Long ago, or above the last line of progress.
            terminal.print(f"topotrain: {text}", soft_wrap=True, markup=False, highlight=False)


def show_trace(job: Job, quiet: bool) -> None:
    """Write the trace of the profiled step, and show its time by phase."""
    from topotrain.launch.agent.workspace import SPANS
    from topotrain.tools.monitor import trace_export
    from topotrain.tools.monitor.result_tables import phases

    workspace = Path(job.workspace)
    processes = trace_export.collect(workspace / "run" / SPANS)
    if not processes:
        complain("no step was finished, so there is no trace")
        return
    try:
        trace_export.write(processes, workspace / trace_export.FILE)
    except OSError as error:
        complain(f"{workspace / trace_export.FILE}: cannot be written ({error.strerror})")
        return
    if not quiet:
        terminal = console(stderr=True)
        terminal.print(phases(trace_export.shares(processes)))
        terminal.print(f"trace: {workspace / trace_export.FILE}   open it at https://ui.perfetto.dev", soft_wrap=True)
