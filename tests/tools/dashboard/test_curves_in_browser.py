"""The charts of the page in a real browser: gaps, keys, marks of events, and many lines."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, page_file, why_none
from prepared_view import PreparedJob

pytestmark = [pytest.mark.journey, pytest.mark.skipif(bool(why_none()), reason=why_none())]

UP, DOWN = "\ue013", "\ue015"
CANVAS = "document.querySelector(`[data-chart=${arguments[0]}] canvas`)"
LEFT, RIGHT = 58, 14
"""Pixels beside the plot of a chart."""

# Pixels with the color of the first line, in spans of a chart. Its whole width is 0 to 1.
COLORED = f"""
const canvas = {CANVAS};
const [width, inner] = [canvas.width, canvas.width - {LEFT} - {RIGHT}];
const data = canvas.getContext('2d').getImageData(0, 0, width, canvas.height).data;
const near = (at) => [0x17, 0x63, 0xab].every((value, part) => Math.abs(data[at + part] - value) < 40);
return arguments[1].map(([from, to]) => {{
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {{
    const share = ((at / 4) % width - {LEFT}) / inner;
    found += share >= from && share < to && data[at + 3] > 99 && near(at);
  }}
  return found;
}});
"""


def shown(browser: Browser, folder: Path, view: dict[str, Any], second: dict[str, Any] | None = None) -> None:
    browser.resize(1400, 2600)
    browser.open(page_file(folder, view, second))


def keys(browser: Browser, chart: str) -> list[list[str]]:
    """The name and the value of each entry of a chart's key."""
    entries = "[...document.querySelectorAll(`[data-chart=${arguments[0]}] .key li:not(.near)`)]"
    found: list[list[str]] = browser.script(
        f"return {entries}.map((li) => [li.children[1].textContent, li.children[2].textContent])", chart
    )
    return found


# ---- gaps ------------------------------------------------------------------------------------------------------------


def interrupted(state: str, until: float = 120.0) -> dict[str, Any]:
    """A job of one worker that is not there from second 96 on, and makes no points then."""
    view = PreparedJob(groups=1, servers=1, slow=-1).view()
    back = [[until, "restarts"], [until + 1, "computes"]] if until < 240 else []
    view["states"]["worker 0/0"] = [[0.0, "computes"], [96.0, state], *back]
    view["story"] = []
    for series in view["series"]:
        if series["of"] != "job":
            series["points"] = [point for point in series["points"] if not 96 < point[0] <= until]
    return view


@pytest.mark.parametrize("state", ["dead", "away"])
@pytest.mark.parametrize("chart", ["samples_per_s", "waiting_share", "loss"])
def test_curves_break_while_a_process_is_not_there(browser: Browser, tmp_path: Path, state: str, chart: str) -> None:
    shown(browser, tmp_path, interrupted(state))
    before, gap, after = browser.script(COLORED, chart, [[0.25, 0.35], [0.42, 0.48], [0.55, 0.65]])
    assert before > 20 and gap == 0 and after > 20


def test_in_a_gap_the_key_has_no_value(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, interrupted("dead"))
    move = "const s = document.getElementById('replay-slider'); s.value = arguments[0];"
    values = []
    for second in (90.0, 110.0, 130.0):
        browser.script(move + "s.dispatchEvent(new Event('input'));", second)
        values.append(keys(browser, "samples_per_s")[0][1])
    assert values[1] == "–" and "–" not in (values[0], values[2])


def test_a_worker_that_stays_dead_has_no_value_later(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, interrupted("dead", until=240.0))
    move = "const s = document.getElementById('replay-slider'); s.value = arguments[0];"
    browser.script(move + "s.dispatchEvent(new Event('input'));", 200.0)
    assert keys(browser, "samples_per_s")[0][1] == "–"


def test_a_group_goes_on_with_the_workers_that_live(browser: Browser, tmp_path: Path) -> None:
    view = PreparedJob(groups=1, workers=2, servers=1, slow=-1).view()
    view["states"]["worker 0/1"] = [[0.0, "computes"], [96.0, "dead"], [120.0, "computes"]]
    view["story"] = []
    shown(browser, tmp_path, view)
    assert browser.script(COLORED, "loss", [[0.42, 0.48]])[0] > 10


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_the_key_has_the_dashes_of_the_canvas(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, PreparedJob(groups=6, servers=1).view())
    dashes = browser.script(
        "const lines = [...document.querySelectorAll('[data-chart=samples_per_s] .key svg line')];"
        "return lines.map((line) => line.getAttribute('stroke-dasharray'));"
    )
    assert dashes == ["", "7 4", "2 3", "10 3 2 3", "4 4", "12 5"]


def test_each_run_with_many_lines_has_its_own_summary(browser: Browser, tmp_path: Path) -> None:
    other = PreparedJob(groups=3, workers=2, name="sandblaster", framework="Sandblaster", seconds=120.0).view()
    shown(browser, tmp_path, PreparedJob(groups=4, workers=2, slow=-1).view(), other)
    entries = keys(browser, "samples_per_s")
    assert [name for name, _ in entries] == ["A: median of 8", "B: median of 6"]
    assert entries[0][1] == "101 (96.1 to 104)" and " to " in entries[1][1]
    assert browser.script(COLORED, "samples_per_s", [[0.6, 0.7]])[0] > 20
    browser.picture("two-runs-of-many")


# ---- many lines ------------------------------------------------------------------------------------------------------


def test_the_line_at_the_pointer_is_named(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, PreparedJob(groups=4, workers=2, servers=1, slow=2).view())
    assert keys(browser, "samples_per_s")[0][0] == "8 lines"
    point = (
        f"const canvas = {CANVAS}; const box = canvas.getBoundingClientRect();"
        "const y = arguments[1] ? box.top + arguments[1] : box.bottom - 27;"
        "canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 300, clientY: y }));"
        "return document.querySelector('[data-chart=samples_per_s] .near').textContent;"
    )
    named = {browser.script(point, "samples_per_s", y) for y in range(30, 160, 4)}
    assert any(name.startswith("worker 2/") for name in named) and any(name.startswith("worker 0/") for name in named)
    assert browser.script(point, "samples_per_s", 0) == ""


def test_the_lines_of_a_group_differ_by_their_dashes(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, PreparedJob(groups=4, workers=2, servers=1, slow=-1).view())
    browser.script(f"{CANVAS}.focus()", "samples_per_s")
    found = {}
    for _ in range(8):
        browser.press(UP)
        name, colour, dash = browser.script(
            "const near = document.querySelector('[data-chart=samples_per_s] .near');"
            "const { colour, dash } = near.querySelector('svg').dataset;"
            "return [near.children[1].textContent, colour, dash];"
        )
        found[name] = colour, dash
    assert len(found) == 8
    assert all(a != b for a, b in itertools.combinations(found.values(), 2))
    browser.press(DOWN)
    assert ":" in browser.text("[data-chart=samples_per_s] .unseen")


# ---- marks -----------------------------------------------------------------------------------------------------------


def test_marks_at_one_place_are_stacked_and_counted(browser: Browser, tmp_path: Path) -> None:
    view = PreparedJob(servers=1).view()
    marks = [("evaluation",), ("evaluation", "snapshot"), ("evaluation", "snapshot", "snapshot")]
    seen = []
    for kinds in marks:
        view["story"] = [{"at": 120.0, "kind": kind, "of": "job", "text": kind} for kind in kinds]
        shown(browser, tmp_path, view)
        seen.append(browser.script(f"return {CANVAS}.toDataURL()", "samples_per_s"))
    assert len(set(seen)) == 3
    browser.picture("stacked-marks")
