"""The result of one check before a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from topotrain.config.plain_text import printable


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, state and facts, and what to do."""

    name: str
    state: Literal["ok", "warning", "failed"]
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(name, "ok", text)


def warning(name: str, text: str, advice: str) -> Finding:
    """Return the finding of a check with a fact that may hinder the job."""
    return Finding(name, "warning", text, advice)


def failed(name: str, text: str, advice: str) -> Finding:
    """Return the finding of a check with which the job cannot run here."""
    return Finding(name, "failed", text, advice)


def as_text(found: Sequence[Finding]) -> str:
    """Return one line for each check."""
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        whole = f"{one.text.rstrip('.')}: {one.advice}" if one.advice else one.text
        # An error of another library may have several lines, and a name may hold any character.
        lines.append(f"{one.state.ljust(7)}  {one.name.ljust(width)}  {printable(whole, ' ')}")
    return "\n".join(lines)
