"""Figures of the pages are those of the record of measurements, benchmarks/results.

`cited_figures` has a file for each page with such figures. A line is: table | row | mode | words of the page, with the
figure in braces.
"""

import re
from pathlib import Path

import pytest

from benchmarks.record import RESULTS, figure, load

ROOT = Path(__file__).parents[2]
TABLES = {name: table for path in RESULTS.glob("*.json") for name, table in load(path).items()}
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md")))
CITED = {path.stem: path for path in Path(__file__).with_name("cited_figures").glob("*.txt")}


def test_rows_of_the_page_of_results_are_those_of_the_record() -> None:
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    sections = [section for section in text.split("\n## ") if ", commit `" in section]
    assert len(sections) == 8 and len(text.partition("<!--")[0].split()) <= 2000
    for section in sections:
        (table,) = [one for one in TABLES.values() if f"`{one.command}`, commit `{one.commit}`" in section]
        assert f": {table.machine}." in text
        known = {f"| {row.what} | {row.mode or '–'} | {figure(row)} |" for row in table.rows}
        rows = section.splitlines()[section.splitlines().index("| --- | --- | --- |") + 1 :]
        assert 1 <= len(rows := [row for row in rows if row.startswith("|")]) <= 6 and set(rows) <= known


def test_each_list_of_figures_is_that_of_a_page() -> None:
    assert CITED.keys() <= {page.stem for page in PAGES}
    assert {"README", "RESULTS", "modes"} <= CITED.keys()


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in CITED], ids=lambda page: page.stem)
def test_figures_that_a_page_cites_stand_in_it_and_in_the_record(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for line in CITED[page.stem].read_text(encoding="utf-8").splitlines():
        name, what, mode, words = line.split(" | ", 3)
        shown = re.sub(r".*\{(.*)\}.*", r"\1", words)
        assert words.replace("{", "").replace("}", "") in text, f"{page.name} has no {words}"
        rows = [row.figure for row in TABLES[name].rows if (row.what, row.mode or "–") == (what, mode)]
        digits = len(shown.partition(".")[2])
        found = [f"{row:,.{digits}f}" for row in rows if row is not None]
        assert shown in found, f"{page.name}: {words}, and {name} has {found}"
