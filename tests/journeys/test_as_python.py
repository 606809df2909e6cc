"""What a script sees of its interpreter in a job of one worker, against plain Python: docs/python.md lists the rest."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from job_runner import PROGRAMS, JobRunner
from seeds import SOAK, soak_only

pytestmark = pytest.mark.journey

# With -O Python compiles torch anew where nothing is kept.
OPTIONS = ("-O" if SOAK else "-s", "-W", "error::ResourceWarning", "-Xmine=1")
# What the user has in the working folder is not for topotrain's own processes.
SHADOWS = ("queue.py", "secrets.py", "socket.py", "torch.py", "inspect.py")


def seen(folder: Path, command: list[str]) -> tuple[int, list[object], str]:
    environ = {**os.environ, "SHOWN_WORD": "a word"}
    pipes = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=folder, env=environ, input="three\nlines\nhere", **pipes)
    file = folder / "shown.json"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return done.returncode, found, done.stderr


def compare(runner: JobRunner, options: tuple[str, ...], *how: str) -> tuple[str, str]:
    """Run the script plain and in a job, and return what each has printed to stderr."""
    (runner.folder / "src").mkdir()
    shutil.copy(PROGRAMS / "interpreter.py", runner.folder / "src")
    for name in SHADOWS:
        (runner.folder / name).write_text("raise ImportError('a file of the user')\n")
    words = ["src/interpreter.py", "shown.json", *how]
    command = replace(runner, warm_at="").command("", "interpreter.py", *how)
    at = command.index("--forkserver")
    if options:  # the one that is there has others
        del command[at : at + 2]
        at -= 2
    conf = next(word for word in command if word.endswith(".conf"))
    # Not as a module: Python itself would put the working folder first.
    start = ["-c", "import sys; del sys.path[0]; from topotrain.__main__ import main; main()"]
    job = [sys.executable, *options, *start, *command[3 : command.index(conf) + 1], *words]
    code, there, said = seen(runner.folder, job)
    plain_code, plain, plain_said = seen(runner.folder, [sys.executable, *options, *words])
    assert there == plain, said
    assert (code == 0) is (plain_code == 0), said
    return said, plain_said


def test_a_script_sees_the_interpreter_and_stdin_of_python(runner: JobRunner) -> None:
    """A process that the script forks ends for itself, with the script's own exit code and functions."""
    said, _ = compare(runner, OPTIONS, "fork", "3")
    assert "worker 0/0" not in said.replace("topotrain: waiting", "")
    assert (runner.folder / "job" / "final.safetensors").exists()


@soak_only
def test_an_exception_that_is_not_caught_is_for_the_hook_of_the_script(runner: JobRunner) -> None:
    said, plain = compare(runner, (), "hook")
    assert plain == "hook: LookupError lost\n" and plain in said
    assert "topotrain: error: worker 0/0 (unit 0) failed: LookupError: lost" in said


@soak_only
def test_a_text_for_sys_exit_is_printed_and_an_error_of_the_job(runner: JobRunner) -> None:
    said, plain = compare(runner, (), "exit", "'bye'")
    assert plain == "bye\n" and plain in said
    assert "the program left with exit code 1" in said
