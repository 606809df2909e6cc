"""The page in a real browser: map, table, events, moment, charts, runs, keyboard, narrow, dark, no console error."""

import io
import re
from contextlib import ExitStack, closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, page_file, why_none
from growing_recording import STARTED, GrowingRecording, step
from PIL import Image
from prepared_view import UNSAFE, PreparedJob
from seeds import SOAK

from topotrain.core.events import Logged, Slices, Started
from topotrain.tools.dashboard import page_files
from topotrain.tools.dashboard.page_server import served_page
from topotrain.tools.dashboard.run_comparison import compared, run_figures
from topotrain.tools.http_server import listen
from topotrain.tools.recording.recording_file import RecordedWorkspace

pytestmark = [pytest.mark.journey, pytest.mark.skipif(bool(why_none()), reason=why_none())]

TAB, ENTER, ESCAPE, SPACE = "\ue004", "\ue007", "\ue00c", "\ue00d"
RIGHT, DOWN, HOME, UP = "\ue014", "\ue015", "\ue011", "\ue013"
PLOT = "document.getElementById('chart-plot')"
TITLES = f"return {PLOT}.layout.annotations.map((one) => one.text)"
RANGE = f"return {PLOT}.layout.xaxis.range"
GROUND = "return getComputedStyle(document.body).backgroundColor"
COUNT = "return document.querySelectorAll(arguments[0]).length"
HIDDEN = "return document.getElementById(arguments[0]).hidden"
EDGES = "const { top, bottom } = document.querySelector(arguments[0]).getBoundingClientRect(); return { top, bottom };"
TOO_WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"

# Contrast as WCAG 2 defines it, of each text with the ground that is really behind it.
CONTRAST = """
const channel = (value) => { const s = value / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; };
const parts = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const ground = (element) => {
  for (let here = element; here; here = here.parentElement) {
    const colour = parts(getComputedStyle(here).backgroundColor);
    if (colour.length < 4 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || element.disabled || element.tagName === 'OPTION' || !element.checkVisibility()) continue;
  const [a, b] = [light(parts(getComputedStyle(element).color)), light(ground(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push(`${element.className || element.tagName}: ${ratio.toFixed(2)} ${element.textContent}`);
}
return found;
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a job with all kinds of events, as a file."""
    view = PreparedJob(workers=2, hosts=2, slow=-1).view()
    series = {one["id"]: one for one in view["series"]}
    view["series"].append({**series["group 0:loss"], "id": "job:x", "metric": f"log:{UNSAFE}", "of": "job"})
    series["worker 0/0:waiting_share"]["points"][3][2] = 0.0
    for point in series["worker 2/0:samples_per_s"]["points"]:
        point[2] *= 0.4
    return page_file(tmp_path_factory.mktemp("page"), view, logs={"worker 0/0": f"epoch 1\n{UNSAFE}"})


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    """The window with this page, at the end of the job. Nothing is chosen."""
    if browser.driver.current_url != address:
        browser.open(address)
    browser.press(ESCAPE)
    reset = "const form = document.getElementById('chart-tools'); form.reset();"
    browser.script(f"{reset} form.dispatchEvent(new Event('input'));")
    browser.click("#moment-follow")
    return browser


def choose(browser: Browser, selector: str, value: float) -> None:
    """Move a slider, as a reader does."""
    move = "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
    browser.script(move + "s.dispatchEvent(new Event('input', { bubbles: true }));", selector, value)


def at(browser: Browser, seconds: float) -> None:
    choose(browser, "#moment-slider", seconds)


def state(browser: Browser, name: str) -> str:
    return str(browser.script("return document.querySelector(`[data-name='${arguments[0]}']`).dataset.state", name))


def row(browser: Browser, name: str, state: str) -> list[str]:
    """The cells of a process in the table, as soon as it has this state there."""
    cells: list[str] = browser.wait(
        "const row = document.querySelector(`[data-process='${arguments[0]}']`).closest('tr');"
        "const texts = [...row.cells].map((cell) => cell.textContent);"
        "return texts[2] === arguments[1] && texts;",
        name,
        state,
    )
    return cells


def traces(browser: Browser, title: str) -> list[dict[str, Any]]:
    """What Plotly was given for a row, as soon as the page has drawn."""
    browser.frames(0.1)
    found: list[dict[str, Any]] = browser.script(
        f"return {PLOT}.data.filter((one) => one.yaxis === `y${{arguments[0]}}`)",
        2 + browser.script(TITLES).index(title),
    )
    return found


def line(browser: Browser, title: str, name: str) -> list[tuple[float, float | None]]:
    (found,) = (one for one in traces(browser, title) if one["name"] == name and one.get("opacity") is None)
    return list(zip(found["x"], found["y"], strict=True))


# ---- one job ---------------------------------------------------------------------------------------------------------


def test_map_table_and_details_show_a_moment(page: Browser) -> None:
    assert (page.script(COUNT, ".process"), page.script(COUNT, ".unit")) == (8, 8)
    assert page.text("#job-figures") == "elapsed4:00done100 %left–epoch5step240loss0.1samples/s240"
    cells = row(page, "worker 0/0", "finished")
    assert cells[3] == "240" and cells[8].endswith("MB")
    at(page, 52.0)
    assert state(page, "worker 0/1") == "dead" and state(page, "worker 0/0") in ("computes", "waits")
    slow = (
        "return [...document.querySelectorAll('.process[data-slow]')].map((one) => [one.dataset.name, one.ariaLabel])"
    )
    ((name, label),) = page.script(slow)
    assert name == "worker 2/0" and "slow" in label
    assert row(page, "worker 0/1", "dead") == ["worker 0/1", "node1 · unit 1", "dead", "52", *["–"] * 5, "Log"]
    page.picture("map")
    at(page, 120.0)
    page.click("[data-name='worker 0/0']")
    step, speed, loss, waits, staleness, memory = row(page, "worker 0/0", state(page, "worker 0/0"))[3:9]
    assert (step, speed, memory) == ("120", "103 samples/s", "240MB") and waits.endswith(" %")
    assert 0 < float(loss) < 1 < float(staleness) < 2
    assert page.script(HIDDEN, "details-slices")
    page.wait("return !document.getElementById('details-log').hidden")
    assert page.text("#details-log-text") == f"epoch 1\n{UNSAFE}"
    page.click("[data-name='server 0/1']")
    assert "layers.3.weight" in page.text("#details-slice-rows")
    page.wait("return document.getElementById('details-log').hidden")
    page.picture("server")
    page.press(ESCAPE)
    assert page.script(HIDDEN, "details")


def test_events_and_the_slider_go_to_their_moment(page: Browser) -> None:
    assert page.script(COUNT, ".event") == 9
    page.click(".event[data-kind='incident']")
    assert page.text("#moment-time").startswith("0:48") and page.text("#details-title") == "worker 0/1"
    assert page.script(COUNT, ".event[aria-current=true]") == 1
    assert UNSAFE in page.text(".event[data-kind='incident'] .text")
    assert page.script(COUNT, "#event-list img, #event-list b") == 0
    page.picture("event")
    page.script("document.getElementById('moment-slider').focus()")
    page.press(HOME)
    assert page.text("#moment-time").startswith("0:00") and state(page, "worker 0/0") == "starting"
    page.press(*[RIGHT] * 20)
    assert state(page, "worker 0/0") != "starting"
    spoken = page.script("return document.getElementById('moment-slider').getAttribute('aria-valuetext')")
    assert spoken.endswith(" / 4:00") and spoken > "0:00"
    page.click("#moment-follow")
    assert page.text("#moment-time") == "4:00 / 4:00"


def test_everything_is_reached_by_keyboard(page: Browser) -> None:
    reached: dict[str, str] = {}
    for _ in range(45):
        page.press(TAB)
        name, outline = page.script(
            "const a = document.activeElement; const o = getComputedStyle(a);"
            "return [a.id || a.name || a.className || a.tagName, o.outlineStyle];"
        )
        reached[name] = outline
    reached.pop("BODY", None)  # between the last element and the first one
    assert {"skip", "theme", "process", "event", "modebar-btn", "log", "smooth", "moment-slider"} <= {*reached}
    assert "none" not in reached.values(), reached
    page.script("document.querySelector('.process').focus()")
    page.press(RIGHT, ENTER)
    assert page.text("#details-title") == "worker 1/0"
    page.press(DOWN, DOWN)
    assert page.script("return document.activeElement.dataset.role") == "server"
    page.script("document.querySelector('#processes button').focus()")
    page.press(DOWN, UP, ENTER)
    assert page.text("#details-title") == "worker 0/0"


def test_contrast_in_both_themes(page: Browser) -> None:
    grounds = {"light": "rgb(244, 245, 246)", "dark": "rgb(16, 19, 22)"}
    theme = "const s = document.getElementById('theme'); s.value = arguments[0]; s.dispatchEvent(new Event('change'));"
    for scheme, other in (("light", "dark"), ("dark", "light")):
        page.prefer(color_scheme=scheme, reduced_motion="reduce")
        assert page.script(GROUND) == grounds[scheme]
        for seconds in (50.0, 62.0, 240.0):
            at(page, seconds)
            assert page.script(CONTRAST) == []
        page.click("[data-name='worker 0/0']")
        assert page.script(CONTRAST) == []
        page.press(ESCAPE)
        page.script(theme, other)
        assert page.script(GROUND) == grounds[other]
        page.script(theme, "auto")


def test_a_narrow_window_scrolls_in_one_direction_only(page: Browser) -> None:
    page.resize(360, 740)
    page.frames(0.3)
    assert page.script(TOO_WIDE) == 0
    at(page, 120.0)
    page.script("document.querySelector('.process').click()")
    assert page.script(TOO_WIDE) == 0
    page.picture("narrow-map")
    buttons, names = (page.script(EDGES, place) for place in (".modebar", ".legendtext"))
    assert buttons["bottom"] <= names["top"], "a legend of many rows lies below the buttons of the charts"


def test_all_metrics_have_rows_over_time_and_over_steps(page: Browser) -> None:
    page.resize(1400, 2600)
    rows = ["Loss", "Samples per second", "Staleness in versions", "Share of time spent waiting", "Bytes per second"]
    rows += ["Memory in bytes", "Updates per second of servers"]
    assert page.script(TITLES)[:7] == rows
    texts = page.script("return [...document.querySelectorAll('.annotation text')].map((one) => one.textContent)")
    assert set(texts[7:]) == {"accuracy", UNSAFE}, "text of a script is no markup"
    names = [one["name"] for one in traces(page, "Staleness in versions")]
    assert names[:3] == ["worker 0/0 mean", "worker 0/0 p95", "worker 0/0 max"] and names[-1] == "bound"
    dashes = [one["line"]["dash"] for one in traces(page, "Loss")]
    assert len(dashes) == len(set(dashes)) == 3, "lines differ without color"
    assert line(page, "Loss", "group 0")[-2][0] == 240.0
    page.picture("charts")
    page.click("[name=axis][value=steps]")
    assert line(page, "Samples per second", "worker 0/0")[0][0] == 2
    assert line(page, "Updates per second of servers", "server 0/0")[-2][0] == 240
    page.script("document.querySelector('[name=log]').focus()")
    page.press(SPACE)
    page.wait(f"return {PLOT}.layout.yaxis2.type === 'log'")
    assert page.script(f"return {PLOT}.layout.yaxis5.type") == "linear", "a value of 0 has no logarithm"
    page.picture("charts-logarithmic")


def test_zoom_holds_for_all_rows_and_a_click_goes_to_the_moment(page: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page.resize(1400, 2600)
    whole, rows = page.script(RANGE), page.driver.find_elements("css selector", ".nsewdrag")
    assert len(rows) == 10
    drag = ActionChains(page.driver).move_to_element_with_offset(rows[2], -100, 0).click_and_hold()
    drag.move_by_offset(100, 0).release().perform()
    low, high = page.wait(f"const range = {PLOT}.layout.xaxis.range; return range[0] > arguments[0] && range", 50)
    assert whole[0] < low < high < whole[1]
    middle = "const { left, width } = document.querySelectorAll('.nsewdrag')[1].getBoundingClientRect();"
    at(page, (low + high) / 2)
    moment = page.script("return document.getElementById('chart-moment').getBoundingClientRect().left")
    assert moment == pytest.approx(page.script(f"{middle} return left + width / 2"), abs=3)
    at(page, 1.0)
    assert page.script(HIDDEN, "chart-moment")
    page.click("[name=log]")
    page.wait(f"return {PLOT}.layout.yaxis2.type === 'log'")
    assert page.script(RANGE) == [low, high], "drawing anew keeps what is zoomed"
    begins = f"return {PLOT}.layout.xaxis.range[0] === arguments[0]"
    for button, key, found in (("Reset axes", ENTER, True), ("Zoom in", SPACE, False), ("Reset axes", ENTER, True)):
        page.script("document.querySelector(`[aria-label='${arguments[0]}']`).focus()", button)
        page.press(key)
        page.wait(f"{begins} === arguments[1]", whole[0], found)
    pointer = ActionChains(page.driver).move_to_element(rows[2])
    pointer.perform()
    page.wait("return document.querySelector('.spikeline')?.getBoundingClientRect().height > 1000")
    assert "worker 0/0" in page.text(".hoverlayer") and "server" not in page.text(".hoverlayer")
    pointer.click().perform()
    page.wait("return document.getElementById('moment-time').textContent.startsWith('2:0')")


# ---- other jobs ------------------------------------------------------------------------------------------------------

STATES = ("computes", "waits", "applies", "starting", "restarts", "stopped", "dead", "away", "finished")
PLACE = """
const box = document.querySelector(`[data-name='${arguments[0]}'] > .shape`).getBoundingClientRect();
return [box.x + box.width / 2, box.y + box.height / 2];
"""
AROUND = 8  # pixels from the middle of a shape to the edge of its picture


def test_states_have_shapes_that_differ_without_color(browser: Browser, tmp_path: Path) -> None:
    job = PreparedJob(groups=len(STATES), servers=1, slow=-1, running=True).view()
    workers = [f"worker {group}/0" for group in range(len(STATES))]
    job["states"] |= {who: [[0.0, state]] for who, state in zip(workers, STATES, strict=True)}
    browser.open(page_file(tmp_path, job))
    word = "return document.querySelector(`[data-name='${arguments[0]}'] .state-name`).textContent"
    assert len({browser.script(word, who) for who in workers} - {""}) == len(STATES)
    browser.see_as("achromatopsia")
    try:
        for scheme in ("light", "dark"):
            browser.prefer(color_scheme=scheme, reduced_motion="reduce")
            browser.frames(0.1)
            browser.picture(f"without-color-{scheme}")
            with Image.open(io.BytesIO(browser.seen())) as seen:
                grey = seen.convert("L")
            shapes = [outline(grey, *browser.script(PLACE, who)) for who in workers]
            for (one, first), (other, second) in combinations(zip(STATES, shapes, strict=True), 2):
                differing = sum(a != b for a, b in zip(first, second, strict=True))
                assert differing >= len(first) / 16, f"{one} and {other} look alike: {differing} pixels differ"
    finally:
        browser.see_as("none")


def outline(grey: Image.Image, x: float, y: float) -> list[bool]:
    """Which pixels around a place stand out from the ground."""
    part = grey.crop((int(x) - AROUND, int(y) - AROUND, int(x) + AROUND, int(y) + AROUND))
    values = list(part.tobytes())
    ground = sorted((*values[:16], *values[-16:]))[16]
    return [abs(value - ground) > 48 for value in values]


def test_two_hundred_processes_and_in_the_soak_twenty_frames_a_second(browser: Browser, tmp_path: Path) -> None:
    job = PreparedJob(groups=40, workers=4, servers=40, hosts=10, seconds=600.0, points=40, slow=-1)
    browser.open(page_file(tmp_path, job.view()))
    assert browser.script(COUNT, ".process") == 200
    found = traces(browser, "Samples per second")
    assert len(found) == 6 and not any(one["showlegend"] for one in found), "lines of a color are one trace"
    names = {text for one in found for text in one["text"]}
    assert names == {"", *(f"worker {group}/{index}" for group in range(40) for index in range(4))}
    assert all(None in one["y"] for one in found), "nothing lies between two lines"
    if not SOAK:  # a time limit, which a busy machine exceeds
        return
    browser.script(
        "const s = document.getElementById('moment-slider'); let t = 100;"
        "const move = () => { s.value = t += 0.4; s.dispatchEvent(new Event('input')); requestAnimationFrame(move); };"
        "move();"
    )
    browser.frames(1.0)  # the first ones compile the script
    frames = browser.frames(2.0)
    browser.picture("two-hundred")
    print(f"200 processes, the slider moves in each frame: {frames}")
    # The rate itself depends on what else the machine does; the processor time of a frame hardly does.
    assert frames.busy_ms <= 1000 / 20


def test_curves_break_while_a_process_is_not_there_and_smooth_ones_too(browser: Browser, tmp_path: Path) -> None:
    view = PreparedJob(groups=4, workers=2, servers=1, slow=-1).view()
    for group, away in enumerate(("dead", "away", "restarts")):
        back = [] if away == "restarts" else [[120.0, "restarts"]]
        changes = [[0.0, "computes"], [96.0, away], *back, [121.0, "computes"]]
        view["states"] |= {f"worker {group}/{index}": changes for index in range(2)}
    view["states"]["worker 3/1"] = [[0.0, "computes"], [96.0, "dead"], [96.1, "restarts"], [96.3, "computes"]]
    for series in view["series"]:
        if re.match("(group|worker) [012]", series["of"]):
            series["points"] = [point for point in series["points"] if not 96 < point[0] <= 120]
    browser.resize(1400, 2600)
    browser.open(page_file(tmp_path, view))
    seen = []
    for second in (95.9, 96.5, 97.5, 98.5):
        at(browser, second)
        seen.append(state(browser, "worker 3/1"))
    assert seen == ["computes", "dead", "dead", "computes"], "a death is seen though the process is back at once"
    for group in range(3):
        worker = f"worker {group}/0"
        for title, name in (("Samples per second", worker), ("Loss", f"group {group}"), ("accuracy", worker)):
            points = line(browser, title, name)
            gaps = [place for place, (_, value) in enumerate(points[:-1]) if value is None]
            assert len(gaps) == 1 and points[gaps[0] - 1][0] == 96.0 and points[gaps[0] + 1][0] > 120.0
    living = [value for _, value in line(browser, "Loss", "group 3")[:-1]]
    assert None not in living, "a group goes on with the workers that live"
    plain = line(browser, "Loss", "group 0")
    choose(browser, "[name=smooth]", 0.9)
    browser.wait("return document.getElementById('smooth-value').textContent === '0.9'")
    faint, _, _, _, smooth, *_ = traces(browser, "Loss")
    assert faint["opacity"] == 0.25 and faint["y"] == [value for _, value in plain]
    last, count = 0.0, 0
    for (_, value), found in zip(plain, smooth["y"], strict=True):
        if value is None:
            assert found is None
            continue
        last, count = last * 0.9 + value * 0.1, count + 1
        assert found == pytest.approx(last / (1 - 0.9**count)), "smoothing is that of TensorBoard"
    assert smooth["showlegend"]


def test_runs_side_by_side_with_one_hidden(browser: Browser, tmp_path: Path) -> None:
    jobs = {"a/one": PreparedJob(), "b": PreparedJob(groups=2, framework="Hogwild"), f"c {UNSAFE}": PreparedJob()}
    views = {name: job.view() for name, job in jobs.items()}
    runs = compared({name: run_figures(view) for name, view in views.items()})
    browser.resize(1400, 2600)
    browser.open(page_file(tmp_path, views["a/one"], runs))
    cells = "return [...document.querySelectorAll('#run-rows tr')[1].children].map((one) => one.textContent)"
    assert browser.script(cells)[1:] == ["b", "ended", "Hogwild", "2", "2", "2", "240", "0.1004", "240", "4:00"]
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


def test_a_lost_job_on_a_page_without_the_library(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "chart_library", lambda: None)
    view = PreparedJob(running=True).view()
    view["job"]["lost"] = True
    view["states"]["worker 0/0"].append([240.0, "dead"])
    browser.open(page_file(tmp_path, view, compared(dict.fromkeys("ab", run_figures(view)))))
    assert browser.text("#connection") == "lost: its launcher is gone" and state(browser, "worker 0/0") == "dead"
    assert browser.script("return document.querySelector('[data-figure=left]').parentElement.hidden")
    assert 'pip install "topotrain[watch]"' in browser.text("#chart-missing:not([hidden])")
    assert browser.script(HIDDEN, "chart-tools") and browser.script(HIDDEN, "chart-none")
    assert browser.script(COUNT, "#run-rows tr") == 2
    browser.click(".event[data-kind='incident']")
    assert browser.text("#moment-time").startswith("0:48")
    assert (tmp_path / "job.html").stat().st_size < 300_000


def test_a_live_page_after_a_refused_connection_shows_what_comes(browser: Browser, tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(closing(GrowingRecording(tmp_path / name, name, server_worker_separate=True)))
            for name in ("one", "two")
        )
        for run in (one, two):
            run.add(1.0, step("worker 0/0", 1), Logged("worker 0/0", 0.2, 2, {"lr": 0.5}), Started("server 0/0", 7))
        folders = (one.workspace, two.workspace)
        runs = {each: stack.enter_context(closing(RecordedWorkspace(each))) for each in folders}
        url = stack.enter_context(served_page(listen(), runs, turn_s=0.05))
        browser.refuse("*/api/view*")
        browser.driver.get(url)
        browser.wait("return document.body.dataset.connection === 'lost'")
        browser.refuse()
        browser.wait("return document.body.dataset.connection === 'live'")
        browser.wait("return document.getElementById('run-rows').textContent.includes('two')")
        assert all("ERR_BLOCKED" in problem for problem in browser.problems())
        browser.click("[data-name='server 0/0']")
        assert browser.script(HIDDEN, "details-slices")
        one.add(2.0, Slices("server 0/0", ("layers.0.weight",), (0,), (12,)))
        browser.wait("return document.getElementById('details-slice-rows').textContent.includes('layers.0.weight')")
        titles = f"{PLOT}.layout?.annotations.map((one) => one.text)"
        browser.wait(f"return {titles}?.includes('lr')")
        browser.click("#run-rows tr:nth-child(2) [type=radio]")
        browser.wait("return document.getElementById('job-name').textContent === 'two'")
        for run in (one, two):
            job = stack.enter_context(closing(GrowingRecording(run.workspace, "letters", STARTED + 60)))
            job.add(1.0, step("worker 0/0", 1))
        browser.wait("return document.getElementById('job-name').textContent === 'letters'")
        browser.wait(f"return {titles}.includes('Loss') && !{titles}.includes('lr')")
        browser.driver.get("about:blank")
