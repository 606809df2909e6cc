"""Commands of earlier versions: each ends with code 2 and its present form."""

import shlex

import typer

from topotrain.tools.monitor.monitored_run import complain

PRESENT = {
    **{verb: f"jobs {verb}" for verb in ("leave", "join", "snapshot", "stop")},
    "report": "watch",
    "env": "doctor",
}
"""The present command of each removed one."""
STORE = "--rendezvous"
"""The former option of a store, which is an argument now."""


def register(app: typer.Typer) -> None:
    """Add the commands, which no help shows."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    for former in PRESENT:
        app.command(former, hidden=True, add_help_option=False, context_settings=settings)(_removed)


def _removed(context: typer.Context) -> None:
    """Print the present form of a command, with the words of the user."""
    words = shlex.join(_present_words(context.args))
    complain(f"this command is now: topotrain {PRESENT[context.info_name or '']} {words}".rstrip())
    raise typer.Exit(2)


def _present_words(words: list[str]) -> list[str]:
    """Return the words with the store of `--rendezvous` in the place of the workspace."""
    for at, word in enumerate(words):
        option, _, url = word.partition("=")
        if option == STORE:
            end = at + 1 if url else at + 2
            return [url or "".join(words[at + 1 : end]), *words[:at], *words[end:]]
    return words
