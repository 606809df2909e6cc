"""The pictures of the page: those in the repository are shown and small, and one command makes all of them anew."""

import re
import subprocess
import sys
from pathlib import Path

import page_pictures
import pytest
from browser import why_none
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPT = Path(page_pictures.__file__)
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


def script(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.journey
def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path / "none"))
    assert done.returncode == 2 and "must be a folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.journey
@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_one_command_makes_all_pictures(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in tmp_path.iterdir()} == set(page_pictures.NAMES)
    for name in page_pictures.NAMES:
        with Image.open(tmp_path / f"{name}.png") as made, Image.open(page_pictures.PICTURES / f"{name}.png") as known:
            assert made.size == known.size == (page_pictures.WIDTH, page_pictures.HEIGHT)
            # Light or dark, as the picture that the pages show.
            assert abs(brightness(made) - brightness(known)) < 40, name


def brightness(picture: Image.Image) -> float:
    """Of a picture on the whole, from 0 to 255."""
    values = picture.convert("L").resize((16, 16)).tobytes()
    return sum(values) / len(values)
