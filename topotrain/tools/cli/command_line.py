"""The grammar of `topotrain`: the end of options, panels, and removed commands.

Options end at the program, as those of python and torchrun do.
"""

import inspect
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from typer import Context, Typer
from typer.core import TyperCommand, TyperGroup

from topotrain.config.python_module import as_program
from topotrain.tools.cli.job_arguments import BadInput, refusing
from topotrain.tools.monitor.terminal import say

WHOLE = 1000
"""Characters, more than the first sentence of any command has: none is cut."""
PROGRAMS = {"program", "files"}
"""Names of arguments that are a program, or job files and a program."""
PRESENT = {
    **{verb: f"jobs {verb}" for verb in ("leave", "join", "snapshot", "stop")},
    "report": "watch",
    "env": "doctor",
}
"""The present command of each removed one."""
STORE = "--rendezvous"
"""The former option of a store, which is an argument now."""


class PanelGroup(TyperGroup):
    """A group with its commands below the names of their panels."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; bad input is one block on stderr and code 2."""
        with refusing():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write all commands with their first sentences."""
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        width = max(map(len, shown))
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in shown.items():
            panel = getattr(command, "rich_help_panel", None)
            rows = panels.setdefault(panel if isinstance(panel, str) else "Commands", [])
            rows.append((name.ljust(width), command.get_short_help_str(WHOLE)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


class ProgramCommand(TyperCommand):
    """A command that gives all words behind PROGRAM, or -m MODULE, to the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read options up to the program, and name those of this command behind it."""
        words, at = self._with_ports(args)
        if at is None:
            return super().parse_args(ctx, words)
        program, rest = _program_at(words, at)
        if rest[:1] == ["--"]:
            del rest[0]
        elif not ctx.resilient_parsing:
            self._name_options(ctx.command_path, program, rest)
        # Behind a "--" the parser takes nothing for an option, also no program "-m MODULE".
        return super().parse_args(ctx, [*words[:at], "--", program, *rest])

    def _with_ports(self, args: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the words with a port for a lone `--watch`, and the program's place.

        None: there is no program, or a "--" before it.
        """
        places = [parameter.name for parameter in self.params if parameter.param_type_name == "argument"]
        valued = {name for parameter in self._options() if not parameter.is_flag for name in parameter.opts}
        words, positionals, at = list(args), 0, 0
        while at < len(words) and words[at] != "--":
            word = words[at]
            following = words[at + 1] if at + 1 < len(words) else ""
            if word == "--watch" and word in valued and not following.isdecimal():
                words[at] = "--watch=0"
            elif word.startswith("-m") and PROGRAMS & {*places}:
                return words, at
            elif word.startswith("-"):
                at += word in valued
            elif _is_program(places, word, positionals):
                return words, at
            else:
                positionals += 1
            at += 1
        return words, None

    def _options(self) -> list[Any]:
        return [parameter for parameter in self.params if parameter.param_type_name == "option"]

    def _name_options(self, command: str, program: str, args: Sequence[str]) -> None:
        """Print a notice of words for the program that are also options of this command."""
        ours = {name for parameter in self._options() if not parameter.hidden for name in parameter.opts}
        before = args[: args.index("--")] if "--" in args else args
        found = list(dict.fromkeys(name for word in before if (name := word.partition("=")[0]) in ours))
        if found:
            given = f"{', '.join(found)} behind {program} {'is' if len(found) == 1 else 'are'} given to it"
            place = f"options of `{command}` come before {program}, and a -- behind it says that this is meant"
            say(f"{given}: {place}")


def _is_program(places: Sequence[str | None], word: str, positionals: int) -> bool:
    if "files" in places:  # any number of job files come before it
        return word.endswith(".py")
    return "program" in places and positionals == places.index("program")


def _program_at(words: Sequence[str], at: int) -> tuple[str, list[str]]:
    """Return the program, a script or "-m MODULE", and the words behind it."""
    if not words[at].startswith("-m"):
        return words[at], list(words[at + 1 :])
    # As with python, the name may follow without a space.
    end = at + 1 if words[at] != "-m" else at + 2
    return as_program(words[at].removeprefix("-m") or "".join(words[at + 1 : end])), list(words[end:])


def add(group: Typer, command: Callable[..., None], name: str | None = None, text: str = "", **settings: Any) -> None:
    """Add a command with its docstring as help; the examples come behind the options."""
    help, _, shown = (text or inspect.getdoc(command) or "").partition("Example:\n")
    settings = {"cls": ProgramCommand, **settings}
    group.command(name, help=help, epilog=f"\b\nExample:\n{shown}", **settings)(command)


def add_removed(app: Typer) -> None:
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    for former in PRESENT:
        app.command(former, hidden=True, add_help_option=False, context_settings=settings)(_removed)


def _removed(context: Context) -> None:
    """Print the present form of a command, with the words of the user."""
    words = shlex.join(_present_words(context.args))
    raise BadInput(f"this command is now: topotrain {PRESENT[context.info_name or '']} {words}".rstrip())


def _present_words(words: list[str]) -> list[str]:
    """Return the words with the store of `--rendezvous` in the place of the workspace."""
    for at, word in enumerate(words):
        option, _, url = word.partition("=")
        if option == STORE:
            end = at + 1 if url else at + 2
            return [url or "".join(words[at + 1 : end]), *words[:at], *words[end:]]
    return words
