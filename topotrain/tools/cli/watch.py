"""The command `watch`, and the page of `run --watch`, on a job's recording."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Exit, Option

from topotrain.tools.cli import jobs
from topotrain.tools.cli.job_arguments import AsJson, BadInput, check_writable, writing
from topotrain.tools.monitor.terminal import say

if TYPE_CHECKING:
    from topotrain.tools.recording.job_recorder import JobRecorder

HOST = "127.0.0.1"


def _port(value: str | int) -> int:
    """Return the number of a port. Raises BadParameter."""
    text = str(value)  # a default is a number already
    if text.isascii() and text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise BadParameter(f"{text!r} is no port: it must be a number from 0 to 65535, and 0 takes any free one")


WatchPort = Annotated[
    int | None,
    Option(
        "--watch",
        metavar="[PORT]",
        parser=_port,
        help="Serve a page that shows the job, at this port or at any free one, and print its address.",
    ),
]
WatchHost = Annotated[
    str,
    Option(
        "--watch-host",
        metavar="ADDRESS",
        help=f"With --watch: at this address of this machine, instead of {HOST}; then over TLS.",
    ),
]


def watch(
    workspaces: Annotated[
        list[str],
        Argument(
            metavar="WORKSPACE...",
            help="The folder of a job that runs, or has ended; several ones, or a folder that has them, side by side; "
            "or the URL of a store, with --job.",
        ),
    ],
    port: Annotated[
        int | None, Option(metavar="N", parser=_port, help="Of the page; without it, any free one.")
    ] = None,
    host: Annotated[
        str,
        Option(metavar="ADDRESS", help=f"Of the page: an address of this machine, instead of {HOST}; then over TLS."),
    ] = "",
    once: Annotated[bool, Option("--once", help="Print the state of the job, and end.")] = False,
    html: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the page into this file, with all its curves and events, and end."),
    ] = None,
    job: Annotated[
        str,
        Option(
            metavar="ID", help="With the URL of a store in the place of WORKSPACE: what the store knows of the job."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show a job on a page in the browser, in a file, or as text.

    It is read from the recording in the workspace, and the job is not disturbed. The page is served until Ctrl-C.

    Example:
      topotrain watch workspace/digits
      topotrain watch workspace/digits workspace/letters --port 8080
      topotrain watch workspace/compare
      topotrain watch workspace/digits --once --json
      topotrain watch workspace/digits --html digits.html
      topotrain watch tcp://127.0.0.1:29400 --job night7
    """
    workspace, *others = workspaces
    paged = {" ".join(others): bool(others), "--port": port is not None, "--host": bool(host)}
    if not jobs.is_folder(workspace, job):
        _refuse({**paged, "--html": html is not None}, f"{workspace or 'a store'} is a store, which has no page")
        where = "`topotrain watch WORKSPACE` on a machine that has it"
        say(f"a page is made from the workspace: {where}; the store knows this:")
        jobs.print_record(workspace, job, as_json)
    elif once:
        _refuse({**paged, "--html": html is not None}, "--once prints the state of one job")
        jobs.print_once(Path(workspace), as_json)
    else:
        _refuse({"--json": as_json}, "it needs --once, which prints the state of the job")
        if html is None:
            from topotrain.tools.dashboard.page_server import serve_until_stopped

            raise Exit(serve_until_stopped([Path(each).absolute() for each in workspaces], port or 0, host or HOST))
        del paged[" ".join(others)]
        _refuse(paged, "--html writes a file, and serves no page")
        from topotrain.tools.dashboard.page_files import page_of
        from topotrain.tools.dashboard.run_comparison import runs_of

        text = page_of(runs_of(map(Path, workspaces)))
        check_writable("--html", html)
        # The user has named this file, so its mode is what the umask gives.
        with writing("--html", html):
            html.write_text(text, encoding="utf-8")


def _refuse(given: Mapping[str, bool], why: str) -> None:
    """Raise BadInput for options that were given and would have no effect."""
    named = [name for name, is_given in given.items() if is_given]
    if named:
        raise BadInput(f"{', '.join(named)}: {why}")


@contextmanager
def watched(port: int | None, host: str, workspace: str, recorder: "JobRecorder") -> Iterator[None]:
    """Serve the page of a job that is about to run, for the length of the block.

    port: None: no page. recorder: of the job.

    Raises ConfigError or BadInput before anything has started.
    """
    if port is None:
        if host != HOST:
            raise BadInput("--watch-host: needs --watch")
        yield
        return
    from topotrain.tools.dashboard.page_server import announce, served_page
    from topotrain.tools.http_server import listen

    bound = listen(port, host, "--watch", "--watch-host")
    with served_page(bound, {Path(workspace).absolute(): recorder}, lone=True) as url:
        announce(bound, url)
        yield
