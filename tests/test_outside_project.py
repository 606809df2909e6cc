"""A project outside the repository, with the built wheel in an environment of its own (scripts/outside_project.py)."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import outside_environment
import outside_project
import pytest
from outside_checks import CHECKS, Check
from outside_environment import CheckFailed, NotRun, OutsideProject, Packages

SCRIPT = Path(outside_project.__file__)


def script(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.journey
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed: pip install 'topotrain[dev]'")
def test_the_short_form_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = script("--short", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["check"]: row["result"] for row in json.loads(done.stdout)}
    assert rows == {check.name: "PASS" for check in CHECKS if check.short}
    assert len(rows) >= 7
    assert not list(tmp_path.glob("topotrain-outside-*"))


@pytest.mark.journey
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--python", "python9"], "--python python9: must be a Python interpreter"),
        (["--short", "--python", "sh"], "--python: must not be given with --short"),
        (["--only", "nonsense"], "--only nonsense: must be part of one of: the wheel"),
    ],
)
def test_bad_input_is_refused(words: list[str], said: str) -> None:
    done = script(*words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def project(tmp_path: Path) -> OutsideProject:
    (tmp_path / "project").mkdir()
    packages = Packages(tmp_path / "a.tar.gz", tmp_path / "a.whl")
    return OutsideProject(tmp_path / "project", Path(sys.executable), packages, True)


def failing(project: OutsideProject) -> str:
    raise CheckFailed("seen: 1\nmust be 2")


def missing(project: OutsideProject) -> str:
    raise NotRun("no network")


def broken(project: OutsideProject) -> str:
    return str({}["samples"])


@pytest.mark.parametrize(
    ("function", "result", "text"),
    [
        (lambda project: "fine", "PASS", "fine"),
        (failing, "FAIL", "seen: 1\nmust be 2"),
        (broken, "FAIL", "KeyError: 'samples'"),
        (missing, "NOT RUN", "no network"),
        (
            lambda project: project.run("sh", "-c", "exit 3").stdout,
            "FAIL",
            "`sh -c exit 3` ended with code 3, must be 0:",
        ),
    ],
)
def test_a_check_passes_fails_or_is_not_run(project: OutsideProject, function, result: str, text: str) -> None:
    row = outside_project.try_one(Check("one", True, function), project)
    assert (row.result, row.text.strip()) == (result, text)
    shown = outside_project.table([row])
    assert shown.split("\n")[0].startswith(f"one  {result}")
    assert (text in shown.partition("\n\n")[2]) is (result == "FAIL")


def test_a_process_that_a_check_leaves_behind_is_ended_and_named(
    project: OutsideProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_environment, "SETTLE_S", 0.2)
    left = []

    def leaves(project: OutsideProject) -> str:
        left.append(subprocess.Popen(["sleep", "1000"], cwd=project.folder))
        return "fine"

    row = outside_project.try_one(Check("one", True, leaves), project)
    assert row.result == "FAIL"
    assert "left running: sleep 1000" in row.text
    assert left[0].wait(20) == -9


def test_a_command_does_not_see_what_is_set_for_the_repository(
    project: OutsideProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("TOPOTRAIN_FORKSERVER", "there")
    seen = project.environ()
    assert not {"PYTHONPATH", "TOPOTRAIN_FORKSERVER"} & seen.keys()
    assert seen["PATH"].startswith(str(Path(sys.executable).parent))
