"""The result of one check before a job."""

from dataclasses import asdict, dataclass
from enum import Enum

from topotrain.config.plain_text import printable


class State(str, Enum):
    ok = "ok"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, state and facts, and what to do."""

    name: str
    state: State
    text: str
    advice: str = ""

    def as_data(self) -> dict[str, str]:
        """Return plain data for JSON."""
        return {**asdict(self), "state": self.state.value}

    def line(self, width: int) -> str:
        """Return one line; width: of the column of names."""
        whole = f"{self.text.rstrip('.')}: {self.advice}" if self.advice else self.text
        # An error of another library may have several lines, and a name may hold any character.
        return f"{self.state.value.ljust(7)}  {self.name.ljust(width)}  {printable(whole, ' ')}"


def ok(name: str, text: str) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(name, State.ok, text)


def warning(name: str, text: str, advice: str) -> Finding:
    """Return the finding of a check with a fact that may hinder the job."""
    return Finding(name, State.warning, text, advice)


def failed(name: str, text: str, advice: str) -> Finding:
    """Return the finding of a check with which the job cannot run here."""
    return Finding(name, State.failed, text, advice)
