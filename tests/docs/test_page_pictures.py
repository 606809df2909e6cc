"""The pictures of the page in the repository are shown and small."""

import re
from pathlib import Path

import page_pictures

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_each_picture_is_there_small_and_shown() -> None:
    assert len(page_pictures.NAMES) <= 5
    shown = {name for page in PAGES for name in re.findall(r"pictures/(page-[\w-]+)\.png\)", page.read_text("utf-8"))}
    there = {path.stem for path in page_pictures.PICTURES.glob("page-*.png")}
    assert shown == there == set(page_pictures.NAMES)
    for name in page_pictures.NAMES:
        path = page_pictures.PICTURES / f"{name}.png"
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size <= page_pictures.LIMIT_BYTES
