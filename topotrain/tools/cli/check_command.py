"""The command `topotrain check`: is a job the plain script?"""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from topotrain.tools.cli.job_arguments import Args, AsJson, Conf, Forkserver, Program, Quiet, Sets, load_job, refusing
from topotrain.tools.monitor.monitored_run import complain

if TYPE_CHECKING:
    from topotrain.tools.check.compared_records import Comparison

EXAMPLE = """\b
Example:
  topotrain check examples/conf/sandblaster.conf examples/digits.py --epochs 5
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("check", epilog=EXAMPLE)
    def check(
        conf: Conf,
        program: Program = None,
        args: Args = None,
        sets: Sets = None,
        steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Compare so many steps.")] = 30,
        whole: Annotated[bool, typer.Option("--whole", help="Compare all steps, and what follows the last.")] = False,
        eval_mode: Annotated[
            bool, typer.Option("--eval-mode", help="Dropout and BatchNorm as in evaluation, to see the rest.")
        ] = False,
        as_json: AsJson = False,
        quiet: Quiet = False,
        forkserver: Forkserver = "",
    ) -> None:
        """Compare a job with the plain script, step by step.

        The first steps run as plain Python and as the job. Gradients, values and metrics must be equal up to rounding.
        Of an asynchronous job one group is checked. Exit code 1: they differ, or one of them fails.
        """
        with refusing():
            job = load_job(conf, sets, program, args)
            from topotrain.tools.check import check_run

            check_run.skeleton(job)  # refused before anything starts

            def stage(text: str) -> None:
                if not quiet:
                    print(f"topotrain: checking: {text}", file=sys.stderr, flush=True)

            try:
                found = check_run.check(job, 0 if whole else steps, eval_mode, forkserver, stage)
            except check_run.RunFailed as failed:
                complain(str(failed))
                raise typer.Exit(1) from None
            print(json.dumps({"equal": not found.what, **asdict(found)}, indent=2) if as_json else sentence(found))
            raise typer.Exit(1 if found.what else 0)


def sentence(found: "Comparison") -> str:
    """Return the result in words."""
    if not found.what:
        return f"equal: {found.steps} steps, {found.parameters} parameters: largest difference {found.largest:.1e}"
    where = f"step {found.step}: " if found.step else ""
    lines = [f"different: {where}{found.what} differs by {found.size:.1e}", f"likely cause: {found.cause}"]
    return "\n  ".join([*lines, *(f"the job said: {text}" for text in found.notices)])
