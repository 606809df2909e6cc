"""The commands `watch` and `report`, and the page of `run --watch`.

All show what the recording in a job's workspace says. Only this module of the command line knows the package of the
page, which may be deleted.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from topotrain.tools.cli import jobs
from topotrain.tools.cli.job_arguments import AsJson, BadInput, check_writable, refusing
from topotrain.tools.job_recording import PACKAGE, is_installed

EXAMPLE = """\b
Example:
  topotrain watch workspace/digits
  topotrain watch workspace/digits workspace/letters --port 8080
  topotrain watch workspace/digits --once --json
  topotrain watch tcp://127.0.0.1:29400 --job night7
"""
REPORT_EXAMPLE = """\b
Example:
  topotrain report workspace/digits --html digits.html
"""
HOST = "127.0.0.1"
_MISSING = "this installation has no page (package topotrain.tools.dashboard)"


def _port(value: str | int) -> int:
    """Return the number of a port. Raises BadParameter."""
    text = str(value)  # a default is a number already
    if text.isascii() and text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise typer.BadParameter(f"{text!r} is no port: it must be a number from 0 to 65535, and 0 takes any free one")


WatchPort = Annotated[
    int | None,
    typer.Option(
        "--watch",
        metavar="[PORT]",
        parser=_port,
        help="Serve a page that shows the job, at this port or at any free one, and print its address.",
    ),
]
WatchHost = Annotated[
    str,
    typer.Option(
        "--watch-host", metavar="ADDRESS", help=f"With --watch: of this machine, instead of {HOST}; then over TLS."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command("watch", epilog=EXAMPLE)
    def watch(
        workspace: Annotated[
            str,
            typer.Argument(
                metavar="WORKSPACE",
                help="The folder of a job that runs, or has ended; or the URL of a store, with --job.",
            ),
        ],
        second: Annotated[
            Path | None, typer.Argument(metavar="WORKSPACE2", help="Of another job, which is laid over it.")
        ] = None,
        port: Annotated[
            int, typer.Option("--port", metavar="N", parser=_port, help="Of the page; 0: any free one.")
        ] = 0,
        host: Annotated[
            str,
            typer.Option("--host", metavar="ADDRESS", help="Of the page, an address of this machine; then over TLS."),
        ] = HOST,
        once: Annotated[bool, typer.Option("--once", help="Print the state of the job now, and end.")] = False,
        job: Annotated[str, typer.Option("--job", metavar="ID", help="With the URL of a store.")] = "",
        as_json: AsJson = False,
    ) -> None:
        """Show a job on a page in the browser until Ctrl-C, or once on the terminal.

        It is read from the recording in the workspace, and the job is not disturbed.
        """
        with refusing():
            if "://" in workspace or job:
                _print_record(workspace, job, as_json)
                return
            if not is_installed():
                raise BadInput(f"{PACKAGE} is not installed here, so there are no recordings")
            if as_json and not once:
                raise BadInput("--json: needs --once, which prints the state of the job")
            if once and second is not None:
                raise BadInput(f"{second}: --once is about one job")
            if once:
                print_once(Path(workspace), as_json)
                return
            found = [Path(workspace), *([] if second is None else [second])]
            raise typer.Exit(serve(found, port, host))

    @app.command("report", epilog=REPORT_EXAMPLE)
    def report(
        workspace: Annotated[
            Path, typer.Argument(metavar="WORKSPACE", help="The folder of a job, also of one that runs.")
        ],
        second: Annotated[
            Path | None, typer.Argument(metavar="WORKSPACE2", help="Of another job, which is laid over it.")
        ] = None,
        html: Annotated[
            Path | None, typer.Option("--html", metavar="FILE", help="The file to write; it needs no network.")
        ] = None,
    ) -> None:
        """Write the page of a job as one file that can be mailed, with curves and events."""
        with refusing():
            if html is None:
                raise BadInput("no file: give --html FILE")
            write_page(html, [workspace, *([] if second is None else [second])])


def print_once(workspace: Path, as_json: bool) -> None:
    """Print the present state of a job. Raises ConfigError."""
    from topotrain.tools.recording.recorded_workspace import RecordedWorkspace
    from topotrain.tools.summary_text import summary_text

    with closing(RecordedWorkspace(workspace)) as recorded:
        found = recorded.summary()
    print(json.dumps(found, indent=2) if as_json else summary_text(found))


def _print_record(url: str, job: str, as_json: bool) -> None:
    """Print what a store knows of a job. Raises BadInput."""
    from topotrain.comm.store import StoreError
    from topotrain.comm.store.store_url import parse

    if "://" not in url:
        raise BadInput(f"--job {job}: needs the URL of a store, and {url} is none")
    try:
        named = job or parse(url).job
    except StoreError as error:
        raise BadInput(str(error)) from None
    if not named:
        raise BadInput("give the job, too: --job ID, as `topotrain jobs list` shows it")
    text = "a page is made from the workspace: `topotrain watch WORKSPACE` on a machine that has it"
    print(f"topotrain: {text}; the store knows this:", file=sys.stderr)
    jobs.print_record(named, url, as_json)


@contextmanager
def watched(port: int | None, host: str, workspace: str) -> Iterator[None]:
    """Serve the page of a job that is about to run, for the length of the block.

    None: no page.

    Raises ConfigError or BadInput before anything has started.
    """
    if port is None:
        if host != HOST:
            raise BadInput("--watch-host: needs --watch")
        yield
        return
    try:
        from topotrain.tools.dashboard.page_server import PageOptions, announce, bind_page, served_page
    except ImportError:
        raise BadInput(f"--watch: {_MISSING}") from None
    bound = bind_page(PageOptions(port, host, "--watch", "--watch-host"))
    with served_page(bound, [Path(workspace).absolute()]) as url:
        announce(bound, url)
        yield


def serve(workspaces: Sequence[Path], port: int, host: str) -> int:
    """Serve the page of running or ended jobs until Ctrl-C; return the exit code.

    Raises ConfigError or BadInput.
    """
    try:
        from topotrain.tools.dashboard.page_server import PageOptions, serve_until_stopped
    except ImportError:
        raise BadInput(f"watch: {_MISSING}") from None
    return serve_until_stopped([workspace.absolute() for workspace in workspaces], PageOptions(port, host))


def write_page(file: Path, workspaces: Sequence[Path]) -> None:
    """Write the page of recorded jobs into one file. Raises ConfigError or BadInput."""
    try:
        from topotrain.tools.dashboard.mailed_page import page_of
    except ImportError:
        raise BadInput(f"report --html: {_MISSING}") from None
    text = page_of(workspaces)
    check_writable("--html", file)
    # The user has named this file, so its mode is what the umask gives.
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--html {file}: cannot be written ({error.strerror})") from None
