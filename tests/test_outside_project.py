"""A project outside the repository, with the built wheel in an environment of its own (scripts/outside_project.py)."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import outside_checks
import outside_project
import pytest
from outside_checks import CHECKS, Check, CheckFailed, NotRun, OutsideProject


def script(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, outside_project.__file__, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.journey
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed: pip install 'topotrain[dev]'")
def test_the_short_form_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = script("--short")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS ") == sum(check.short for check in CHECKS) >= 7
    assert not list(tmp_path.glob("topotrain-outside-*"))


@pytest.mark.journey
def test_bad_input_is_refused() -> None:
    for words, said in (
        (["--python", "python9"], "--python python9: must be a Python interpreter"),
        (["--short", "--python", "sh"], "--python: must not be given with --short"),
        (["--only", "nonsense"], "--only nonsense: must be part of one of: the wheel"),
    ):
        done = script(*words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutsideProject:
    (tmp_path / "project").mkdir()
    monkeypatch.setattr(outside_checks, "SETTLE_S", 0.2)
    return OutsideProject(tmp_path / "project", Path(sys.executable), tmp_path / "a.tar.gz", tmp_path / "a.whl", True)


def raises(error: Exception) -> str:
    raise error


def test_a_check_passes_fails_or_is_not_run_and_leaves_no_process(project: OutsideProject) -> None:
    def tried(function) -> tuple[str, str]:
        result, text = outside_project.try_one(Check("one", True, function), project)
        return result, text.strip()

    assert tried(lambda project: "fine") == ("PASS", "fine")
    assert tried(lambda project: raises(CheckFailed("seen: 1\nmust be 2"))) == ("FAIL", "seen: 1\nmust be 2")
    assert tried(lambda project: {}["samples"]) == ("FAIL", "KeyError: 'samples'")
    assert tried(lambda project: raises(NotRun("no network"))) == ("NOT RUN", "no network")
    failed = tried(lambda project: project.run("sh", "-c", "exit 3").stdout)
    assert failed == ("FAIL", "`sh -c exit 3` ended with code 3, must be 0:")
    left = []
    result, text = tried(lambda project: left.append(subprocess.Popen(["sleep", "1000"], cwd=project.folder)))
    assert (result, left[0].wait(20)) == ("FAIL", -9) and "left running: sleep 1000" in text
