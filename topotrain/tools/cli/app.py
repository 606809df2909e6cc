"""The command `topotrain`: run a job, plan it, compare several.

* Bad input is found before anything starts. It ends with one block on stderr and exit code 2.
* Exit codes: 0 done, 1 the program raised or a process died, 2 bad input, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
* `--help` and `plan` answer at once. So modules that are slow to import (torch above all) are imported where they are
  used.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

from typer import Exit, Option, Typer
from typer.main import get_command

from topotrain.tools.cli import chaos, compare, jobs, launch, plan, run, setup_commands, unit, watch
from topotrain.tools.cli.command_line import PanelGroup, add, add_removed
from topotrain.tools.cli.performance import advise_command, predict_command, probe_command
from topotrain.tools.replay import replay_command

TRAINS = frozenset({"run", "unit", "launch", "check", "compare", "pserver", "replay"})
"""Commands that train: what they print is not their outcome."""

app = Typer(
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
    COMMANDS(args=words, prog_name="topotrain")
    raise SystemExit(0)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"topotrain {version('topotrain')}")
        raise Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Take options before the command; typer reads the text at `app` for the help."""


PANELS = {
    "Start": (setup_commands.init, run.run, plan.plan, compare.compare, compare.check),
    "Look": (watch.watch,),
    "Cluster": (unit.unit, setup_commands.store, setup_commands.doctor),
    "Think": (predict_command.predict, advise_command.advise),
    "Study": (replay_command.replay, chaos.chaos),
}
for _panel, _commands in PANELS.items():
    for _command in _commands:
        add(app, _command, rich_help_panel=_panel)
add(app, setup_commands.pserver, rich_help_panel="Cluster", context_settings={"ignore_unknown_options": True})
app.add_typer(jobs.jobs, name="jobs", rich_help_panel="Look")
app.add_typer(launch.launch, name="launch", rich_help_panel="Cluster")
add(app, probe_command.probe, hidden=True)  # predict and advise measure by themselves
add_removed(app)
COMMANDS = get_command(app)
