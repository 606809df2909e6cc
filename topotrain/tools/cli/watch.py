"""The command `topotrain watch`: the state of a job, or its page, from the recording in its workspace."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from topotrain.tools.cli import jobs, page_commands
from topotrain.tools.cli.job_arguments import AsJson, BadInput, refusing
from topotrain.tools.job_recording import PACKAGE, is_installed

EXAMPLE = """\b
Example:
  topotrain watch workspace/digits
  topotrain watch workspace/digits workspace/letters --port 8080
  topotrain watch workspace/digits --once --json
  topotrain watch tcp://127.0.0.1:29400 --job night7
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

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
            int, typer.Option("--port", metavar="N", min=0, max=65535, help="Of the page; 0: any free one.")
        ] = 0,
        host: Annotated[
            str,
            typer.Option("--host", metavar="ADDRESS", help="Of the page, an address of this machine; then over TLS."),
        ] = page_commands.HOST,
        once: Annotated[bool, typer.Option("--once", help="Print the state of the job now, and end.")] = False,
        job: Annotated[str, typer.Option("--job", metavar="ID", help="With the URL of a store.")] = "",
        as_json: AsJson = False,
    ) -> None:
        """Show how a job is: on a page in the browser until Ctrl-C, or once on the terminal.

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
            raise typer.Exit(page_commands.serve(found, port, host))


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
