"""The command `topotrain watch`: the state of a job, from the recording in its workspace."""

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from topotrain.tools.cli.job_arguments import AsJson, BadInput, refusing
from topotrain.tools.job_recording import PACKAGE, is_installed

EXAMPLE = """\b
Example:
  topotrain watch workspace/digits --once
  topotrain watch workspace/digits --once --json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("watch", epilog=EXAMPLE)
    def watch(
        workspace: Annotated[
            Path, typer.Argument(metavar="WORKSPACE", help="The folder of a job that runs, or has ended.")
        ],
        once: Annotated[bool, typer.Option("--once", help="Print the state of the job now, and end.")] = False,
        as_json: AsJson = False,
    ) -> None:
        """Show how a job is: step, loss, samples/s, staleness, incidents.

        It is read from the recording in the workspace, and the job is not disturbed.
        """
        with refusing():
            if not is_installed():
                raise BadInput(f"{PACKAGE} is not installed here, so there are no recordings")
            if not once:
                raise BadInput("give --once: the state of the job is printed once")
            print_once(workspace, as_json)


def print_once(workspace: Path, as_json: bool) -> None:
    """Print the present state of a job. Raises ConfigError."""
    from topotrain.tools.recording.recorded_workspace import RecordedWorkspace
    from topotrain.tools.summary_text import summary_text

    with closing(RecordedWorkspace(workspace)) as recorded:
        found = recorded.summary()
    print(json.dumps(found, indent=2) if as_json else summary_text(found))
