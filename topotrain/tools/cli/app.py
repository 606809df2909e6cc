"""The command `topotrain`: run a job, plan it, compare several.

* Bad input is found before anything starts. It ends with one block on stderr and exit code 2.
* Exit codes: 0 done, 1 the program raised or a process died, 2 bad input, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
* `--help` and `plan` answer at once. So modules that are slow to import (torch above all) are imported where they are
  used.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import make_folder
from topotrain.config.python_module import as_program, find_module, module_of
from topotrain.tools.cli import (
    chaos,
    check_command,
    jobs,
    pserver,
    removed_commands,
    setup_commands,
    store,
    unit,
    watch,
)
from topotrain.tools.cli.completion import JOB_ENDINGS as CONFS
from topotrain.tools.cli.completion import job_files, job_files_and_scripts
from topotrain.tools.cli.export_arguments import Logs, Metrics, announce, exports_of, words_for_unit
from topotrain.tools.cli.job_arguments import (
    Args,
    AsJson,
    BadInput,
    Conf,
    Emulate,
    Forkserver,
    Program,
    Quiet,
    Sets,
    check_kind,
    check_program,
    check_writable,
    load_job,
    refusing,
    with_link,
)
from topotrain.tools.cli.performance import advise_command, predict_command, probe_command
from topotrain.tools.cli.performance.automatic_job import chosen
from topotrain.tools.cli.watch import HOST, WatchHost, WatchPort, watched
from topotrain.tools.monitor.monitored_run import RunOptions, complain, show, show_trace, train

if TYPE_CHECKING:
    from rich.console import Console

    from topotrain.config.topology import Topology
    from topotrain.tools.monitor.graph_report import CutPlan
    from topotrain.tools.monitor.job_report import JobResult
    from topotrain.tools.plan.layout_plan import PlannedSchema
    from topotrain.tools.replay.job_record import JobRecord

REPLAY = "topotrain.tools.replay"
TRAINS = frozenset({"run", "unit", "launch", "check", "compare", "pserver", "replay"})
"""Commands that train: what they print is not their outcome."""
LECTURE = (
    "--lecture was removed: --watch shows and replays a job on a page, and docs/teaching.md says how to teach with it"
)
WARM_STEP = 10
"""The step that `--profile` shows: by then buffers are allocated and caches are warm."""

app = typer.Typer(
    name="topotrain",
    help="Distributed PyTorch training in which one cluster block chooses the framework.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RUN_EXAMPLE = """\b
Example:
  topotrain run examples/conf/downpour.conf --set cluster.nworker_groups=3 train.py --epochs 20
  topotrain run examples/conf/downpour.conf -m package.train --epochs 20
"""
PLAN_EXAMPLE = """\b
Example:
  topotrain plan examples/conf/hogwild.conf --json
"""
LAUNCH_EXAMPLE = """\b
Example:
  topotrain launch slurm --nodes 2 --pass=--partition=cpu --dry-run examples/conf/downpour.conf train.py
"""
COMPARE_EXAMPLE = """\b
Example:
  topotrain compare sandblaster.conf downpour.conf train.py -- --epochs 20
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the console script; raises SystemExit with the code of the command."""
    words = _with_watch_port(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] and words[0] in TRAINS:
        from topotrain.launch.console_output import lossy_streams

        lossy_streams()
    # On the words as they came: `separate` hides those after the program from the parser.
    _warn_of_misplaced_options(words)
    app(args=separate(words), prog_name="topotrain")
    raise SystemExit(0)


def _warn_of_misplaced_options(words: Sequence[str]) -> None:
    """Warn of words after the script that look like options of the command."""
    found = _program_in(words)
    # After a "--" all words are meant for the script.
    if found is None or found.args[:1] == ["--"] or not any(word.startswith("--") for word in found.args):
        return
    program = found.program
    command = _commands().get(words[0])
    if command is not None:
        ours = {name for option in _options(command) for name in option.opts}
        names = _unknown_to(
            _file_of(program), [name for word in found.args if (name := word.partition("=")[0]) in ours]
        )
        if names:
            goes, them = ("go", "them") if len(names) > 1 else ("goes", "it")
            known = f"no Python file in its folder mentions {them}"
            place = f"options of `topotrain {words[0]}` must be given before {program}"
            text = f"{', '.join(names)} after {program} {goes} to the script, and {known}: {place}"
            print(f"topotrain: warning: {text}", file=sys.stderr)


def _file_of(program: str) -> Path:
    module = module_of(program)
    try:
        return Path(program if module is None else find_module(module))
    # The command itself refuses this module.
    except ConfigError:
        return Path(program)


def _unknown_to(program: Path, names: Sequence[str]) -> list[str]:
    """Return the options that no Python file beside the program mentions."""
    # A script may have an option of the same name, so nothing is refused. A program elsewhere cannot be read.
    if not names or not program.is_file():
        return []
    # The option may be read in a module beside the script.
    sources = [path.read_text("utf-8", errors="ignore") for path in {program, *program.parent.glob("*.py")}]
    return [
        name
        for name in dict.fromkeys(names)
        if not any(re.search(rf"{re.escape(name)}(?![\w-])", text) for text in sources)
    ]


def separate(argv: Sequence[str]) -> list[str]:
    """Mark the end of the command's options with "--" after PROGRAM.

    So the words after it reach the script unchanged.
    """
    words = _with_watch_port(argv)
    found = _program_in(words)
    if found is None:
        return words
    rest = found.args[1:] if found.args[:1] == ["--"] else found.args
    # The parser would take "-m …" for an option.
    marked = [found.program, "--"] if module_of(found.program) is None else ["--", found.program]
    return [*words[: found.at], *marked, *rest]


def _with_watch_port(argv: Sequence[str]) -> list[str]:
    """Return the words with a port for `--watch`, which may stand without one."""
    words = list(argv)
    for at, word in enumerate(words if words[:1] == ["run"] else ()):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word == "--":
            break
        if word == "--watch" and not following.isdecimal():
            made = [*words[:at], "--watch=0", *words[at + 1 :]]
            found = _program_in(made)
            # Behind the program it is an option of the script.
            return words if found is not None and found.at < at else made
    return words


@dataclass(frozen=True, slots=True)
class ProgramWords:
    """The program among the words of a command.

    at: the index of its first word.
    program: as in a job: a script, or "-m MODULE".
    args: the words after it.
    """

    at: int
    program: str
    args: list[str]


def _program_in(words: Sequence[str]) -> ProgramWords | None:
    """Return PROGRAM or -m MODULE, or None without one, or after a "--"."""
    positionals = 0
    skip = False
    valued = _valued_options()
    for at, word in enumerate(words):
        if skip:
            skip = False
        elif word == "--":
            # The user has separated the words already.
            return None
        elif word.startswith("-m") and positionals and _takes_program(words[0]):
            # As with python, the name may follow without a space.
            end = at + 1 if word != "-m" else at + 2
            name = word.removeprefix("-m") or "".join(words[at + 1 : end])
            return ProgramWords(at, as_program(name), list(words[end:]))
        elif word.startswith("-"):
            # The next word is then the value of this option.
            skip = word in valued
        else:
            positionals += 1
            if positionals > 1 and _is_program(words[0], word, positionals):
                return ProgramWords(at, word, list(words[at + 1 :]))
    return None


@cache
def _commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@cache
def _valued_options() -> frozenset[str]:
    """Return the options of all commands that are followed by a value."""
    found = [option for command in _commands().values() for option in _options(command)]
    return frozenset(name for option in found if not option.is_flag for name in option.opts)


def _options(command: Any) -> Iterator[Any]:
    """Yield the options of a command, and of the commands below it."""
    yield from (parameter for parameter in command.params if parameter.param_type_name == "option")
    for below in getattr(command, "commands", {}).values():
        yield from _options(below)


def _is_program(command: str, word: str, positionals: int) -> bool:
    # `compare` takes any number of job files before it.
    if command == "compare":
        return word.endswith(".py")
    # The command, JOB.conf, PROGRAM; `launch` has the name of a launcher before.
    return _takes_program(command) and positionals == (4 if command == "launch" else 3)


def _takes_program(command: str) -> bool:
    # After the program of `chaos`, `probe` or `advise` its own options go on, so the script's need a "--" there. The
    # others have no program.
    return command not in ("jobs", "store", "chaos", "predict", "probe", "advise", "watch", "report")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"topotrain {version('topotrain')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Take options before the command; typer reads the text at `app` for the help."""


@app.command("run", epilog=RUN_EXAMPLE)
def run(
    conf: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB.conf",
            help="Protobuf text format, or .yaml; with --resume optional.",
            autocompletion=job_files,
        ),
    ] = None,
    program: Program = None,
    args: Args = None,
    sets: Sets = None,
    emulate: Emulate = "",
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", metavar="URL", help="A store where the job is listed, not its workspace.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the result as JSON to this file.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="WORKSPACE", help="Continue from the newest snapshot there, or from the named one."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of one step over all processes: trace.json.")
    ] = False,
    profile_step: Annotated[
        int | None,
        typer.Option("--profile-step", metavar="N", min=1, help="The step that --profile shows, instead of 10."),
    ] = None,
    watch_port: WatchPort = None,
    watch_host: WatchHost = HOST,
    logs: Logs = None,
    metrics: Metrics = "",
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="Keep the order of decisions there, for `topotrain replay`."),
    ] = None,
    forkserver: Forkserver = "",
    lecture: Annotated[str | None, typer.Option("--lecture", hidden=True, help="It was removed.")] = None,
) -> None:
    """Train a job on this machine.

    Starts every process, shows progress, ends them all together, and writes the result.
    """
    with refusing(), ExitStack() as stack:
        from topotrain.config.topology import layout
        from topotrain.tools.monitor.result_tables import console

        if lecture is not None:  # for the users of an earlier version
            raise BadInput(LECTURE)
        job, snapshot = _job_and_snapshot(conf, sets, program, args, resume)
        job = with_link(job, emulate)
        job = replace(job, rendezvous=rendezvous) if rendezvous else job
        if report is not None:
            check_writable("--report", report)
        job = chosen(job, snapshot, quiet, forkserver)
        topology = layout(job.cluster)
        recording = None if record is None else _recording(job, topology, bool(snapshot), record)
        job = job if recording is None else recording.job
        stack.enter_context(watched(watch_port, watch_host, job.workspace))
        exports = stack.enter_context(exports_of(job, logs or (), metrics))
        from topotrain.launch.shared_forkserver import for_one_job

        # The input is good. From here on torch is loaded, while this process loads its own modules.
        shared = None if forkserver else stack.enter_context(for_one_job())
        terminal = console(stderr=True)
        step = profile_step or (WARM_STEP if profile else 0)
        announce(exports)
        options = RunOptions(quiet, as_json, forkserver, step, snapshot, shared, exports, recording)
        result = train(job, topology, terminal, options)
        show(result, terminal, quiet, as_json, report)
        if step and result.outcome.code == 0:
            show_trace(job, terminal, quiet)
        code = result.outcome.code
        if recording is not None and record is not None:
            saved = _save_recording(recording, code == 0, record, terminal if not quiet else None)
            code = code or (0 if saved else 1)
        raise typer.Exit(code)


def _recording(job: Job, topology: "Topology", resumed: bool, file: Path) -> "JobRecord":
    """Return the recording of a job. Raises ConfigError, BadInput."""
    if find_spec(REPLAY) is None:
        raise BadInput(f"--record needs {REPLAY}, which is not in this installation")
    from topotrain.tools.replay.job_record import JobRecord, check_recordable

    check_recordable(job, topology, resumed)
    check_writable("--record", file)
    made = JobRecord(job, topology)
    if made.drops_snapshots:
        text = "no snapshots are written with --record, where server groups exchange what they have learned"
        print(f"topotrain: warning: {text}", file=sys.stderr)
    return made


def _save_recording(recording: "JobRecord", whole: bool, file: Path, terminal: "Console | None") -> bool:
    """Write a recording; whether that was possible."""
    try:
        recording.collect(whole).save(file)
    except ConfigError as error:
        complain(str(error))
        return False
    except OSError as error:
        complain(f"{file}: cannot be written ({error.strerror})")
        return False
    if terminal is not None:
        terminal.print(f"recording: {file} ({file.stat().st_size} bytes)", soft_wrap=True, markup=False)
    return True


@app.command("plan", epilog=PLAN_EXAMPLE)
def plan(
    conf: Conf,
    program: Program = None,
    args: Args = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SIZES", help="Of a forward's argument, without a loader: 32x64:int64."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the cut graph of a split model (.png, .pdf, .svg)."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="placement kAuto: time the modules here, and show partition blocks.")
    ] = False,
) -> None:
    """Show which unit runs which worker and server; nothing is started.

    With PROGRAM also slices and memory, for which the script runs up to `tt.prepare`. Where one model is split over the
    workers of a group, the cut graph is shown, too.
    """
    with refusing():
        from topotrain.tools.plan.layout_plan import plan as rehearse

        job = load_job(conf, sets, program, args, needs_program=False)
        # Without the model first: a cluster block that cannot work is found before the script runs.
        found = rehearse(job)
        if program is None:
            if plot or measure or inputs:
                raise BadInput("--input, --plot and --measure are about a model: give a PROGRAM")
            print(json.dumps(found.as_data(), indent=2) if as_json else found.explain())
            return
        # Before the script runs, which may take minutes.
        _drawable(plot)
        schema, cut = _seen(job, inputs or (), measure)
        found = rehearse(job, schema)
        if cut is not None:
            found = replace(found, memory=())  # the cut has its own estimate, with owners and activations
        if cut is None and (plot or measure or inputs):
            raise BadInput("--input, --plot and --measure are about a split model: this job splits none")
        if as_json:
            more = {} if cut is None else {"cut": cut.as_data()}
            print(json.dumps(found.as_data() | more, indent=2))
        else:
            print("\n\n".join([found.explain(), *([] if cut is None else [cut.explain()])]))
        if cut is not None and plot is not None:
            from topotrain.tools.monitor import graph_plot

            try:
                graph_plot.draw(cut.bill, plot, job.name)
            except OSError as error:
                complain(f"{plot}: cannot be written ({error.strerror})")
                raise typer.Exit(1) from None


@app.command("launch", epilog=LAUNCH_EXAMPLE)
def launch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a launcher; a wrong one lists the known ones.")],
    conf: Conf,
    program: Program = None,
    args: Args = None,
    sets: Sets = None,
    emulate: Emulate = "",
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", metavar="URL", help="Where the units meet, instead of the workspace.")
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="On how many machines; 0: the launcher decides.")] = 0,
    hosts: Annotated[str, typer.Option("--hosts", metavar="A,B", help="Names of the machines.")] = "",
    passed: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="WORD", help="For the launcher's own tool, unchanged; may be given repeatedly."),
    ] = None,
    job_id: Annotated[str, typer.Option("--id", help="The job's name where units meet, instead of a new one.")] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow a queued job to its end, and end with its code.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="ray, kubernetes: all may restart N times.")
    ] = 0,
    image: Annotated[str, typer.Option("--image", help="kubernetes: of the container, with the script in it.")] = "",
    namespace: Annotated[str, typer.Option("--namespace", help="kubernetes: instead of `default`.")] = "",
    form: Annotated[str, typer.Option("--format", metavar="KIND", help="kubernetes: trainjob or jobset.")] = "",
    output: Annotated[str, typer.Option("--output", metavar="FILE", help="kubernetes: instead of stdout.")] = "",
    with_secret: Annotated[bool, typer.Option("--with-secret", help="kubernetes: include the job's secret.")] = False,
    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="slurm, submitit: before the time limit save, queue the job again, and go on."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    logs: Logs = None,
    metrics: Metrics = "",
    as_json: AsJson = False,
) -> None:
    """Train a job under another tool that starts processes.

    A batch job is queued, and its number printed; all others run in front.
    """
    with refusing():
        from topotrain.comm.store import StoreError
        from topotrain.config.topology import layout
        from topotrain.launch import launchers
        from topotrain.launch.launchers.submission import LaunchOptions
        from topotrain.tools.cli.resume import asked_for

        launchers.check_name(name)
        job = with_link(load_job(conf, sets, program, args, elsewhere=name == launchers.KUBERNETES), emulate)
        if name == launchers.LOCAL and not dry_run:
            job = chosen(job, asked_for(job))
        topology = layout(job.cluster)
        names = tuple(host for host in hosts.split(",") if host)
        usual = (rendezvous, nodes, names, tuple(passed or ()), wait, job_id, as_json)
        special = (max_restarts, image, namespace, form, output, with_secret, requeue)
        options = LaunchOptions(*usual, *special, words_for_unit(logs or (), metrics))
        try:
            if name == launchers.LOCAL and not dry_run:
                # Options of other launchers must not be ignored in silence.
                launchers.check_special(name, options)
                launchers.check_local(options)
                with exports_of(job, logs or (), metrics) as exports:
                    announce(exports)
                    raise typer.Exit(_launch_here(job, topology, RunOptions(as_json=as_json, exports=exports)))
            started = launchers.launch(name, job, topology, options, os.environ, dry_run)
        except StoreError as error:
            raise BadInput(str(error)) from None
        print(json.dumps(started.as_data(), indent=2) if as_json else started.text, end="\n" if as_json else "")
        raise typer.Exit(started.code)


def _launch_here(job: Job, topology: "Topology", options: RunOptions) -> int:
    from topotrain.tools.cli.resume import asked_for
    from topotrain.tools.monitor.result_tables import console

    terminal = console(stderr=True)
    result = train(job, topology, terminal, replace(options, resume=asked_for(job)))
    show(result, terminal, False, options.as_json, None)
    return result.outcome.code


@app.command("compare", epilog=COMPARE_EXAMPLE)
def compare(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONF... PROGRAM -- ARGS",
            help="Files that end with .conf, .yaml or .yml, one that ends with .py (or -m MODULE), and its arguments.",
            show_default=False,
            autocompletion=job_files_and_scripts,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all results.")] = Path(
        "workspace/compare"
    ),
    sets: Sets = None,
    emulate: Emulate = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout, not as a table.")
    ] = False,
    running: Forkserver = "",
) -> None:
    """Train one program under several job files, in turn.

    Ends with one table, and with the loss over time: as bars, and as one picture with a line per job. Without
    matplotlib there is no picture.
    """
    with refusing():
        from topotrain.launch.agent import forkserver
        from topotrain.tools.cli.resume import asked_for
        from topotrain.tools.monitor import compare_jobs as side_by_side
        from topotrain.tools.monitor import loss_plot
        from topotrain.tools.monitor.result_tables import comparison, console, losses

        confs, program, args = _sort_out(files)
        # Where one file can be made, the others can be made, too.
        check_writable("--out", out / side_by_side.DATA, private=True)
        compared = side_by_side.entries(
            [(conf, with_link(load_job(Path(conf), sets, program, args), emulate)) for conf in confs], out
        )
        terminal = console(stderr=True)
        picture = loss_plot.available()
        # Before hours of training, and not when the picture is due.
        if not picture:
            terminal.print(f"table only: {loss_plot.MISSING}", soft_wrap=True, markup=False)

        def results() -> "Iterator[tuple[side_by_side.ComparedJob, JobResult]]":
            for entry in compared:
                terminal.print(f"{entry.label}: {entry.conf}", style="bold")
                options = RunOptions(False, as_json, served_at, resume=asked_for(entry.job))
                yield entry, train(entry.job, entry.topology, terminal, options)

        make_folder(out)
        with ExitStack() as stack:  # torch is loaded once for all of them
            own = None if running else stack.enter_context(closing(forkserver.start(out / "forkserver.log")))
            served_at = own.path if own else running
            code, rows = side_by_side.compare(results(), out, picture)
        if as_json:
            print(json.dumps({"jobs": rows}, indent=2))
        else:
            console().print(comparison(rows))
            drawn_losses = losses(rows)
            if drawn_losses is not None:
                console().print(drawn_losses)
        drawn = f"picture: {out / side_by_side.PICTURE}   " if picture else ""
        terminal.print(f"{drawn}data: {out / side_by_side.DATA}", soft_wrap=True)
        raise typer.Exit(code)


def _job_and_snapshot(
    conf: Path | None,
    sets: list[str] | None,
    program: str | None,
    args: list[str] | None,
    resume: Path | None,
) -> "tuple[Job, str]":
    """Return the requested job, and the folder of the snapshot to resume from, if any."""
    from topotrain.tools.cli.resume import asked_for, earlier

    if resume is None:
        if conf is None:
            raise BadInput("no job file: give one, or --resume WORKSPACE to continue the job of a workspace")
        job = load_job(conf, sets, program, args)
        return job, asked_for(job)
    # With a job file the overrides are of that file.
    found = earlier(resume, sets or () if conf is None else ())
    if conf is not None:
        return load_job(conf, sets, program, args), found.path
    check_program(found.job.program)
    return found.job, found.path


def _seen(job: Job, inputs: Sequence[str], measure: bool) -> "tuple[PlannedSchema, CutPlan | None]":
    """Run the script up to `tt.prepare`; return its model's schema and cut."""
    from topotrain.parallel.api.dry_run import look
    from topotrain.tools.plan.layout_plan import PlannedSchema

    try:
        seen = look(job.program, job.args)
    except ConfigError:
        raise
    # The script's own error, with its traceback: this is no bad input, so the code is 1.
    except Exception:
        complain(f"{job.program} failed before `tt.prepare`\n{traceback.format_exc()}")
        raise typer.Exit(1) from None
    momentum, names = seen.momentum(job.updater), seen.optimizer_names(job.updater)
    if job.cluster.nworkers_per_group > 1:
        from topotrain.tools.plan.model_cut import cut_of

        cut = cut_of(job, seen.model, seen.loader, inputs, measure, seen.state_factor())
        if cut is not None:
            return PlannedSchema(cut.parameters, seen.state_factor(), momentum, names), cut.plan
    return PlannedSchema(seen.parameters(), seen.state_factor(), momentum, names, seen.trained()), None


def _drawable(file: Path | None) -> None:
    """Check before the script runs that a picture can be drawn."""
    from topotrain.tools.monitor import loss_plot

    if file is not None:
        if file.suffix not in loss_plot.ENDINGS:
            raise BadInput(f"--plot {file}: must end with {', '.join(loss_plot.ENDINGS)}")
        if not loss_plot.available():
            raise BadInput(loss_plot.MISSING)
        check_writable("--plot", file)


def _sort_out(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return job files, program and its arguments. Raises BadInput."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or module_of(word)), len(words))
    confs = list(words[:at])
    for word in confs:
        check_kind(Path(word))
        if not word.endswith(CONFS):
            raise BadInput(f"{word}: a job file ends with {', '.join(CONFS)}, a program with .py")
    if not confs:
        raise BadInput("no job file before the program")
    if at == len(words):
        raise BadInput("no program: a file that ends with .py, or -m MODULE, must follow the job files")
    return confs, words[at], list(words[at + 1 :])


pserver.register(app)
app.add_typer(jobs.jobs, name="jobs")
store.register(app)
unit.register(app)
chaos.register(app)
check_command.register(app)
advise_command.register(app)
removed_commands.register(app)
setup_commands.register(app)
watch.register(app)
probe_command.register(app)
predict_command.register(app)
if find_spec(REPLAY) is not None:  # a tool is deleted with its folder
    from topotrain.tools.replay import replay_command

    replay_command.register(app)
