"""The commands `topotrain leave` and `topotrain join`: a worker group leaves a job that runs, or comes to it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from topotrain.front.commands_chaos import seconds
from topotrain.front.commands_unit import Desk

LEAVE_EXAMPLE = """\b
Example:
  topotrain leave workspace/digits --group 2
"""
JOIN_EXAMPLE = """\b
Example:
  topotrain join workspace/digits --group 2
"""

Workspace = Annotated[
    Path, typer.Argument(metavar="WORKSPACE", help="The folder of a job that `topotrain run` runs here.")
]
Group = Annotated[int, typer.Option("--group", metavar="N", help="Number of the worker group, from 0.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")]


def register(app: typer.Typer, desk: Desk) -> None:
    """Add the commands."""

    @app.command("leave", epilog=LEAVE_EXAMPLE)
    def leave(
        workspace: Workspace,
        group: Group,
        within: Annotated[
            str,
            typer.Option("--within", metavar="TIME", help="How long it may take to end its step; then it is ended."),
        ] = "10s",
        as_json: AsJson = False,
    ) -> None:
        """Let a worker group leave a job while the others train on.

        Returns when its processes have ended. What it has not read goes to the other groups.
        """
        _wish(desk, workspace, "leave", group, within, as_json)

    @app.command("join", epilog=JOIN_EXAMPLE)
    def join(workspace: Workspace, group: Group, as_json: AsJson = False) -> None:
        """Let a worker group come (again) to a job that runs, and read on with the others.

        Returns when it starts.
        """
        _wish(desk, workspace, "join", group, "10s", as_json)


def _wish(desk: Desk, workspace: Path, verb: str, group: int, within: str, as_json: bool) -> None:
    with desk.refusing():
        from topotrain.launch.attendance import Wish
        from topotrain.launch.door import ask

        answer = ask(workspace, Wish(verb, group, seconds("--within", within)))
        print(json.dumps(answer, indent=2) if as_json else f"topotrain: {answer['text']}")
