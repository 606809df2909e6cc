"""The moments of a job in words, as the terminal has them."""

from collections.abc import Mapping

from topotrain.core.events import (
    Event,
    Failed,
    Final,
    Incident,
    Joined,
    Left,
    Lost,
    Metrics,
    Notice,
    Recovered,
    Resized,
    Saved,
    Skipped,
    Tested,
    Unsaved,
)
from topotrain.tools.monitor.job_report import moved
from topotrain.tools.monitor.progress_display import recovery, skip

_LONGEST = 500  # characters


def story_of(event: Event) -> tuple[str, str, str] | None:
    """Return kind, process and text of a moment; None for an event that is none.

    The process is "" for the job.
    """
    told = _told(event)
    return None if told is None else (told[0], told[1], told[2][:_LONGEST])


def _told(event: Event) -> tuple[str, str, str] | None:
    match event:
        case Incident():
            return "incident", event.who, f"{event.what}; {event.action}"
        case Recovered():
            return "recovered", "", recovery(event)
        case Saved():
            return "snapshot", "", f"snapshot {event.number} after step {event.step}"
        case Left():
            return "left", f"worker {event.group}/0", f"group {event.group} {event.how}"
        case Joined():
            return "joined", f"worker {event.group}/0", f"group {event.group} joins"
        case Resized():
            return "resized", "", f"{moved(event)}; the job goes on after step {event.step}"
        case Skipped() if event.by == event.who or (not event.by and event.who.endswith("/0")):
            return "skipped", event.who, skip(event)
        case Notice() | Unsaved():
            return "notice", event.who, event.text
        case Failed():
            return "failed", event.who, event.text
        case Lost():
            return "failed", event.who, event.text
        case Tested():
            return "evaluation", "", f"{event.kind} after step {event.step}: {values_text(event.values)}"
        case Metrics():
            return "evaluation", "", f"reported: {values_text(event.values)}"
        case Final():
            return "snapshot", "", "the final parameters are written"
        case _:
            return None


def values_text(values: Mapping[str, float]) -> str:
    """Return values by name as text."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
