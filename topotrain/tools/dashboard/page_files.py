"""The files of the page, as the server hands them out.

Names come from the folder when it is read, and never from a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INDEX = "index.html"
LIBRARY = "<!-- library -->"
"""The place in the index of the library of the charts."""
_FOLDER = Path(__file__).parent / "page"
_KINDS: Mapping[str, str] = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    name: str
    text: str

    @property
    def media_type(self) -> str:
        """The value of its Content-Type, without the encoding, which is UTF-8."""
        return _KINDS[Path(self.name).suffix]


def page_files() -> dict[str, PageFile]:
    """Return all files of the page by name."""
    found = [path for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS]
    return {path.name: PageFile(path.name, path.read_text(encoding="utf-8")) for path in found}
