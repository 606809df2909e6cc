"""`topotrain init`: the files are a job that trains, and no file is overwritten."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from process_pool import client

from topotrain.config.job_file import load_with_warnings
from topotrain.config.topology import layout
from topotrain.tools.starter_job import CLUSTERS, JOB_NAME, SCRIPT_NAME

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """An empty folder."""
    monkeypatch.chdir(tmp_path)


def test_the_job_file_is_of_the_named_framework(ask, tmp_path):
    for name, framework in (
        ("sandblaster", "Sandblaster (synchronous)"),
        ("allreduce", "AllReduce (synchronous)"),
        ("downpour", "Downpour (asynchronous)"),
        ("hogwild", "Distributed Hogwild (asynchronous)"),
    ):
        assert name in CLUSTERS and len(CLUSTERS) == 4
        assert ask("init", name, "--framework", name)[0] == 0
        job, warnings = load_with_warnings(str(tmp_path / name / JOB_NAME))
        assert (layout(job.cluster).framework, job.program, warnings) == (framework, SCRIPT_NAME, [])
        assert ask("plan", f"{name}/{JOB_NAME}")[1].startswith(framework)


def test_an_unknown_framework_and_a_folder_that_is_a_file_are_refused(ask, tmp_path):
    (tmp_path / "taken").write_text("")
    for words, said in (
        (["--framework", "ring"], f"'ring': must be one of {', '.join(CLUSTERS)}"),
        (["taken"], "taken"),
    ):
        code, out, err = ask("init", *words)
        assert (code, out, "Traceback" in err) == (2, "", False) and said in err
    assert ask("init", "taken/below")[0] == 2
    assert os.listdir() == ["taken"]


def test_the_commands_to_give_next_and_no_file_is_overwritten(ask, tmp_path):
    code, out, _ = ask("init", "a b", "--json")
    made = json.loads(out)
    assert (code, made["files"]) == (0, [f"a b/{JOB_NAME}", f"a b/{SCRIPT_NAME}"])
    assert made["commands"][:2] == ["cd 'a b'", f"topotrain plan {JOB_NAME}"]
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    code, out, _ = ask("init")
    assert (code, "cd " in out) == (0, False) and f"topotrain run {JOB_NAME}" in out
    assert sorted(os.listdir()) == [JOB_NAME, SCRIPT_NAME]
    for name in os.listdir():
        os.unlink(name)
    for name in (JOB_NAME, SCRIPT_NAME):
        Path(name).write_text("mine")
        code, _, err = ask("init")
        assert code == 2 and name in err and "not overwritten" in err
        assert os.listdir() == [name] and Path(name).read_text() == "mine"
        Path(name).unlink()
    Path(SCRIPT_NAME).symlink_to(tmp_path / "gone.py")
    assert ask("init")[0] == 2
    assert os.listdir() == [SCRIPT_NAME]


@pytest.mark.journey
def test_the_job_trains(ask, tmp_path, served_at, warm_at):
    ask("init", "--framework", "downpour")
    words = ["-m", "topotrain", "run", "--forkserver", served_at, "--json", JOB_NAME, SCRIPT_NAME, "--epochs", "10"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*client(warm_at), *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["framework"] == "Downpour (asynchronous)"
    assert report["samples"] == 10 * 3000
    assert report["metrics"]["accuracy"] > 0.6  # a third by chance
