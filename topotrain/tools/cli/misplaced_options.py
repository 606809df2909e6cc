"""Find options of topotrain after the script, which are passed to the script.

A script may have an option of the same name, so nothing is refused. There is a hint where no Python file beside the
program mentions the word.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path


def misplaced(program: Path, args: Sequence[str], ours: Collection[str]) -> list[str]:
    """Return topotrain's options among the script's arguments.

    Options that the program seems to know are left out.
    """
    names = dict.fromkeys(name for word in args if (name := word.partition("=")[0]) in ours)
    if not names or not program.is_file():  # a program on another machine cannot be read
        return []
    sources = [path.read_text("utf-8", errors="ignore") for path in {program, *program.parent.glob("*.py")}]
    return [name for name in names if not any(re.search(rf"{re.escape(name)}(?![\w-])", text) for text in sources)]


def hint(program: str, names: Sequence[str], command: str) -> str:
    """Return the warning about these options."""
    words, goes, them = ", ".join(names), "go" if len(names) > 1 else "goes", "them" if len(names) > 1 else "it"
    known = f"no Python file in its folder mentions {them}"
    place = f"options of `topotrain {command}` must be given before {program}"
    return f"{words} after {program} {goes} to the script, and {known}: {place}"
