"""Events as records of Python's `logging`, in the logger "topotrain".

Each process of a job logs its own events, and the launcher those of all processes. The usual means of `logging` choose
what is kept: `logging.getLogger("topotrain").setLevel(logging.ERROR)` in a script silences the notices of its worker,
on the terminal as well, and `logging.INFO` adds what is no warning to the log of the worker.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from topotrain.config.private_files import open_file
from topotrain.core.events import (
    Connects,
    Event,
    Exited,
    Failed,
    Final,
    Finished,
    Incident,
    Joined,
    Left,
    Notice,
    Recovered,
    Resized,
    Saved,
    Skipped,
    Started,
    StepDone,
)
from topotrain.launch.log_lines import LineStamps

LOGGER = logging.getLogger("topotrain")
# Python prints the warnings of a logger without any handler. The terminal shows them already.
LOGGER.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class EventWords:
    """The words of an event for the log. process: the one that it is about, or ""."""

    level: int
    process: str
    text: str


def words(event: Event) -> EventWords | None:
    """Return level and text of an event; None for an event that is no news."""
    match event:
        case Notice(who=who, text=text):
            return EventWords(logging.WARNING, who, text)
        case Skipped(who=who, step=step):
            return EventWords(logging.WARNING, who, f"step {step} is skipped: a gradient is not finite")
        case Incident(who=who, what=what, action=action):
            return EventWords(logging.WARNING, who, f"{what}; {action}")
        case Failed(who=who, text=text):
            return EventWords(logging.ERROR, who, text)
        case StepDone(who=who, step=step, loss=loss):
            return EventWords(logging.DEBUG, who, f"step {step}" if loss is None else f"step {step}, loss {loss:.4f}")
        case _:
            return _progress(event)


def _progress(event: Event) -> EventWords | None:
    level = logging.INFO
    match event:
        case Started(who=who, pid=pid):
            return EventWords(level, who, f"has started (pid {pid})")
        case Connects(who=who):
            return EventWords(level, who, "connects to the servers")
        case Finished(who=who, steps=steps, samples=samples) if steps:
            return EventWords(level, who, f"has finished: {steps} steps, {samples} samples")
        case Exited(who=who, code=code):
            return EventWords(level, who, f"has ended with exit code {code}")
        case Recovered(waited_s=waited_s):
            return EventWords(level, "", f"training again after {waited_s:.1f} s")
        case Left(group=group, how=how):
            return EventWords(level, "", f"group {group} {how}")
        case Joined(group=group):
            return EventWords(level, "", f"group {group} joins")
        case Resized(workers=workers, step=step):
            return EventWords(level, "", f"the job goes on after step {step} with {workers} workers")
        case Saved(who=who, step=step, path=path):
            return EventWords(level, who, f"snapshot of step {step}: {path}")
        case Final(path=path):
            return EventWords(level, "", f"the final parameters are in {path}")
        case _:
            return None


def is_silenced(event: Event) -> bool:
    """Whether this process shows no notices, because of the level of the logger."""
    # Its own level alone: a level of the root logger, or `logging.disable`, is seldom meant for the terminal.
    return isinstance(event, Notice) and LOGGER.level > logging.WARNING


def record(event: Event, own: str = "") -> None:
    """Log an event.

    own: the name of this process, which its own records leave out.
    """
    found = words(event)
    if isinstance(event, Failed) and event.who == own:
        # Its log has the traceback.
        return
    if found is not None and LOGGER.isEnabledFor(found.level):
        if found.process and found.process != own:
            LOGGER.log(found.level, "%s: %s", found.process, found.text)
        else:
            LOGGER.log(found.level, "%s", found.text)


class LogFileHandler(logging.Handler):
    """Appends the records of a process to its log, each line with time and name.

    Not through stderr: the main worker's is shown on the terminal, which shows notices already.

    Args:
        log: the file.
        name: of the process.
    """

    def __init__(self, log: Path, name: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        self._log, self._name = log, name

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record. A full disk does not end the job."""
        text = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        append(self._log, LineStamps(self._name).stamped(text, record.created))


def append(log: Path, lines: bytes) -> None:
    """Append whole lines to a log that other writers append to; errors are ignored."""
    with (
        contextlib.suppress(OSError),
        # Opened for each record: they are rare, and a program may close descriptors that it does not know.
        os.fdopen(open_file(log, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0) as file,
    ):
        size = os.fstat(file.fileno()).st_size
        # The program may be inside a line, such as that of a progress bar.
        inside = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write(b"\n" * inside + lines)


def log_to(log: Path, name: str) -> None:
    """Append what this process logs to its log."""
    LOGGER.addHandler(LogFileHandler(log, name))
