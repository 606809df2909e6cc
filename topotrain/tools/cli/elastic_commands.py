"""The commands `leave`, `join`, `snapshot` and `stop`, for a running job.

Worker groups leave or join an asynchronous job, workers a job of one group.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topotrain.comm.store.store_url import RENDEZVOUS_VARIABLE
from topotrain.config.job import ConfigError
from topotrain.tools.cli.chaos import seconds
from topotrain.tools.cli.job_arguments import AsJson, BadInput, refusing
from topotrain.tools.monitor.monitored_run import complain

if TYPE_CHECKING:
    from topotrain.launch.job_requests import JobRequest

LEAVE_EXAMPLE = """\b
Example:
  topotrain leave workspace/digits --group 2
  topotrain leave workspace/digits --workers 1
  topotrain leave --rendezvous redis://store/0 --job night7 --group 2
"""
JOIN_EXAMPLE = """\b
Example:
  topotrain join workspace/digits --group 2
  topotrain join workspace/digits --workers 1
  topotrain join --rendezvous redis://store/0 --job night7 --group 2
"""

SNAPSHOT_EXAMPLE = """\b
Example:
  topotrain snapshot workspace/digits
"""
STOP_EXAMPLE = """\b
Example:
  topotrain stop workspace/digits
"""

NOTICE_S = 5.0
"""Seconds after which the command says that it waits."""

Workspace = Annotated[
    Path | None,
    typer.Argument(
        metavar="WORKSPACE",
        help="The folder of a job of which a part runs on this machine, or that `topotrain launch` has started.",
    ),
]
Rendezvous = Annotated[
    str,
    typer.Option("--rendezvous", metavar="URL", help="With --job, from any machine: the store in which its units met."),
]
JobName = Annotated[str, typer.Option("--job", metavar="ID", help="As `topotrain jobs list` shows it.")]
Group = Annotated[
    int | None, typer.Option("--group", metavar="N", help="Asynchronous jobs: number of the worker group, from 0.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Jobs of one worker group: how many workers; usually 1.")
]
Within = Annotated[
    str,
    typer.Option(
        "--within", metavar="TIME", help="How long a group's step, or the snapshot of a job of one group, may take."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command("leave", epilog=LEAVE_EXAMPLE)
    def leave(
        workspace: Workspace = None,
        group: Group = None,
        workers: Workers = None,
        within: Within = "10s",
        rendezvous: Rendezvous = "",
        job: JobName = "",
        as_json: AsJson = False,
    ) -> None:
        """Let a worker group leave a running job, or a worker a job of one group.

        A group: the others train on and get the data that it has not read; returns when its processes have ended. A
        worker: the job takes a snapshot and continues from it with one worker less. The command returns when it trains
        again.
        """
        with refusing(), _notice():
            _print(_answer(workspace, rendezvous, job, _meant("leave", group, workers, within)), as_json)

    @app.command("join", epilog=JOIN_EXAMPLE)
    def join(
        workspace: Workspace = None,
        group: Group = None,
        workers: Workers = None,
        within: Within = "10s",
        rendezvous: Rendezvous = "",
        job: JobName = "",
        as_json: AsJson = False,
    ) -> None:
        """Let a worker group join a running job (again), or a worker a job of one group.

        A group: returns when it starts. A worker: the job takes a snapshot and continues from it with one worker more.
        The command returns when it trains again.
        """
        with refusing(), _notice():
            _print(_answer(workspace, rendezvous, job, _meant("join", group, workers, within)), as_json)

    @app.command("snapshot", epilog=SNAPSHOT_EXAMPLE)
    def snapshot(
        workspace: Workspace = None,
        within: Annotated[
            str, typer.Option("--within", metavar="TIME", help="How long the snapshot may take.")
        ] = "10s",
        rendezvous: Rendezvous = "",
        job: JobName = "",
        as_json: AsJson = False,
    ) -> None:
        """Let a running job take a snapshot after its next step, and go on.

        Returns when the snapshot is on disk.
        """
        from topotrain.launch.recovery.recovery_actions import TakeSnapshot

        with refusing(), _notice():
            _print(_answer(workspace, rendezvous, job, TakeSnapshot(seconds("--within", within))), as_json)

    @app.command("stop", epilog=STOP_EXAMPLE)
    def stop(
        workspace: Workspace = None,
        rendezvous: Rendezvous = "",
        job: JobName = "",
        as_json: AsJson = False,
    ) -> None:
        """Let a running job end, with a last snapshot if it takes snapshots.

        It ends as after SIGTERM. Returns when the job has been asked, which is before its end.
        """
        from topotrain.launch.recovery.recovery_actions import StopJob

        with refusing(), _notice():
            _print(_answer(workspace, rendezvous, job, StopJob()), as_json)


@contextmanager
def _notice() -> Iterator[None]:
    """Print a notice when the answer of the job takes long."""
    text = "topotrain: the job has not answered yet (Ctrl-C ends this command, and not the change)"
    timer = threading.Timer(NOTICE_S, print, (text,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _answer(workspace: Path | None, rendezvous: str, job: str, wish: "JobRequest") -> dict[str, Any]:
    """Send a request, and return the answer. Raises ConfigError or BadInput."""
    if (workspace is None) is not bool(rendezvous or job):
        raise BadInput("give either the WORKSPACE of the job, or --rendezvous URL and --job ID")
    from topotrain.launch.store_requests import ask_anywhere, ask_over_store

    if workspace is not None:
        with _store_errors():
            return ask_anywhere(workspace, wish, os.environ)
    url = rendezvous or os.environ.get(RENDEZVOUS_VARIABLE, "")
    if not url:
        raise BadInput(f"no store: give --rendezvous URL or set {RENDEZVOUS_VARIABLE}")
    from topotrain.comm.store import StoreError
    from topotrain.comm.store.store_url import parse

    try:
        named = parse(url).job
    except StoreError as error:
        raise BadInput(str(error)) from None
    if rendezvous and job and named and named != job:
        raise ConfigError("--job", job, f"is not the job of the rendezvous, which is {named!r}")
    if not job and not named:
        raise BadInput(
            "give the job, too: --job ID, as `topotrain jobs list` shows it, or ?job=ID at the end of the URL"
        )
    with _store_errors():
        return ask_over_store(url, job or named, wish, os.environ)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn the errors of a job's store into their exit codes."""
    from topotrain.comm.store import StoreError
    from topotrain.comm.store.discovery.job_registry import UnknownJob

    try:
        yield
    except UnknownJob as error:
        raise BadInput(str(error)) from None
    # After the request was sent: it is not known whether the job has changed.
    except StoreError as error:
        complain(str(error))
        raise typer.Exit(1) from None


def _print(answer: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(answer, indent=2) if as_json else f"topotrain: {answer['text']}")


def _meant(verb: str, group: int | None, workers: int | None, within: str) -> "JobRequest":
    """Return a request for the named group, or else for workers. Raises ConfigError."""
    from topotrain.launch.recovery.recovery_actions import GroupRequest, ResizeRequest

    within_s = seconds("--within", within)
    if group is None:
        return ResizeRequest(verb, 1 if workers is None else workers, within_s)
    if workers is not None:
        raise ConfigError("--workers", workers, "must not be given with --group, which means a whole worker group")
    return GroupRequest(verb, group, within_s)
