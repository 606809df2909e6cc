"""docs/tutorial.md, typed from the first command to the last one in one folder; with fewer epochs.

The reader's two terminals are two shells. `kill` gets the number that the table shows.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from process_pool import shell_environ
from wait_limit import ended_after

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FEWER = {"--epochs 3": "--epochs 1", "--epochs 300": "--epochs 30", "--epochs 5": "--epochs 2"}

pytestmark = pytest.mark.journey


def typed() -> list[str]:
    """The commands, in their order."""
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)).splitlines()
    for many, few in FEWER.items():
        commands = [re.sub(rf"{many}$", few, command) for command in commands if command]
    return commands


class Terminal:
    """A shell in which each command runs where the ones before have led to."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder, self.environ = folder, environ

    @contextmanager
    def start(self, command: str) -> "Iterator[subprocess.Popen[str]]":
        words = ["sh", "-c", command if command.startswith("kill") else f"exec {command}"]
        pipe, to = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen(words, cwd=self.folder, env=self.environ, stdout=pipe, stderr=to, text=True) as process:
            try:
                yield process
            finally:
                process.terminate()  # where a check has failed

    def run(self, command: str, code: int = 0) -> str:
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
            return ""
        with ended_after(300), self.start(command) as process:
            said, _ = process.communicate()
        assert process.returncode == code, f"{command}\n{said}"
        return said

    def wait_for(self, process: "subprocess.Popen[str]", words: str) -> None:
        """Read what a command says up to these words."""
        assert process.stdout is not None
        with ended_after(300):
            assert any(words in line for line in process.stdout), words


@pytest.fixture
def terminal(tmp_path: Path, warm_at: str, served_at: str) -> Terminal:
    tools = tmp_path / "bin"
    tools.mkdir()
    return Terminal(tmp_path, shell_environ(tools, warm_at, served_at))


def test_the_tutorial_from_the_first_command_to_the_last(terminal: Terminal) -> None:
    commands = iter(typed())
    for command in commands:
        if "--watch" in command:
            break
        said = terminal.run(command)
        assert "topotrain check" not in command or "equal: 30 steps" in said
    with terminal.start(command) as job:
        terminal.wait_for(job, "the page is at http://127.0.0.1:")
        terminal.wait_for(job, "2 training")
        view = next(commands)
        name, *columns = next(line.split() for line in terminal.run(view).splitlines() if line.startswith("worker"))
        assert (name, columns[1]) == ("worker", "pid")
        table = [line.split() for line in terminal.run(view).splitlines()]
        (pid,) = {row[2] for row in table if row[:1] == ["0/1"] and len(row) > len(columns) - 1}
        terminal.run(next(commands).replace("PID", pid))
        terminal.wait_for(job, f"worker 0/1 (pid {pid}) was killed by SIGKILL; the whole job starts again")
        terminal.wait_for(job, "training again")
        terminal.run(next(commands))
        terminal.wait_for(job, "`topotrain run --resume workspace/allreduce` goes on from there")
        with ended_after(300):
            job.communicate()
        assert job.returncode == 143
    assert "accuracy" in terminal.run(next(commands))
    assert (terminal.folder / "workspace" / "allreduce" / "final.safetensors").exists()
    last = [terminal.run(command) for command in commands]
    assert "AllReduce" in last[-1] and "Downpour" in last[-1]
