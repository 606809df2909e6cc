"""Arguments that several commands share, with their completion and checks."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from topotrain.comm.store.key_validation import StoreError
from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import make_folder, open_file, open_for_reading
from topotrain.config.python_module import find_module, module_of
from topotrain.launch import FORKSERVER_VARIABLE
from topotrain.tools import amounts
from topotrain.tools.monitor.terminal import complain, say

if TYPE_CHECKING:
    from topotrain.tools.exporters.job_exports import JobExports

JOB_ENDINGS = (".conf", ".yaml", ".yml")


def completion(is_offered: Callable[[str], bool]) -> Callable[[str], list[str]]:
    """Return the completion of an argument by folders, and by some files."""

    def complete(incomplete: str) -> list[str]:
        begun = ((path, os.path.isdir(path)) for path in glob(f"{escape(incomplete)}*"))
        found = sorted(path + "/" * is_folder for path, is_folder in begun if is_folder or is_offered(path))
        # The shell would end the word after a single folder.
        return complete(found[0]) if len(found) == 1 and found[0].endswith("/") else found

    return complete


def job_file(help: str) -> Any:
    complete = completion(lambda path: path.endswith(JOB_ENDINGS))
    return Argument(metavar="JOB.conf", help=help, show_default=False, autocompletion=complete)


Sets = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field of the job, such as cluster.sync_freq=4; may be given several times.",
    ),
]
Emulate = Annotated[
    str, Option("--emulate", metavar="LINK", help="Emulate a slow network between the units, such as 100mbit,20ms.")
]
Conf = Annotated[Path, job_file("Protobuf text format, or .yaml.")]
Program = Annotated[
    str | None,
    Argument(metavar="PROGRAM", help="The training script, or -m MODULE as for python; else the file's `program`."),
]
Args = Annotated[
    list[str] | None, Argument(metavar="ARGS", help="Passed to the script unchanged, also those that begin with --.")
]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, Option("--quiet", help="No progress, only what the program prints.")]
Forkserver = Annotated[
    str, Option("--forkserver", hidden=True, envvar=FORKSERVER_VARIABLE, help="A fork server that runs already.")
]
Logs = Annotated[
    list[str] | None,
    Option(
        "--log",
        metavar="KIND",
        help="Write the curves while the job runs: tensorboard[:DIR], jsonl[:FILE], or python:MODULE:CLASS for a "
        "tracker; may be given several times.",
    ),
]
Metrics = Annotated[
    str, Option("--metrics", metavar="PORT", help="Serve metrics for Prometheus on this machine, or at ADDRESS:PORT.")
]


class BadInput(Exception):
    """Input that cannot be used; the text says what is wrong and why."""


class CommandFailed(Exception):
    """The command has failed on good input; the text says why."""


def load_job(
    conf: Path,
    sets: list[str] | None,
    program: str | None,
    args: list[str] | None,
    needs_program: bool = True,
    elsewhere: bool = False,
) -> Job:
    """Read a job and check that its files can be read.

    elsewhere: the program is not on this machine.

    Raises ConfigError or BadInput.
    """
    from topotrain.config.job_file import load_with_warnings

    if module_of(str(conf)) is not None:
        raise BadInput(f"no job file before {conf}: the module and its arguments follow JOB.conf")
    job, warnings = load_with_warnings(str(conf), sets or (), program, args or ())
    for warning in warnings:
        say(f"warning: {warning}")
    # Before the other checks, which a notebook passes.
    check_kind(Path(job.program))
    if needs_program and not job.program:
        raise BadInput(f'no program: give one after {conf}, or `program: "train.py"` in it')
    if (needs_program or program) and not elsewhere:
        check_program(job.program)
    return job


def snapshot_job(workspace: Path, sets: Sequence[str] = ()) -> tuple[Job, str]:
    """Return the job and the folder of the newest snapshot, or of the named one.

    The job is that of the snapshot, in this workspace and with the overrides. Raises ConfigError.
    """
    from topotrain.config.job_file import loads
    from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, Manifest, latest
    from topotrain.launch.recovery.resume_point import WarningPrinter

    found: Manifest | None
    if (workspace / MANIFEST).is_file():
        found = Manifest.open(workspace.resolve())
        # The named snapshot or none: only `latest` may fall back to an older one.
        found.verify()
        # A snapshot lies in a folder of its own below the workspace.
        workspace = found.path.parent.parent
    else:
        found = latest(workspace, WarningPrinter())
    if found is None:
        accepted = f"has no snapshot in {FOLDER}/: one is written every snapshot_s seconds, from the first step on"
        raise ConfigError("--resume", str(workspace), accepted)
    job = loads(found.conf, f"snapshot {found.number}", sets)
    return replace(job, cluster=replace(job.cluster, workspace=str(workspace))), str(found.path)


def with_link(job: Job, emulate: str) -> Job:
    """Return the job with the link of `--emulate`, if given. Raises ConfigError."""
    return replace(job, cluster=replace(job.cluster, link=amounts.link("--emulate", emulate))) if emulate else job


def check_kind(path: Path) -> None:
    if path.suffix == ".ipynb":
        made = f"`jupyter nbconvert --to script {path}` makes one of it"
        raise BadInput(f"program {path}: is a notebook, must be a Python script; {made}")


def check_program(program: str) -> None:
    """Check that a script can be read, or that a module can be run."""
    module = module_of(program)
    if module is not None:
        find_module(module)
        return
    path = Path(program)
    check_kind(path)
    if path.is_dir():
        raise BadInput(f"program {path}: is a folder, must be a file")
    try:
        # Opened, because the mode of a file does not decide on every file system.
        os.close(open_for_reading(path))
    except OSError as error:
        raise BadInput(f"program {path}: cannot be read ({error.strerror})") from None


def check_writable(what: str, file: Path, private: bool = False) -> None:
    """Check before hours of training that `file` can be written; its content stays.

    A file that was not there is not there afterwards. private: it is for this user alone.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    was_there = os.path.lexists(file)
    with writing(what, file):
        if private:
            make_folder(file.parent)
            os.close(open_file(file, flags))
        else:
            # The user has named this file, so its mode is what the umask gives.
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))  # a pipe that nothing reads is refused
        if not was_there:
            file.unlink()


@contextmanager
def writing(what: str, file: Path | None) -> Iterator[None]:
    """Raise BadInput if the file of an option cannot be written.

    what: the option; "": it was checked before, so this is no bad input but CommandFailed.
    """
    try:
        yield
    except OSError as error:
        text = f"{file}: cannot be written ({error.strerror})"
        raise (BadInput(f"{what} {text}") if what else CommandFailed(text)) from None


@contextmanager
def exports_of(
    job: Job | None, logs: Sequence[str] | None, metrics: str, rank: int = 0
) -> "Iterator[JobExports | None]":
    """Yield the exports that a user asks for, in unit 0, or None. Raises ConfigError.

    job: None: this unit was started without one.
    """
    # A launcher starts all units with the same words, so all units check them.
    if not words_for_unit(logs, metrics) or rank:
        yield None
        return
    logs = logs or ()
    if job is None:
        option, value = ("--log", logs[0]) if logs else ("--metrics", metrics)
        raise ConfigError(option, value, "needs JOB.conf, which unit 0 was started without")
    for value in logs:
        kind, _, file = value.partition(":")
        if kind == "jsonl" and file:
            check_writable("--log", Path(file))
        elif kind == "tensorboard" and file:
            _check_folder(value, Path(file))
    from topotrain.tools.exporters.job_exports import JobExports

    with closing(JobExports(job, logs, metrics, os.environ)) as exports:
        if exports.url:
            print(f"metrics: {exports.url}", file=sys.stderr, flush=True)
        yield exports


def words_for_unit(logs: Sequence[str] | None, metrics: str) -> tuple[str, ...]:
    """Return the same options as words for `topotrain unit`. Raises ConfigError."""
    logs = logs or ()
    if not logs and not metrics:
        return ()
    from topotrain.tools.exporters.job_exports import check_values

    check_values(logs, metrics)
    return (*(word for value in logs for word in ("--log", value)), *(("--metrics", metrics) if metrics else ()))


def _check_folder(value: str, folder: Path) -> None:
    """Check that a folder can be made and written.

    Nothing is left behind. Raises ConfigError.
    """
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        accepted = "must be tensorboard[:DIR] with a folder DIR that can be made and written"
        raise ConfigError("--log", value, f"{accepted} ({error.strerror})") from None
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


@contextmanager
def refusing() -> Iterator[None]:
    """Turn an error into one block and its code, and an early signal into its code."""
    try:
        yield
    except (ConfigError, BadInput, StoreError, CommandFailed) as error:
        complain(str(error))
        raise Exit(1 if isinstance(error, CommandFailed) else 2) from None
    except KeyboardInterrupt:
        # Ctrl-C before the launcher has a handler of its own.
        raise Exit(130) from None
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # because Python flushes stdout once more when it ends
        raise Exit(1) from None
