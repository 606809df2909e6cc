"""The commands `topotrain env` and `topotrain init`.

They are given before a job: for a bug report, and for the first files.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from topotrain.tools.cli.job_arguments import AsJson, refusing
from topotrain.tools.starter_job import CLUSTERS, DEFAULT, write_starter

ENV_EXAMPLE = """\b
Example:
  topotrain env --json
"""
INIT_EXAMPLE = """\b
Example:
  topotrain init spirals --framework downpour
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("env", epilog=ENV_EXAMPLE)(env)
    app.command("init", epilog=INIT_EXAMPLE)(init)


def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions, this machine, and variables.

    Secrets are not printed: TOPOTRAIN_TOKEN and the user in a URL are shown as set or not set.
    """
    with refusing():
        from topotrain.tools.diagnostics.environment_report import environment_report, report_text

        report = environment_report(os.environ)
        print(json.dumps(report, indent=2) if as_json else report_text(report))


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write; made if it is missing.", show_default=False)
    ] = Path(),
    framework: Annotated[
        str, typer.Option("--framework", metavar="NAME", help=f"Of the cluster block: {', '.join(CLUSTERS)}.")
    ] = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Write a job file and a small training script to begin with.

    The script makes its data itself. An existing file is never overwritten.
    """
    with refusing():
        made = write_starter(folder, framework)
        if as_json:
            print(json.dumps({"files": [str(path) for path in made.files], "commands": made.commands}, indent=2))
            return
        print(f"written: {', '.join(map(str, made.files))}\n\nnext:")
        print("\n".join(f"  {command}" for command in made.commands))
