"""The files of the page, and the page of recorded jobs as one file, which can be mailed.

* The modules of the script are one file for the browser: they share one scope, in which each name is there once.
* In the mailed file, style, scripts, the view and the ends of logs are written into the page. Its content policy names
  the style and the scripts by their hashes, so nothing else runs, and the file loads nothing.
"""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from topotrain.config.topology import Address, Role
from topotrain.launch.agent.pipes import log_tail
from topotrain.launch.agent.workspace import LOGS, log_name
from topotrain.tools.dashboard.run_comparison import compared, named_runs, read_runs, run_figures

STYLE, SCRIPT = "style.css", "page.js"
LIBRARY = "<!-- library -->"
"""The place in the index of the library of the charts."""
LIVE, LONE, EMBEDDED = (f'data-source="{source}"' for source in ("live", "lone", "embedded"))
"""Where the page's data come from: a server of any runs, that of one run alone, or the file."""
_FOLDER = Path(__file__).parent / "page"
_FIRST = "main.js"  # begins the page when all other modules are there
_IMPORTS = re.compile(r"^import .*\n|^export ", re.MULTILINE)
# The library adds a style element for its maps, which the page's policy refuses, unless one with this ID is there.
_MAP_STYLE = re.compile(r'document\.getElementById\("([0-9a-f]{64})"\)')
_FIRST_META = '<meta charset="utf-8">'
_STYLE_NAMES = 'id="plotly.js-style-global" class="no-inline-styles"'
_STYLE_LINK = f'<link rel="stylesheet" href="static/{STYLE}" {_STYLE_NAMES}>'
_SCRIPT_LINK = f'<script type="module" src="static/{SCRIPT}"></script>'
_END = "</body>"
_LINES = 200
_MAILED_LINES = 50
"""A file has the logs of all processes."""
# Sequences that color a terminal or move its cursor, and then all control characters but ends of lines and tabs.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class ChartLibrary:
    """The script of the library. name: that of its file, with its version."""

    name: str
    text: str

    @property
    def placeholders(self) -> str:
        """Elements of the page with the IDs of style elements that the library would add."""
        return "".join(f'<meta id="{found}">' for found in dict.fromkeys(_MAP_STYLE.findall(self.text)))


@dataclass(frozen=True, slots=True)
class PageFiles:
    """The texts of the page. library: None where it is not installed."""

    index: str
    style: str
    script: str
    library: ChartLibrary | None


def page_files() -> PageFiles:
    index, style = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", STYLE))
    modules = sorted(_FOLDER.glob("*.js"), key=lambda path: (path.name == _FIRST, path.name))
    script = "\n".join(_IMPORTS.sub("", path.read_text(encoding="utf-8")) for path in modules)
    return PageFiles(index, style, script, chart_library())


def chart_library() -> ChartLibrary | None:
    """Return the library; None: it is not installed."""
    try:
        found = files("plotly").joinpath("package_data", "plotly.min.js")
        return ChartLibrary(f"plotly-{version('plotly')}.min.js", found.read_text(encoding="utf-8"))
    except (ModuleNotFoundError, FileNotFoundError):
        return None


def page_of(workspaces: Sequence[Path]) -> str:
    """Return the page of recorded jobs as one file.

    The map, the processes, the events and the logs are those of the first job. Raises ConfigError.
    """
    with ExitStack() as stack:
        views = {run: source.read().view() for run, source in read_runs(workspaces, stack).items()}
    workspace, view = next(iter(views.items()))
    figures = {run: run_figures(each) for run, each in views.items()}
    return mailed_page(view, compared(named_runs(figures)), tails_of(workspace, view))


def mailed_page(
    view: Mapping[str, Any], runs: Sequence[Mapping[str, Any]] = (), logs: Mapping[str, str] | None = None
) -> str:
    """Return the page of a view as one file, with the charts' library if installed.

    runs: beside each other, if there are several. logs: the last lines of each process, by its name.
    """
    page = page_files()
    script, charts = _in_element(page.script), "" if page.library is None else _in_element(page.library.text)
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {_hash(charts)}; style-src {_hash(page.style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = page.index
    for old, new in (
        (LIVE, EMBEDDED),
        (_FIRST_META, f'{_FIRST_META}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        (_STYLE_LINK, f"<style {_STYLE_NAMES}>{page.style}</style>"),
        (_SCRIPT_LINK, f'<script type="module">{script}</script>'),
        # Replaced last: the text of the library might have the other marks in it.
        (LIBRARY, "" if page.library is None else f"{page.library.placeholders}<script>{charts}</script>"),
    ):
        text = text.replace(old, new, 1)
    parts = {"data-view": view, "data-runs": runs, "data-logs": logs or {}}
    data = "".join(
        f'<script type="application/json" id="{name}">{embedded_json(part)}</script>\n' for name, part in parts.items()
    )
    # Last: the view may have any text in it, also that of a mark.
    head, _, tail = text.rpartition(_END)
    return f"{head}{data}{_END}{tail}"


def embedded_json(data: Any) -> str:
    """Return data as JSON that can stand inside any element of a page."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # No text of a log or a script can end the element, or begin another one.
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _in_element(script: str) -> str:
    """Return a script with texts that neither end its element nor begin a comment."""
    return script.replace("</script", "<\\/script").replace("<!--", "\\x3C!--")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def tails_of(workspace: Path, view: Mapping[str, Any]) -> dict[str, str]:
    """Return the last lines of each process of a view, by its name.

    Processes without any are left out.
    """
    tails = {process["name"]: tail_of(workspace, process, _MAILED_LINES) for process in view["processes"]}
    return {name: text for name, text in tails.items() if text}


def tail_of(workspace: Path, process: Mapping[str, Any], lines: int = _LINES) -> str | None:
    """Return the last lines of a process's log; None if this machine has none.

    process: an entry of the view's list of processes. Only its role and its numbers are used. lines: at most so many.
    """
    group, index, unit = (int(process[name]) for name in ("group", "index", "unit"))
    who = Address(Role.WORKER if process["role"] == "worker" else Role.SERVER, group, index)
    # That of a server which has moved to the unit comes first: the other one is older.
    names = dict.fromkeys(log_name(who, unit, moved) for moved in (True, False))
    there = [log for name in names if (log := workspace / LOGS / name).exists()]
    if not there:
        return None
    text = next((text for text in map(log_tail, there) if text), "")
    return "\n".join(plain(line) for line in text.splitlines()[-lines:])


def plain(text: str) -> str:
    """Return text without what is meant for a terminal."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))
