"""Tables of the reference pages, each from the place that the program reads.

Fields and their meanings are from job.proto, refused combinations from the rules that check them, and options from the
help of the commands.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from typer import Context
from typer.main import get_command

from topotrain.config import job
from topotrain.config.combinations import contributed
from topotrain.config.proto_schema import FILE, schema
from topotrain.tools.cli.app import app

SECTIONS = re.compile(r"^(?=## )", re.MULTILINE)
"""Where a page is cut: before each heading of the second level."""
HELP = re.compile(r"^`topotrain (\w+)[ A-Z]* --help` lists the options\.", re.MULTILINE)
"""The sentence of a page that the options of a command follow."""
EXCLUDED = "## Values that exclude each other\n"
"""The section with the refused combinations."""


def with_tables(page: str) -> str:
    """Return a page with the tables of its commands, of the messages in its headings, and of refused combinations."""
    page = HELP.sub(lambda found: f"{found[0]}\n\n{options(found[1])}\n\n", page)
    return "".join(map(_with_fields, SECTIONS.split(page)))


def _with_fields(section: str) -> str:
    if section.startswith(EXCLUDED):
        return f"{section}\n{refusals()}\n"
    names = re.findall(r"`(\w+Proto)`", section.partition("\n")[0]) if section.startswith("## ") else []
    parts = ((f"### `{name}`\n\n" if len(names) > 1 else "") + fields(name) for name in names)
    return section + "".join(f"{part}\n\n" for part in parts)


def fields(message: str) -> str:
    """Return the comment of a message of job.proto, and the table of its fields."""
    described = next(each for each in schema().message_type if each.name == message)
    text, rows = _comments(message)
    table = (
        (str(field.number), f"`{field.name}`", _default(field), rows.get(field.name, "")) for field in described.field
    )
    return "\n".join((*([text, ""] if text else ()), *_table(("#", "field", "default", "meaning"), table)))


def refusals() -> str:
    """Return the table of the combinations of fields that a job refuses."""
    rows = ((f"`{row.field}`", row.accepted) for row in (*job.COMBINATIONS, *contributed()))
    return "\n".join(_table(("field", "accepted"), rows))


def _comments(message: str) -> tuple[str, dict[str, str]]:
    """Return the comment above a message, and those above its fields."""
    found = re.search(rf"((?:^// .*\n)*)^message {message} {{\n((?s:.*?))^}}", FILE.read_text("utf-8"), re.M)
    assert found, message
    fields = re.findall(r"((?:^  // .*\n)+)^  \w+ [\w.]+ (\w+) = \d", found[2], re.M)
    return _joined(found[1]), {name: _joined(text) for text, name in fields}


def _joined(comment: str) -> str:
    return " ".join(line.strip().removeprefix("// ") for line in comment.splitlines())


def _default(field: Any) -> str:
    if field.default_value:
        return f"`{field.default_value}`"
    return "required" if field.label == field.LABEL_REQUIRED else "–"


def options(name: str) -> str:
    """Return the table of a command's options. Those of a group name the commands that take them."""
    command: Any = get_command(app).commands[name]  # type: ignore[attr-defined]
    commands = getattr(command, "commands", {"": command})
    takers: dict[tuple[str, str], list[str]] = {}
    for verb, below in commands.items():
        for row in _options(below):
            takers.setdefault(row, []).append(verb)
    rows = ((option, _taken_by(verbs, [*commands]) + meaning) for (option, meaning), verbs in takers.items())
    return "\n".join(_table(("option", "meaning"), rows))


def _taken_by(verbs: list[str], commands: list[str]) -> str:
    """Return the commands of a group that take an option, unless all do."""
    others = [verb for verb in commands if verb not in verbs]
    if not others:
        return ""
    names = ", ".join(f"`{verb}`" for verb in min(verbs, others, key=len))
    return f"{names}: " if len(verbs) <= len(others) else f"All but {names}: "


def _options(command: Any) -> Iterator[tuple[str, str]]:
    """Yield the options that the help of a command shows, with their meanings."""
    for parameter in command.get_params(Context(command)):
        if parameter.param_type_name == "option" and not parameter.hidden and "--help" not in parameter.opts:
            shown = f"`{parameter.opts[0]} {parameter.metavar or ''}".rstrip() + "`"
            has_default = parameter.default or type(parameter.default) is int  # not False, which is "not given"
            default = f" The default is `{parameter.default}`." if has_default else ""
            yield shown, _with_code(parameter.help or "") + default


def _with_code(text: str) -> str:
    """Mark the options in a text as code, because `--` is a dash on the site."""
    parts = text.split("`")
    parts[::2] = (re.sub(r"(?<!\S)--[\w-]+", r"`\g<0>`", part) for part in parts[::2])
    return "`".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    escaped = (tuple(cell.replace("|", "\\|") for cell in row) for row in rows)
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *escaped)]
