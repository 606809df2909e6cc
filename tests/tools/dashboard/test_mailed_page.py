"""The page as one file: nothing in it runs but its own script, and it loads nothing."""

import json
import re
import shutil
from base64 import b64encode
from contextlib import closing
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from growing_recording import GrowingRecording, step, view_of

from topotrain.core.events import Notice
from topotrain.tools.cli import app
from topotrain.tools.dashboard import page_files as page_module
from topotrain.tools.dashboard.page_files import (
    ChartLibrary,
    chart_library,
    mailed_page,
    page_files,
    page_of,
)

EVIL = "</script></body><script>alert(1)</script><!-- &amp; \u2028"


class Elements(HTMLParser):
    """The elements of a page as a browser finds them: each with its attributes and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("", {}, ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for found, attributes, text in self.found if found == tag]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    with closing(GrowingRecording(tmp_path / "job", EVIL, nworkers_per_group=2)) as recording:
        recording.add(1.0, step("worker 0/0", 1), step("worker 0/1", 1), Notice("worker 0/0", EVIL))
        recording.add(2.0, step("worker 0/0", 2, float("inf")))
    return tmp_path / "job"


def test_the_file_has_the_view_and_loads_nothing_and_only_its_own_script_runs(workspace: Path) -> None:
    view = view_of(workspace)
    text = mailed_page(view, [{"name": EVIL}], {"worker 0/0": EVIL})
    page = Elements(text)
    ((policy, _),) = [meta for meta in page.all("meta") if meta[0].get("http-equiv") == "Content-Security-Policy"]
    content = policy["content"] or ""
    scripts = {attributes.get("id") or attributes.get("type"): code for attributes, code in page.all("script")}
    data = {"data-view", "data-runs", "data-logs"}
    assert set(scripts) == {None, "module", *data}, "what the view says is in no element of its own"
    ((_, style),) = page.all("style")
    module, library, style = (
        f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'"
        for code in (scripts["module"], scripts[None], style)
    )
    assert f"script-src {module} {library}; style-src {style};" in content
    assert "plotly.js v" in scripts[None][:200]
    assert content.startswith("default-src 'none';") and "unsafe" not in content and "'self'" not in content
    assert json.loads(scripts["data-view"]) == json.loads(json.dumps(view))
    assert json.loads(scripts["data-view"])["story"][0]["text"].endswith(EVIL)
    assert json.loads(scripts["data-runs"]) == [{"name": EVIL}]
    assert json.loads(scripts["data-logs"]) == {"worker 0/0": EVIL}
    assert text.index("Content-Security-Policy") < text.index("<style") < text.index("</body>")
    assert '<html lang="en" data-source="embedded">' in text
    library = chart_library()
    assert library is not None
    text = mailed_page({**view, "story": []}).replace(library.text, "")
    loaded = re.findall(r'\b(?:src|href)="([^"]*)"', text)
    assert all(address.startswith(("#", "data:")) for address in loaded) and "/static/" not in text


def test_the_script_of_the_page_has_all_its_modules_in_one_scope() -> None:
    script = page_files().script
    folder = Path(page_module.__file__).parent / "page"
    begins = [script.index(path.read_text("utf-8").splitlines()[0]) for path in sorted(folder.glob("*.js"))]
    assert max(begins) == script.index("// The page: data come in"), "main.js begins the page"
    assert not re.search(r"^(?:import|export)\b", script, re.M)
    names = re.findall(r"^(?:async )?(?:const|let|class|function)\*? ([\w$]+)", script, re.M)
    assert len(names) == len(set(names)) > 40


def test_a_library_with_the_end_of_its_element_in_it_stays_in_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = ChartLibrary("plotly-0.min.js", "const a = '</script><!-- <script>';")
    monkeypatch.setattr(page_module, "chart_library", lambda: evil)
    text = page_of([workspace])
    assert Elements(text).all("script")[0][1] == r"const a = '<\/script>\x3C!-- <script>';"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command_writes_the_file_with_the_last_lines_of_each_log(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    shutil.copytree(workspace, tmp_path / "sweep" / "two")
    (workspace / "logs").mkdir()
    (workspace / "logs" / "worker-0-1.log").write_text("".join(f"\x1b[31mline {n}\x1b[0m\n" for n in range(1000)))
    assert run("watch", str(workspace), str(tmp_path / "sweep"), "--html", str(file)) == 0
    scripts = {attributes.get("id"): text for attributes, text in Elements(file.read_text("utf-8")).all("script")}
    assert [each["name"] for each in json.loads(scripts["data-runs"])] == ["job", "sweep/two"]
    assert json.loads(scripts["data-logs"]) == {"worker 0/1": "\n".join(f"line {n}" for n in range(950, 1000))}
    assert run("watch", str(workspace), "--html", "/proc/x.html") == 2
    assert "--html /proc/x.html: cannot be written" in capsys.readouterr().err
