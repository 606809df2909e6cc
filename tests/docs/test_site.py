"""The documentation site that `make docs` builds: no dead link, nothing from other hosts, search, every public name."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote, urlsplit

import pytest
from browser import chromium, why_none

import topotrain

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "docs" / "site"
BUILT = ROOT / "build" / "site"


def _is_built() -> bool:
    """Whether the site is there, and is not older than a page."""
    index = BUILT / "searchindex.js"  # each build writes it
    return index.exists() and index.stat().st_mtime > max(page.stat().st_mtime for page in ROOT.glob("docs/*.md"))


needs_site = pytest.mark.skipif(not _is_built(), reason="`make docs` builds the site")


@pytest.fixture(scope="module")
def site() -> Path:
    return BUILT


class Page(HTMLParser):
    """The names of a page's parts, the addresses that it links to, and those that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a":
            self.links.add(values.get("href", "#"))
        elif address := values.get("src", values.get("href")):
            self.loaded.add(address)


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    yield from ((path, Page(path)) for path in sorted(site.rglob("*.html")))


@needs_site
def test_every_page_of_the_repository_is_there(site: Path) -> None:
    expected = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    expected |= {path.stem for path in ROOT.glob("*.md")} | {"benchmarks/RESULTS", "index"}
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert expected <= built
    contents = Page(site / "docs" / "index.html").links
    there = {(site / "docs" / urlsplit(link).path).resolve() for link in contents}
    assert {(site / name).with_suffix(".html") for name in expected - {"index", "docs/index"}} <= there


@needs_site
def test_no_link_leads_nowhere(site: Path) -> None:
    read = dict(pages(site))
    seen = 0
    for path, page in read.items():
        for link in page.links | page.loaded:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(site)} links to {link}"
            if parts.fragment and target in read:
                assert unquote(parts.fragment) in read[target].ids, f"{path.relative_to(site)} links to {link}"
            seen += 1
    assert seen > 1000


@needs_site
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path, page in pages(site):
        for address in page.loaded:
            assert not urlsplit(address).netloc, f"{path.relative_to(site)} loads {address}"
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:@import\s+['\"]?|url\(['\"]?)(?:https?:)?//", path.read_text(encoding="utf-8")), path


@needs_site
def test_search_knows_pages_and_names(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for term in ("sandblast", "downpour", "The journey of one gradient", "clip_grad_norm_"):
        assert term in index
    assert any("searchtools" in address for address in Page(site / "search.html").loaded)


WORDS = {
    "save": "python",
    "early stopping": "python",
    "validation": "examples",
    "resume": "tutorial",
    "hang": "troubleshooting",
    "checkpoint": "tutorial",
    "clip": "python",
    "mixed precision": "exactness",
    "gradient accumulation": "examples",
    "worker killed": "tutorial",
    "slow network": "slow-links",
    "two machines": "hosts",
    "learning rate": "configuration",
    "out of memory": "splitting",
    "TensorBoard": "watching",
    "Slurm": "launchers",
    "GPU": "gpu",
    "DDP": "coming-from",
    "token": "security",
    "Downpour": "topologies",
}
"""What a reader types, and the page that must come first."""


@pytest.mark.journey
@needs_site
@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_the_search_leads_to_the_right_page(site: Path) -> None:
    found = {}
    with chromium() as browser:
        for word in WORDS:
            browser.driver.get(f"{(site / 'search.html').as_uri()}?q={quote(word)}")
            browser.wait("return document.querySelector('.search-summary')?.textContent")
            found[word] = browser.script("return document.querySelector('ul.search li > a').getAttribute('href')")
    assert {word: Path(urlsplit(address).path).stem for word, address in found.items()} == WORDS


@needs_site
def test_every_public_name_has_its_docstring(site: Path) -> None:
    page = site / "docs" / "site" / "api.html"
    text, ids = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")), Page(page).ids
    for name in topotrain.__all__:
        thing = getattr(topotrain, name)
        where = f"module-{thing.__name__}" if isinstance(thing, ModuleType) else f"topotrain.{name}"
        assert where in ids, name
    assert "ConfigError – " in text  # what a function raises
    assert "rows of ids of any shape: [..., embedding_dim]" in text  # shapes


@pytest.mark.journey
@needs_site
def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs" / "site").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text(
        "# A page\n\nIt leads to [another](gone.md) and [a part](index.md#gone).\n"
    )
    (line,) = re.findall(r"^\t\$\(BIN\)/python (-m sphinx .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name, value in {"docs/site": str(SETTINGS), "build/doctrees": str(tmp_path / "trees")}.items():
        line = line.replace(f" {name} ", f" {value} ")
    words = [str(tmp_path) if word == "." else word for word in line.replace("$(SITE)", str(tmp_path / "out")).split()]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "gone.md" in done.stderr and "#gone" in done.stderr.replace("'gone'", "#gone")


def test_names_and_pages_that_the_settings_do_not_name_come_last() -> None:
    settings = runpy.run_path(str(SETTINGS / "conf.py"))
    page = (SETTINGS / "api.rst").read_text(encoding="utf-8")
    without = page.replace(".. autofunction:: topotrain.keep\n", "").replace(".. autoclass:: topotrain.Cluster\n", "")
    assert settings["other_names"](page) == ""
    added = settings["other_names"](without)
    assert re.findall(r"^\.\. auto\w+:: .*", added, re.MULTILINE) == [
        ".. autoclass:: topotrain.Cluster",
        ".. autofunction:: topotrain.keep",
    ]
    contents = settings["contents"](["docs/index", "README", "docs/anew"])
    assert contents.index("/README") < contents.index(":caption: More") < contents.index("/docs/anew")
    assert "/docs/python" not in contents
