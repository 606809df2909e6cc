"""The command `topotrain`: run a job, plan it, compare several.

* Bad input is found before anything starts. It ends with one block on stderr and exit code 2.
* Exit codes: 0 done, 1 the program raised or a process died, 2 bad input, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
* `--help` and `plan` answer at once. So modules that are slow to import (torch above all) are imported where they are
  used.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from topotrain.tools.cli import (
    chaos,
    compare,
    jobs,
    launch,
    plan,
    run,
    servers,
    setup_commands,
    unit,
    watch,
)
from topotrain.tools.cli.command_line import PanelGroup, ProgramCommand, add_removed
from topotrain.tools.cli.performance import advise_command, predict_command, probe_command
from topotrain.tools.replay import replay_command

TRAINS = frozenset({"run", "unit", "launch", "check", "compare", "pserver", "replay"})
"""Commands that train: what they print is not their outcome."""

app = typer.Typer(
    cls=PanelGroup,
    name="topotrain",
    help="Distributed PyTorch training in which one cluster block chooses the framework.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the console script; raises SystemExit with the code of the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] and words[0] in TRAINS:
        from topotrain.launch.console_output import lossy_streams

        lossy_streams()
    app(args=words, prog_name="topotrain")
    raise SystemExit(0)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"topotrain {version('topotrain')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Take options before the command; typer reads the text at `app` for the help."""


def _add(panel: str, name: str, command: Callable[..., None], example: str, **settings: Any) -> None:
    """Add a command to a panel of the help, which has the order of these calls."""
    app.command(name, cls=ProgramCommand, epilog=example, rich_help_panel=panel, **settings)(command)


_add("Start", "init", setup_commands.init, setup_commands.INIT_EXAMPLE)
_add("Start", "run", run.run, run.EXAMPLE)
_add("Start", "plan", plan.plan, plan.EXAMPLE)
_add("Start", "compare", compare.compare, compare.COMPARE_EXAMPLE)
_add("Start", "check", compare.check, compare.CHECK_EXAMPLE)
_add("Look", "watch", watch.watch, watch.EXAMPLE)
app.add_typer(jobs.jobs, name="jobs", rich_help_panel="Look")
app.add_typer(launch.launch, name="launch", rich_help_panel="Cluster")
_add("Cluster", "unit", unit.unit, unit.EXAMPLE)
_add("Cluster", "store", servers.store, servers.STORE_EXAMPLE)
_add("Cluster", "doctor", setup_commands.doctor, setup_commands.DOCTOR_EXAMPLE)
_add(
    "Cluster", "pserver", servers.pserver, servers.PSERVER_EXAMPLE, help=servers.HELP, context_settings=servers.SETTINGS
)
_add("Think", "predict", predict_command.predict, predict_command.EXAMPLE)
_add("Think", "advise", advise_command.advise, advise_command.EXAMPLE)
_add("Think", "probe", probe_command.probe, probe_command.EXAMPLE, hidden=True)  # the two measure by themselves
_add("Study", "replay", replay_command.replay, replay_command.EXAMPLE)
_add("Study", "chaos", chaos.chaos, chaos.EXAMPLE)
add_removed(app)
