"""The command `topotrain env`: what is needed before a job, and in a bug report."""

import json
import os

import typer

from topotrain.tools.cli.job_arguments import AsJson, refusing

ENV_EXAMPLE = """\b
Example:
  topotrain env --json
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("env", epilog=ENV_EXAMPLE)(env)


def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions, this machine, and variables.

    Secrets are not printed: TOPOTRAIN_TOKEN and the user in a URL are shown as set or not set.
    """
    with refusing():
        from topotrain.tools.diagnostics.environment_report import environment_report, report_text

        report = environment_report(os.environ)
        print(json.dumps(report, indent=2) if as_json else report_text(report))
