"""The files of the page, and the library that draws its charts.

The modules of the script are one file for the browser: they share one scope, in which each name is there once.
"""

import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

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
