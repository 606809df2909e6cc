"""The page about recordings has every event with every field, and what the summary has."""

import re
from dataclasses import fields
from pathlib import Path

from tests.support.recorded_jobs import header, history
from topotrain.core.events import EVENTS
from topotrain.tools.recording.recorded_lines import SAMPLES, VERSION, TimedEvent
from topotrain.tools.recording.sample_slots import SAMPLES_PER_S, WHOLE_EVENTS, WHOLE_S

PAGE = (Path(__file__).parents[3] / "docs" / "watching.md").read_text(encoding="utf-8")


def test_the_page_has_every_event_with_its_fields() -> None:
    section = PAGE.split("### Events")[1].split("\n## ")[0]
    rows = {
        name: re.findall(r"`(\w+)`", listed) for name, listed in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.M)
    }
    assert rows == {name: [field.name for field in fields(kind)] for name, kind in EVENTS.items()}  # type: ignore[arg-type]


def test_the_page_has_every_field_of_the_summary() -> None:
    section = PAGE.split("With `--json`")[1].split("## From another machine")[0]
    summary = history(TimedEvent(0.0, header())).summary()
    names = {*summary, *summary["workers"][0], *summary["servers"][0]}
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_the_page_has_the_bounds_and_the_samples() -> None:
    assert VERSION == 1 and f"at most {SAMPLES_PER_S} samples per second" in PAGE
    assert f"older than {WHOLE_S:.0f} s" in PAGE and f"More than {WHOLE_EVENTS} of a kind" in " ".join(PAGE.split())
    assert f"Samples ({', '.join(f'`{name}`' for name in SAMPLES)})" in " ".join(PAGE.split())
