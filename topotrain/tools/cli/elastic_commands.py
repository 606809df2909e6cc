"""The commands `topotrain leave` and `topotrain join`, for a running job.

Worker groups leave or join an asynchronous job, workers a job of one group.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topotrain.config.job import ConfigError
from topotrain.tools.cli.chaos import seconds
from topotrain.tools.cli.job_arguments import AsJson, refusing

if TYPE_CHECKING:
    from topotrain.launch.recovery.recovery_actions import GroupRequest, ResizeRequest

LEAVE_EXAMPLE = """\b
Example:
  topotrain leave workspace/digits --group 2
  topotrain leave workspace/digits --workers 1
"""
JOIN_EXAMPLE = """\b
Example:
  topotrain join workspace/digits --group 2
  topotrain join workspace/digits --workers 1
"""

Workspace = Annotated[
    Path, typer.Argument(metavar="WORKSPACE", help="The folder of a job that `topotrain run` runs here.")
]
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
        workspace: Workspace,
        group: Group = None,
        workers: Workers = None,
        within: Within = "10s",
        as_json: AsJson = False,
    ) -> None:
        """Let a worker group leave a running job, or a worker a job of one group.

        A group: the others train on and get the data that it has not read; returns when its processes have ended. A
        worker: the job takes a snapshot and continues from it with one worker less. The command returns when it trains
        again.
        """
        _request(workspace, "leave", group, workers, within, as_json)

    @app.command("join", epilog=JOIN_EXAMPLE)
    def join(
        workspace: Workspace,
        group: Group = None,
        workers: Workers = None,
        within: Within = "10s",
        as_json: AsJson = False,
    ) -> None:
        """Let a worker group join a running job (again), or a worker a job of one group.

        A group: returns when it starts. A worker: the job takes a snapshot and continues from it with one worker more.
        The command returns when it trains again.
        """
        _request(workspace, "join", group, workers, within, as_json)


def _request(workspace: Path, verb: str, group: int | None, workers: int | None, within: str, as_json: bool) -> None:
    with refusing():
        from topotrain.launch.control_socket import ask

        answer = ask(workspace, _meant(verb, group, workers, seconds("--within", within)))
        print(json.dumps(answer, indent=2) if as_json else f"topotrain: {answer['text']}")


def _meant(verb: str, group: int | None, workers: int | None, within_s: float) -> "GroupRequest | ResizeRequest":
    """Return a request for the named group, or else for workers. Raises ConfigError."""
    from topotrain.launch.recovery.recovery_actions import GroupRequest, ResizeRequest

    if group is None:
        return ResizeRequest(verb, 1 if workers is None else workers, within_s)
    if workers is not None:
        raise ConfigError("--workers", workers, "must not be given with --group, which means a whole worker group")
    return GroupRequest(verb, group, within_s)
