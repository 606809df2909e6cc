"""The documentation of recordings has every event, what the summary has, and the bounds of the file."""

import re
import runpy
from pathlib import Path

from tests.support.recorded_jobs import header, history
from topotrain.core.events import EVENTS
from topotrain.tools.recording.recorded_lines import SAMPLES, VERSION, TimedEvent
from topotrain.tools.recording.recording_writer import SAMPLES_PER_S, WHOLE_EVENTS, WHOLE_S

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "watching.md").read_text(encoding="utf-8")


def test_the_site_lists_every_event_with_what_it_means() -> None:
    entries = runpy.run_path(str(DOCS / "site" / "conf.py"))["event_entries"]()
    assert re.findall(r"autoclass:: topotrain\.core\.events\.(\w+)", entries) == list(EVENTS)
    # A dataclass without a docstring gets its signature for one.
    assert {name for name, kind in EVENTS.items() if str(kind.__doc__).startswith(f"{name}(")} == set()


def test_the_page_has_every_field_of_the_summary() -> None:
    section = PAGE.split("With `--json`")[1].split("## From another machine")[0]
    summary = history(TimedEvent(0.0, header())).summary()
    names = {*summary, *summary["workers"][0], *summary["servers"][0]}
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_the_page_has_the_bounds_and_the_samples() -> None:
    assert VERSION == 1 and f"at most {SAMPLES_PER_S} samples per second" in PAGE
    assert f"older than {WHOLE_S:.0f} s" in PAGE and f"More than {WHOLE_EVENTS} of a kind" in " ".join(PAGE.split())
    assert f"Samples ({', '.join(f'`{name}`' for name in SAMPLES)})" in " ".join(PAGE.split())
