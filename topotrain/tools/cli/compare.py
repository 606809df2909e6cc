"""The commands `compare`, of job files, and `check`, of a job and plain Python.

The jobs of `compare` run one after the other. All settings of all jobs are validated before the first one starts. Each
job has its own workspace below one folder. A failed job is marked in the table, and the others still run.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from topotrain.config.job import Job
from topotrain.config.private_files import make_folder, write_text
from topotrain.config.python_module import module_of
from topotrain.config.topology import Topology, layout
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import JOB_ENDINGS, BadInput, CommandFailed, check_kind, check_writable, load_job
from topotrain.tools.monitor.monitored_run import train
from topotrain.tools.monitor.terminal import complaining_of, console, progress_line

if TYPE_CHECKING:
    from topotrain.tools.check.compared_records import Comparison
    from topotrain.tools.monitor.job_report import JobResult

PICTURE = "frameworks.png"
DATA = "compare.json"
INTERRUPTED = frozenset({130, 143})
"""Exit codes after which the user wants no further job to start."""


def compare(
    files: Annotated[
        list[str],
        Argument(
            metavar="CONF... PROGRAM -- ARGS",
            help="Files that end with .conf, .yaml or .yml, one that ends with .py (or -m MODULE), and its arguments.",
            show_default=False,
            autocompletion=arguments.completion(lambda path: path.endswith((*JOB_ENDINGS, ".py"))),
        ),
    ],
    out: Annotated[Path, Option(metavar="DIR", help="The folder where everything is written.")] = Path(
        "workspace/compare"
    ),
    sets: arguments.Sets = None,
    emulate: arguments.Emulate = "",
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON on stdout, not as a table.")] = False,
    running: arguments.Forkserver = "",
) -> None:
    """Train one program under several job files, in turn.

    Ends with one table, and with the loss over time: as bars, and as one picture with a line per job. Without
    matplotlib there is no picture.

    Example:
      topotrain compare sandblaster.conf downpour.conf train.py -- --epochs 20
    """
    from topotrain.launch.agent import forkserver
    from topotrain.tools.monitor import loss_curves
    from topotrain.tools.monitor.result_tables import comparison, losses

    confs, program, args = _sort_out(files)
    # Where one file can be made, the others can be made, too.
    check_writable("--out", out / DATA, private=True)
    compared = entries(
        [(conf, arguments.with_link(load_job(Path(conf), sets, program, args), emulate)) for conf in confs], out
    )
    terminal = console(stderr=True)
    picture = loss_curves.available()
    # Before hours of training, and not when the picture is due.
    if not picture:
        terminal.print(f"table only: {loss_curves.MISSING}", soft_wrap=True, markup=False)

    def results() -> "Iterator[tuple[ComparedJob, JobResult]]":
        for entry in compared:
            terminal.print(f"{entry.label}: {entry.conf}", style="bold")
            yield entry, train(entry.job, entry.topology, as_json=as_json, forkserver=served_at)

    make_folder(out)
    with ExitStack() as stack:  # torch is loaded once for all of them
        own = None if running else stack.enter_context(closing(forkserver.start(out / "forkserver.log")))
        served_at = own.path if own else running
        code, rows = collect(results(), out, picture)
    if as_json:
        print(json.dumps({"jobs": rows}, indent=2))
    else:
        console().print(comparison(rows))
        drawn_losses = losses(rows)
        if drawn_losses is not None:
            console().print(drawn_losses)
    drawn = f"picture: {out / PICTURE}   " if picture else ""
    terminal.print(f"{drawn}data: {out / DATA}", soft_wrap=True)
    raise Exit(code)


def _sort_out(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return job files, program and its arguments. Raises BadInput."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or module_of(word)), len(words))
    confs = list(words[:at])
    for word in confs:
        check_kind(Path(word))
        if not word.endswith(JOB_ENDINGS):
            raise BadInput(f"{word}: a job file ends with {', '.join(JOB_ENDINGS)}, a program with .py")
    if not confs:
        raise BadInput("no job file before the program")
    if at == len(words):
        raise BadInput("no program: a file that ends with .py, or -m MODULE, must follow the job files")
    return confs, words[at], list(words[at + 1 :])


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """One of the jobs: its job file, and its label in table and picture."""

    conf: str
    label: str
    job: Job
    topology: Topology


def entries(jobs: Sequence[tuple[str, Job]], out: Path) -> list[ComparedJob]:
    """Return the jobs by (conf path, job), each with a workspace below `out`.

    The folder has the name of the conf. Raises ConfigError.
    """
    found: list[ComparedJob] = []
    names = _distinct([Path(conf).stem for conf, _ in jobs])
    layouts = [layout(job.cluster) for _, job in jobs]
    # Without the addition in brackets, such as (asynchronous): a label in the picture must be short.
    kinds = [topology.framework.split(" (")[0] for topology in layouts]
    for (conf, job), name, topology, kind in zip(jobs, names, layouts, kinds, strict=True):
        label = kind if kinds.count(kind) == 1 else f"{kind} ({name})"
        cluster = replace(job.cluster, workspace=str(out / name))
        found.append(ComparedJob(conf, label, replace(job, cluster=cluster), topology))
    return found


def collect(
    results: "Iterable[tuple[ComparedJob, JobResult]]", out: Path, picture: bool = True
) -> tuple[int, list[dict[str, Any]]]:
    """Collect the results of jobs in order.

    The data are written to `out`, and the picture if asked for.
    Returns the first exit code that is not 0, and the rows. Raises OSError if `out` is not a folder.
    The picture needs matplotlib.
    """
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for entry, result in results:
        rows.append(_row(entry, result))
        # After its row: the data of the jobs so far is still written.
        if result.outcome.code in INTERRUPTED:
            break
    # After hours of training the table must be shown, even where the disk is full.
    with complaining_of(out / DATA):
        write_text(out / DATA, json.dumps({"jobs": rows}, indent=2) + "\n")
    if picture:
        curves = {str(row["label"]): row["curve"] for row in rows if row["curve"]}
        with complaining_of(out / PICTURE):
            from topotrain.tools.monitor.loss_curves import draw

            draw(curves, out / PICTURE, "training loss over time")
    return next((int(row["code"]) for row in rows if row["code"]), 0), rows


def _row(entry: ComparedJob, result: "JobResult") -> dict[str, Any]:
    data = result.report.as_data(result.outcome)
    return {"label": entry.label, "conf": entry.conf, **data, "curve": result.report.curve()}


def _distinct(names: Sequence[str]) -> list[str]:
    """Return distinct names, by adding numbers to repeated ones."""
    taken: list[str] = []
    # Two files of one name in different folders must not share a workspace.
    for name in names:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        taken.append(free)
    return taken


def check(
    conf: arguments.Conf,
    program: arguments.Program = None,
    args: arguments.Args = None,
    sets: arguments.Sets = None,
    steps: Annotated[int, Option(metavar="N", min=1, help="Compare so many steps.")] = 30,
    whole: Annotated[
        bool, Option("--whole", help="Compare all steps, and what the script does after the last one.")
    ] = False,
    eval_mode: Annotated[
        bool,
        Option(
            "--eval-mode",
            help="Run dropout and batch normalization as in evaluation, to see whether the rest is equal.",
        ),
    ] = False,
    as_json: arguments.AsJson = False,
    quiet: arguments.Quiet = False,
    forkserver: arguments.Forkserver = "",
) -> None:
    """Compare a job with the plain script, step by step.

    The first steps run as plain Python and as the job. Gradients, values and metrics must be equal up to rounding.
    Of an asynchronous job one group is checked. Exit code 1: they differ, or one of them fails.

    Example:
      topotrain check examples/conf/sandblaster.conf examples/digits.py --epochs 5
    """
    job = load_job(conf, sets, program, args)
    from topotrain.tools.check import check_run

    check_run.skeleton(job)  # refused before anything starts
    try:
        with progress_line(quiet) as line:
            found = check_run.check(job, 0 if whole else steps, eval_mode, forkserver, line.stage)
    except check_run.RunFailed as failed:
        raise CommandFailed(str(failed)) from None
    print(json.dumps({"equal": not found.what, **asdict(found)}, indent=2) if as_json else sentence(found))
    raise Exit(1 if found.what else 0)


def sentence(found: "Comparison") -> str:
    if not found.what:
        return f"equal: {found.steps} steps, {found.parameters} parameters: largest difference {found.largest:.1e}"
    where = f"step {found.step}: " if found.step else ""
    lines = [f"different: {where}{found.what} differs by {found.size:.1e}", f"likely cause: {found.cause}"]
    return "\n  ".join([*lines, *(f"the job said: {text}" for text in found.notices)])
