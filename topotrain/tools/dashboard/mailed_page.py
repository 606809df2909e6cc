"""The page of a recorded job as one file without a server, which can be mailed.

Style, scripts, the view and the ends of logs are written into the page. Its content policy names the style and the
script by their hashes, so nothing else runs, and the file loads nothing.

The page's scripts are ECMAScript modules, and a file cannot import others from a mail. So each module becomes a
function that returns its exports, after the modules that it imports. Only the forms that the page uses are understood.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing
from graphlib import TopologicalSorter
from hashlib import sha256
from pathlib import Path
from typing import Any

from topotrain.tools.dashboard.chart_library import chart_library
from topotrain.tools.dashboard.page_files import INDEX, LIBRARY, PageFile, page_files
from topotrain.tools.dashboard.page_json import embedded_json
from topotrain.tools.dashboard.process_logs import tails_of
from topotrain.tools.dashboard.run_comparison import compared
from topotrain.tools.dashboard.run_folders import named_runs, read_runs
from topotrain.tools.recording.recorded_workspace import RecordedWorkspace

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./([\w.-]+)";[ \t]*\n?', re.M)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const)\b)", re.M)
_EXPORTED = re.compile(r"^export (?:async function|function|class|const)\s*\*?\s*([\w$]+)", re.M)
_UNKNOWN = re.compile(r"^(?:import|export)\b.*|\bimport\(.*|\bimport\.meta\b.*", re.M)
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.-]+)"([^>]*)>')
_SCRIPT = re.compile(r'<script type="module" src="static/([\w.-]+)"></script>')
_LIVE = 'data-source="live"'
_FIRST_META = '<meta charset="utf-8">'
_END = "</body>"


class UnknownForm(Exception):
    """A file of the page has a form that cannot be written into one file."""


def view_of(workspace: Path) -> dict[str, Any]:
    """Return the view of a recorded job. Raises ConfigError."""
    with closing(RecordedWorkspace(workspace)) as recorded:
        return recorded.history.view()


def page_of(workspaces: Sequence[Path]) -> str:
    """Return the page of recorded jobs as one file.

    The map, the processes, the events and the logs are those of the first job. Raises ConfigError.
    """
    found = read_runs(workspaces, view_of)
    views = {name: found[workspace] for name, workspace in named_runs(list(found)).items()}
    workspace, view = next(iter(found.items()))
    return mailed_page(view, compared(views), tails_of(workspace, view))


def mailed_page(
    view: Mapping[str, Any], runs: Sequence[Mapping[str, Any]] = (), logs: Mapping[str, str] | None = None
) -> str:
    """Return the page of a view as one file, with the charts' library if installed.

    runs: beside each other, if there are several. logs: the last lines of each process, by its name.
    """
    files, library = page_files(), chart_library()
    text = files[INDEX].text
    styles, scripts = _STYLE.findall(text), _SCRIPT.findall(text)
    if len(styles) != 1 or len(scripts) != 1 or not all(mark in text for mark in (_LIVE, _FIRST_META, _END, LIBRARY)):
        raise UnknownForm(
            f"{INDEX}: must have one style sheet, one module, {_LIVE}, {_FIRST_META}, {LIBRARY} and {_END}"
        )
    ((sheet, attributes),) = styles
    style, script = files[sheet].text, one_script(files, scripts[0])
    charts = "" if library is None else library.text
    if "</style" in style.lower() or any("</script" in code.lower() or "<!--" in code for code in (script, charts)):
        raise UnknownForm("a style or a script of the page would end its own element")
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {_hash(charts)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"data-view": view, "data-runs": runs, "data-logs": logs or {}}
    data = "".join(
        f'<script type="application/json" id="{name}">{embedded_json(part)}</script>\n' for name, part in parts.items()
    )
    meta = f'{_FIRST_META}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for old, new in (
        (_LIVE, 'data-source="embedded"'),
        (_FIRST_META, meta),
        (f'<link rel="stylesheet" href="static/{sheet}"{attributes}>', f"<style{attributes}>{style}</style>"),
        (f'<script type="module" src="static/{scripts[0]}"></script>', f'<script type="module">{script}</script>'),
        # Replaced last: the text of the library might have the other marks in it.
        (LIBRARY, "" if library is None else f"{library.placeholders}<script>{charts}</script>"),
    ):
        text = text.replace(old, new, 1)
    # Last: the view may have any text in it, also that of a mark.
    head, _, tail = text.rpartition(_END)
    return f"{head}{data}{_END}{tail}"


def one_script(files: Mapping[str, PageFile], first: str) -> str:
    """Return a module and all that it imports as one script. Raises UnknownForm."""
    graph: dict[str, set[str]] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name in graph:
            continue
        if name not in files:
            raise UnknownForm(f"{name}: is imported, and is no file of the page")
        graph[name] = {other for _, other in _IMPORT.findall(files[name].text)}
        waiting += graph[name]
    return "\n".join(_wrapped(files[name]) for name in TopologicalSorter(graph).static_order())


def _wrapped(file: PageFile) -> str:
    """Return a module as a function that is called at once, and returns the exports."""
    exports = _EXPORTED.findall(file.text)
    body = _EXPORT.sub("", _IMPORT.sub(_taken, file.text))
    unknown = _UNKNOWN.search(body)
    if unknown is not None:
        raise UnknownForm(f"{file.name}: {unknown.group().strip()!r} cannot be written into one file")
    return f"const {_variable(file.name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _taken(found: "re.Match[str]") -> str:
    """Return the names of an import, taken out of the exports of the other module."""
    # A name that is imported as another one: `a as b` is `a: b` here.
    names = re.sub(r"\s+as\s+", ": ", found.group(1).strip())
    return f"const {{ {names} }} = {_variable(found.group(2))};\n"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
