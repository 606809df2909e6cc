"""The picture of growth is made by one command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from topotrain.tools.prediction.flow.growth_curves import FRAMEWORKS, HOSTS, LINKS

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "pictures" / "growth.svg"


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "growth_picture.py"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def words_of(picture: Path) -> str:
    """The text of a picture, which must be one."""
    return " ".join("".join(each.itertext()) for each in ElementTree.parse(picture).iter() if each.tag.endswith("text"))


@pytest.mark.journey
def test_one_command_draws_it(tmp_path: Path) -> None:
    out = tmp_path / "growth.svg"
    ended = run(str(out), "--hosts", "1", "4", "--json")
    assert ended.returncode == 0, ended.stderr
    points = json.loads(ended.stdout)
    assert len(points) == len(FRAMEWORKS) * len(LINKS) * 2
    assert all(point["samples_per_s"] > 0 for point in points)
    text = words_of(out)
    assert all(name in text for name in (*FRAMEWORKS, *LINKS, "hosts"))


def test_the_picture_of_the_docs_has_all_lines_up_to_ten_thousand_hosts() -> None:
    assert HOSTS[-1] == 10_000
    assert all(name in words_of(PICTURE) for name in (*FRAMEWORKS, *LINKS))


@pytest.mark.journey
def test_errors_are_one_line(tmp_path: Path) -> None:
    for words, told in (
        ((str(tmp_path / "growth.png"),), "must end with .svg"),
        ((str(tmp_path / "growth.svg"), "--hosts", "0"), "must be whole numbers >= 1"),
        ((str(tmp_path / "growth.svg"), "--probe", str(tmp_path / "none.json")), "cannot be read as a probe"),
    ):
        ended = run(*words)
        assert ended.returncode == 2
        assert told in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr
