"""The charts of the page in a real browser: gaps, zoom, logarithms, smoothing, many lines, and several runs."""

from pathlib import Path
from typing import Any

import pytest
from browser import Browser, page_file, why_none
from prepared_view import UNSAFE, PreparedJob

from topotrain.tools.dashboard import page_files
from topotrain.tools.dashboard.run_comparison import compared, run_figures

pytestmark = [pytest.mark.journey, pytest.mark.skipif(bool(why_none()), reason=why_none())]

SPACE, ENTER, END = "\ue00d", "\ue007", "\ue010"
PLOT = "document.getElementById('chart-plot')"
TITLES = f"return {PLOT}.layout.annotations.map((one) => one.text)"
RANGE = f"return {PLOT}.layout.xaxis.range"


def shown(browser: Browser, folder: Path, view: dict[str, Any], runs: list[dict[str, Any]] | None = None) -> None:
    browser.resize(1400, 2600)
    browser.open(page_file(folder, view, runs))


def traces(browser: Browser, title: str) -> list[dict[str, Any]]:
    """What Plotly was given for a row, as soon as the page has drawn."""
    browser.frames(0.1)
    row = 2 + browser.script(TITLES).index(title)
    found: list[dict[str, Any]] = browser.script(
        f"return {PLOT}.data.filter((one) => one.yaxis === `y${{arguments[0]}}`)", row
    )
    return found


def line(browser: Browser, title: str, name: str) -> list[tuple[float, float | None]]:
    (found,) = (one for one in traces(browser, title) if one["name"] == name and one.get("opacity") is None)
    return list(zip(found["x"], found["y"], strict=True))


def choose(browser: Browser, selector: str, value: float) -> None:
    """Move a slider, as a reader does."""
    move = "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
    browser.script(move + "s.dispatchEvent(new Event('input', { bubbles: true }));", selector, value)


def test_all_metrics_have_rows_over_time_and_over_steps(browser: Browser, tmp_path: Path) -> None:
    view = PreparedJob().view()
    view["series"].append({**view["series"][0], "id": "job:x", "metric": f"log:{UNSAFE}", "of": "job"})
    shown(browser, tmp_path, view)
    rows = ["Loss", "Samples per second", "Staleness in versions", "Share of time spent waiting", "Bytes per second"]
    rows += ["Memory in bytes", "Updates per second of servers"]
    assert browser.script(TITLES)[:7] == rows
    texts = browser.script("return [...document.querySelectorAll('.annotation text')].map((one) => one.textContent)")
    assert set(texts[7:]) == {"accuracy", UNSAFE}, "text of a script is no markup"
    names = [one["name"] for one in traces(browser, "Staleness in versions")]
    assert names[:3] == ["worker 0/0 mean", "worker 0/0 p95", "worker 0/0 max"] and names[-1] == "bound"
    dashes = [one["line"]["dash"] for one in traces(browser, "Loss")]
    assert len(dashes) == 3 and len(set(dashes)) == 3, "lines differ without color"
    assert line(browser, "Loss", "group 0")[-2][0] == 240.0
    browser.picture("charts")
    browser.click("[name=axis][value=steps]")
    assert line(browser, "Samples per second", "worker 0/0")[0][0] == 2
    assert line(browser, "Updates per second of servers", "server 0/0")[-2][0] == 240


def interrupted(state: str) -> dict[str, Any]:
    """A job of one worker that is not there for 24 s from second 96 on, and makes no points then."""
    view = PreparedJob(groups=1, servers=1, slow=-1).view()
    back = [] if state == "restarts" else [[120.0, "restarts"]]
    view["states"]["worker 0/0"] = [[0.0, "computes"], [96.0, state], *back, [121.0, "computes"]]
    view["story"] = []
    for series in view["series"]:
        if series["of"] != "job":
            series["points"] = [point for point in series["points"] if not 96 < point[0] <= 120]
    return view


@pytest.mark.parametrize("state", ["dead", "away", "restarts"])
def test_curves_break_while_a_process_is_not_there(browser: Browser, tmp_path: Path, state: str) -> None:
    view = interrupted(state)
    shown(browser, tmp_path, view)
    for title, name in (("Samples per second", "worker 0/0"), ("Loss", "group 0"), ("accuracy", "worker 0/0")):
        points = line(browser, title, name)
        gaps = [at for at, (_, value) in enumerate(points[:-1]) if value is None]
        assert len(gaps) == 1 and points[gaps[0] - 1][0] == 96.0 and points[gaps[0] + 1][0] > 120.0
    (run, _) = compared(dict.fromkeys("ab", run_figures(view)))
    absent = [at for at, loss in zip(run["at"], run["curves"]["loss"], strict=True) if loss is None]
    assert len(absent) > 10 and all(at < 2.0 or 96.0 <= at <= 121.0 for at in absent)


def test_a_group_goes_on_with_the_workers_that_live(browser: Browser, tmp_path: Path) -> None:
    view = PreparedJob(groups=1, workers=2, servers=1, slow=-1).view()
    view["states"]["worker 0/1"] = [[0.0, "computes"], [96.0, "dead"], [120.0, "computes"]]
    shown(browser, tmp_path, view)
    assert None not in [value for _, value in line(browser, "Loss", "group 0")[:-1]]


def test_zoom_by_mouse_and_by_keyboard_holds_for_all_rows_and_the_moment(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    shown(browser, tmp_path, PreparedJob().view())
    whole = browser.script(RANGE)
    rows = browser.driver.find_elements("css selector", ".nsewdrag")
    assert len(rows) == 9
    ActionChains(browser.driver).move_to_element_with_offset(rows[2], -100, 0).click_and_hold().move_by_offset(
        100, 0
    ).release().perform()
    low, high = browser.wait(f"const range = {PLOT}.layout.xaxis.range; return range[0] > arguments[0] && range", 50)
    assert whole[0] < low < high < whole[1]
    moment = "return document.getElementById('chart-moment').getBoundingClientRect().left"
    choose(browser, "#moment-slider", (low + high) / 2)
    assert browser.script(moment) == pytest.approx(browser.script(MIDDLE), abs=3)
    choose(browser, "#moment-slider", 1.0)
    assert browser.script("return document.getElementById('chart-moment').hidden")
    browser.click("[name=log]")
    browser.wait(f"return {PLOT}.layout.yaxis2.type === 'log'")
    assert browser.script(RANGE) == [low, high], "drawing anew keeps what is zoomed"
    browser.script("document.querySelector('[aria-label=\"Reset axes\"]').focus()")
    browser.press(ENTER)
    browser.wait(f"return {PLOT}.layout.xaxis.range[0] === arguments[0]", whole[0])
    browser.script("document.querySelector('[aria-label=\"Zoom in\"]').focus()")
    browser.press(SPACE)
    browser.wait(f"return {PLOT}.layout.xaxis.range[0] > arguments[0]", whole[0])


MIDDLE = (
    "const { left, width } = document.querySelectorAll('.nsewdrag')[1].getBoundingClientRect(); return left + width / 2"
)


def test_the_logarithmic_switch(browser: Browser, tmp_path: Path) -> None:
    view = PreparedJob().view()
    next(one for one in view["series"] if one["id"] == "worker 0/0:waiting_share")["points"][3][2] = 0.0
    shown(browser, tmp_path, view)
    browser.script("document.querySelector('[name=log]').focus()")
    browser.press(SPACE)
    browser.wait(f"return {PLOT}.layout.yaxis2.type === 'log'")
    assert browser.script(f"return {PLOT}.layout.yaxis5.type") == "linear", "a value of 0 has no logarithm"
    browser.picture("charts-logarithmic")


def test_smoothing_is_that_of_tensorboard_with_the_values_behind_it(browser: Browser, tmp_path: Path) -> None:
    view = interrupted("dead")
    shown(browser, tmp_path, view)
    plain = line(browser, "Loss", "group 0")
    choose(browser, "[name=smooth]", 0.9)
    browser.wait("return document.getElementById('smooth-value').textContent === '0.9'")
    faint, smooth = traces(browser, "Loss")
    assert faint["opacity"] == 0.25 and faint["y"] == [value for _, value in plain]
    last, count = 0.0, 0
    for (_, value), found in zip(plain, smooth["y"], strict=True):
        if value is None:
            assert found is None
            continue
        last, count = last * 0.9 + value * 0.1, count + 1
        assert found == pytest.approx(last / (1 - 0.9**count))
    assert smooth["showlegend"]


def test_the_cursor_goes_through_all_rows_and_a_click_goes_to_the_moment(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    shown(browser, tmp_path, PreparedJob().view())
    row = browser.driver.find_elements("css selector", ".nsewdrag")[2]
    pointer = ActionChains(browser.driver).move_to_element(row)
    pointer.perform()
    tall = "return document.querySelector('.spikeline')?.getBoundingClientRect().height > 1000"
    browser.wait(tall)
    assert "worker 0/0" in browser.text(".hoverlayer") and "server" not in browser.text(".hoverlayer")
    pointer.click().perform()
    browser.wait("return document.getElementById('moment-time').textContent.startsWith('2:0')")


def test_of_many_lines_those_of_a_color_are_one_trace_that_names_them(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, PreparedJob(groups=20, workers=2, servers=1, slow=2).view())
    found = traces(browser, "Samples per second")
    assert len(found) == 6 and not any(one["showlegend"] for one in found)
    names = {text for one in found for text in one["text"]}
    assert names == {"", *(f"worker {group}/{index}" for group in range(20) for index in range(2))}
    assert all(None in one["y"] for one in found), "nothing lies between two lines"


def test_runs_side_by_side_with_one_hidden(browser: Browser, tmp_path: Path) -> None:
    jobs = {"a/one": PreparedJob(), "b": PreparedJob(groups=2, framework="Hogwild"), f"c {UNSAFE}": PreparedJob()}
    views = {name: job.view() for name, job in jobs.items()}
    shown(browser, tmp_path, views["a/one"], compared({name: run_figures(view) for name, view in views.items()}))
    row = "return [...document.querySelectorAll('#run-rows tr')[arguments[0]].children].map((one) => one.textContent)"
    cells = browser.script(row, 1)
    assert cells[1:] == ["b", "ended", "Hogwild", "2", "2", "2", "240", "0.1004", "240", "4:00"]
    found = traces(browser, "Loss")
    assert len(found) == 3 and len({one["line"]["color"] for one in found}) == 3
    assert [one["meta"] for one in found] == list(views)
    legend = "return [...document.querySelectorAll('.legendtext')].map((one) => one.textContent)"
    assert browser.script(legend) == list(views), "a name is no markup"
    browser.script("document.querySelector('#run-rows tr:nth-child(2) [type=checkbox]').focus()")
    browser.press(SPACE)
    assert [one["visible"] for one in traces(browser, "Loss")] == [True, "legendonly", True]
    assert [one["visible"] for one in traces(browser, "Samples per second")] == [True, "legendonly", True]
    browser.picture("several-runs")
    browser.click(".legendtoggle")
    browser.wait("return !document.querySelector('#run-rows [type=checkbox]').checked")
    assert [one["visible"] for one in traces(browser, "Loss")] == ["legendonly", "legendonly", True]


def test_without_the_library_the_page_says_how_to_install_it(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "chart_library", lambda: None)
    view = PreparedJob().view()
    browser.open(page_file(tmp_path, view, compared(dict.fromkeys("ab", run_figures(view)))))
    assert 'pip install "topotrain[watch]"' in browser.text("#chart-missing:not([hidden])")
    assert browser.script("return document.getElementById('chart-tools').hidden")
    assert browser.script("return document.getElementById('chart-none').hidden")
    assert browser.script("return document.querySelectorAll('#run-rows tr').length") == 2
    browser.click(".event[data-kind='incident']")
    assert browser.text("#moment-time").startswith("0:48")
    assert (tmp_path / "job.html").stat().st_size < 300_000
