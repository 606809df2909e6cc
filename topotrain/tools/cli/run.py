"""The command `topotrain run`."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from topotrain.config.job import ConfigError, Job
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import BadInput, check_program, check_writable, load_job
from topotrain.tools.cli.watch import HOST, WatchHost, WatchPort, watched
from topotrain.tools.monitor.monitored_run import show, show_trace, train
from topotrain.tools.monitor.terminal import complain, progress_line, say

if TYPE_CHECKING:
    from topotrain.config.topology import Topology
    from topotrain.tools.replay.decision_file import JobRecord

LECTURE = (
    "--lecture was removed: --watch shows and replays a job on a page, and docs/teaching.md says how to teach with it"
)
WARM_STEP = 10
"""The step that `--profile` shows: by then buffers are allocated and caches are warm."""


def run(
    conf: Annotated[Path | None, arguments.job_file("Protobuf text format, or .yaml; with --resume optional.")] = None,
    program: arguments.Program = None,
    args: arguments.Args = None,
    sets: arguments.Sets = None,
    resume: Annotated[
        Path | None,
        Option(
            metavar="WORKSPACE",
            help="Continue from the newest snapshot there, or from the one whose folder is named; JOB.conf "
            "may be left out.",
        ),
    ] = None,
    report: Annotated[
        Path | None, Option(metavar="FILE", help="Write the report to this file, also when the job fails.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print the report on stdout; the program's output then goes to stderr.")
    ] = False,
    quiet: arguments.Quiet = False,
    watch_port: WatchPort = None,
    watch_host: WatchHost = HOST,
    logs: arguments.Logs = None,
    metrics: arguments.Metrics = "",
    profile: Annotated[
        bool,
        Option(
            "--profile",
            help="Write trace.json, a trace of one step over all processes: step 10, or the last one of a shorter job.",
        ),
    ] = False,
    profile_step: Annotated[int | None, Option(metavar="N", min=1, help="The same for step N, counted from 1.")] = None,
    record: Annotated[
        Path | None, Option(metavar="FILE", help="Keep the order of decisions in this file, for `topotrain replay`.")
    ] = None,
    emulate: arguments.Emulate = "",
    rendezvous: Annotated[
        str,
        Option(
            metavar="URL",
            help="A store where the processes meet and `topotrain jobs` shows the job, instead of the workspace.",
        ),
    ] = "",
    forkserver: arguments.Forkserver = "",
    lecture: Annotated[str | None, Option(hidden=True, help="It was removed.")] = None,
) -> None:
    """Train a job on this machine.

    Starts every process, shows progress, ends them all together, and writes the result.

    Example:
      topotrain run examples/conf/downpour.conf --set cluster.nworker_groups=3 train.py --epochs 20
      topotrain run examples/conf/downpour.conf -m package.train --epochs 20
    """
    with ExitStack() as stack:
        from topotrain.config.topology import layout
        from topotrain.tools.recording.job_recorder import JobRecorder

        if lecture is not None:  # for the users of an earlier version
            raise BadInput(LECTURE)
        job, snapshot = _job_and_snapshot(conf, sets, program, args, resume)
        job = arguments.with_link(job, emulate)
        job = replace(job, rendezvous=rendezvous) if rendezvous else job
        if report is not None:
            check_writable("--report", report)
        job = chosen(job, snapshot, quiet, forkserver)
        topology = layout(job.cluster)
        recording = None if record is None else _recording(job, topology, bool(snapshot), record)
        job = job if recording is None else recording.job
        exports = stack.enter_context(arguments.exports_of(job, logs, metrics))
        recorder = JobRecorder(exports)
        stack.enter_context(watched(watch_port, watch_host, job.workspace, recorder))
        step = profile_step or (WARM_STEP if profile else 0)
        result = train(
            job,
            topology,
            quiet=quiet,
            as_json=as_json,
            forkserver=forkserver,
            profile=step,
            resume=snapshot,
            recorder=recorder,
            folder=recording,
        )
        show(result, quiet, as_json, report)
        if step and result.outcome.code == 0:
            show_trace(job, quiet)
        code = result.outcome.code
        if recording is not None and record is not None:
            saved = _save_recording(recording, code == 0, record, quiet)
            code = code or (0 if saved else 1)
        raise Exit(code)


def chosen(job: Job, snapshot: str, quiet: bool = False, forkserver: str = "") -> Job:
    """Return the job with a layout; for `auto: true` the fastest one on this machine.

    A job that resumes keeps the layout of its snapshot. snapshot: its folder, or "". quiet: nothing is shown.
    forkserver: one that runs, or "".

    Raises ConfigError: the program cannot be measured, or no layout fits.
    """
    if not job.cluster.auto:
        return job
    if snapshot:
        return _as_before(job, snapshot)
    from topotrain.tools.advice.trial_runs import choose

    with progress_line(quiet) as line:
        found = choose(job, forkserver, line.show)
    for text in () if quiet else found.explain().splitlines():
        say(text)
    return found.job


def _as_before(job: Job, snapshot: str) -> Job:
    from topotrain.tools.advice.auto_rules import LAYOUT_FIELDS

    former = arguments.snapshot_job(Path(snapshot))[0].cluster
    kept = {name: getattr(former, name) for name in LAYOUT_FIELDS}
    return replace(job, cluster=replace(job.cluster, auto=False, **kept))


def _recording(job: Job, topology: "Topology", resumed: bool, file: Path) -> "JobRecord":
    """Return the recording of a job. Raises ConfigError, BadInput."""
    from topotrain.tools.replay.decision_file import JobRecord, check_recordable

    check_recordable(job, topology, resumed)
    check_writable("--record", file)
    made = JobRecord(job, topology)
    if made.drops_snapshots:
        say("warning: no snapshots are written with --record, where server groups exchange what they have learned")
    return made


def _save_recording(recording: "JobRecord", whole: bool, file: Path, quiet: bool) -> bool:
    """Write a recording; whether that was possible."""
    try:
        recording.collect(whole).save(file)
    except (ConfigError, OSError) as error:
        complain(f"{file}: cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error))
        return False
    if not quiet:
        print(f"recording: {file} ({file.stat().st_size} bytes)", file=sys.stderr)
    return True


def _job_and_snapshot(
    conf: Path | None, sets: list[str] | None, program: str | None, args: list[str] | None, resume: Path | None
) -> "tuple[Job, str]":
    """Return the requested job, and the folder of the snapshot to resume from, if any."""
    from topotrain.launch.recovery.resume_point import asked_for

    if resume is None:
        if conf is None:
            raise BadInput("no job file: give one, or --resume WORKSPACE to continue the job of a workspace")
        job = load_job(conf, sets, program, args)
        return job, asked_for(job, Path(job.workspace))
    # With a job file the overrides are of that file.
    job, snapshot = arguments.snapshot_job(resume, sets or () if conf is None else ())
    if conf is not None:
        return load_job(conf, sets, program, args), snapshot
    check_program(job.program)
    return job, snapshot
