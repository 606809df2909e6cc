"""The library that draws the page's charts, a file of the package plotly."""

import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files

# The library adds a style element for its maps, which the page's policy refuses, unless one with this ID is there.
_MAP_STYLE = re.compile(r'document\.getElementById\("([0-9a-f]{64})"\)')


@dataclass(frozen=True, slots=True)
class ChartLibrary:
    """The script of the library. name: that of the page's file, with its version."""

    name: str
    text: str

    @property
    def placeholders(self) -> str:
        """Elements of the page with the IDs of style elements that the library would add."""
        return "".join(f'<meta id="{found}">' for found in dict.fromkeys(_MAP_STYLE.findall(self.text)))


def chart_library() -> ChartLibrary | None:
    """Return the library; None: it is not installed."""
    try:
        found = files("plotly").joinpath("package_data", "plotly.min.js")
        return ChartLibrary(f"plotly-{version('plotly')}.min.js", found.read_text(encoding="utf-8"))
    except (ModuleNotFoundError, FileNotFoundError):
        return None
