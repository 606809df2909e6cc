"""The page of a job: `topotrain run --watch`, `topotrain watch` and `topotrain report --html`.

Only this module of the command line knows the package of the page, which may be deleted.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from topotrain.config.job import ConfigError
from topotrain.tools.cli.job_arguments import BadInput, check_writable, refusing

REPORT_EXAMPLE = """\b
Example:
  topotrain report workspace/digits --html digits.html
"""
HOST = "127.0.0.1"
_MISSING = "this installation has no page (package topotrain.tools.dashboard)"

WatchPort = Annotated[
    int | None,
    typer.Option(
        "--watch",
        metavar="[PORT]",
        min=0,
        max=65535,
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
    """Add the command `topotrain report`."""

    @app.command("report", epilog=REPORT_EXAMPLE)
    def report(
        workspace: Annotated[Path, typer.Argument(metavar="WORKSPACE", help="The folder of a job, also of one that runs.")],
        second: Annotated[
            Path | None, typer.Argument(metavar="WORKSPACE2", help="Of another job, which is laid over it.")
        ] = None,
        html: Annotated[
            Path | None, typer.Option("--html", metavar="FILE", help="The file to write; it needs no network.")
        ] = None,
    ) -> None:
        """Write the page of a job as one file that can be mailed, with all its curves and events."""
        with refusing():
            if html is None:
                raise BadInput("no file: give --html FILE")
            write_page(html, [workspace, *([] if second is None else [second])])


@contextmanager
def watched(port: int | None, host: str, workspace: str) -> Iterator[None]:
    """Serve the page of a job that is about to run, for the length of the block. None: no page.

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
    """Serve the page of jobs that run or have ended until Ctrl-C; return the exit code.

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
        from topotrain.tools.dashboard.mailed_page import mailed_page, view_of
        from topotrain.tools.dashboard.page_server import check_recorded
    except ImportError:
        raise BadInput(f"report --html: {_MISSING}") from None
    from topotrain.tools.recording.recorded_lines import RecordingError

    check_recorded(workspaces)
    check_writable("--html", file)
    try:
        text = mailed_page(*(view_of(workspace) for workspace in workspaces))
    except (RecordingError, OSError) as error:
        raise ConfigError("WORKSPACE", os.fspath(workspaces[0]), f"its recording cannot be read: {error}") from None
    # The user has named this file, so its mode is what the umask gives.
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--html {file}: cannot be written ({error.strerror})") from None
