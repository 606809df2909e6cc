"""Functions of an interactive session that become the program of a job."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pexpect
import pytest
import torch
from wait_limit import ended_after

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.launch import fork_safety
from topotrain.tools.monitor.terminal import NOTEBOOK
from topotrain.tools.notebook import job_of

ROOT = Path(__file__).parents[2]
JOB = 'reduce: kSum cluster { nworkers_per_group: 2 server_worker_separate: true workspace: "w" }'

# What a user types first. There is no file with these lines, and `shift` exists only in this process.
BEGIN = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import topotrain as tt

torch.set_num_threads(2)
(torch.randn(600, 600) @ torch.randn(600, 600)).sum()  # torch has threads from here on
data = TensorDataset(torch.arange(48))
seen = []

class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(48))

def make(shift, epochs):
    def train():
        model = Cells()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        model, optimizer, loader = tt.prepare(model, optimizer, loader)
        seen.append(tt.rank())
        print("here", seen, flush=True)
        for _ in tt.epochs(epochs):
            for step, (numbers,) in enumerate(loader):
                die(step)
                optimizer.zero_grad()
                (-shift * model.cells[numbers].sum()).backward()
                optimizer.step()
        tt.report(total=lambda: float(model.cells.detach().sum()))
    return train

def die(step):
    pass
"""


def typed(text: str) -> str:
    """The text as one statement of an interactive session, which has no file."""
    return f"exec({text!r}, globals())\n"


def left(folder: Path, but: int) -> list[str]:
    """The processes of a session that are left after some patience: its forks have its words, its units its folder."""
    until = time.monotonic() + 10
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if entry.name.isdecimal() and int(entry.name) != but and str(folder) in words and state != "Z":
                found.append(f"{entry.name} {words}")
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


FAILS = """
import linecache
# IPython keeps the lines of a cell where tracebacks look for those of files.
cell = "def die(step):\\n    if step == 2 and tt.rank() == 1:\\n        raise ValueError('a fault of the cell')\\n"
linecache.cache["<cell 7>"] = (len(cell), None, cell.splitlines(True), "<cell 7>")
exec(compile(cell, "<cell 7>", "exec"), globals())
try:
    tt.notebook_launch(make(1, 2), {"cluster": {"nworkers_per_group": 2, "workspace": "v"}}, quiet=True)
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
"""
WAITS_AND_DIES = f"""
import time
from topotrain.tools.monitor import progress_display
progress_display.FIRST_S = 1.0
def die(step):
    while step == 0 and tt.rank() == 0 and not os.path.exists("released"):
        time.sleep(0.05)
    if step == 3 and tt.rank() == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
report = tt.notebook_launch(make(2, 3), {JOB!r})
print("total", report["metrics"]["total"], report["program"], seen, len(report["incidents"]), flush=True)
"""
ENDLESS = f"""
def die(step):
    pass
try:
    print("endless", flush=True)
    tt.notebook_launch(make(1, 10**6), {JOB!r})
except KeyboardInterrupt:
    print("interrupted", 6 * 7, flush=True)
"""


@pytest.mark.journey
def test_a_session_trains_functions_that_are_in_no_file(tmp_path: Path) -> None:
    """A job that fails, one that waits and is restarted, one that is interrupted, and one that is killed with it."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JPY_SESSION_NAME": "a.ipynb", "FORCE_COLOR": "1"}
    environ.pop("OMP_NUM_THREADS", None)
    said, endless = [], 0
    with (
        ended_after(300),
        open(tmp_path / "errors", "w") as errors,
        subprocess.Popen(
            [sys.executable, "-i", "-q", "-c", "", str(tmp_path)],
            cwd=tmp_path,
            env=environ,
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(map(typed, (BEGIN, FAILS, WAITS_AND_DIES, ENDLESS, ENDLESS))))
        process.stdin.flush()
        for line in process.stdout:
            said.append(line)
            if "waiting for the first step of worker 0/0" in line:
                (tmp_path / "released").touch()
            if line.startswith("endless"):
                endless += 1
            if line.startswith("interrupted"):
                assert left(tmp_path, process.pid) == []
            if line.startswith("here") and endless == 1:
                # As the terminal, or a notebook's server, sends it: to the whole group.
                os.killpg(process.pid, signal.SIGINT)
            if line.startswith("here") and endless == 2:
                process.kill()
                break
        process.wait(30)
        assert left(tmp_path, process.pid) == []
    text = "".join(said)
    assert "JobFailed worker 0/1 (unit 1) failed: ValueError: a fault of the cell" in text, text
    assert 'File "<cell 7>", line 3, in die' in text and "raise ValueError('a fault of the cell')" in text
    assert "topotrain: waiting for the first step of worker 0/0" in text and "\x1b" not in text
    # Each of 48 samples has counted three times, also while a worker was away. The session itself has trained nothing.
    assert "total 288.0 make.<locals>.train() [] 1\n" in said, text
    assert "here [0]\n" in said and "training again" in text and "done 100 %  ETA 0:00" in text
    assert "interrupted 42\n" in said


@pytest.mark.journey
def test_on_a_terminal_there_is_a_table_although_the_workers_are_forks(tmp_path: Path) -> None:
    program = tmp_path / "terminal.py"
    program.write_text(f"{BEGIN}\nprint('total', tt.notebook_launch(make(2, 3), {JOB!r})['metrics']['total'])\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "OMP_NUM_THREADS", *NOTEBOOK)}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    shown = pexpect.spawn(sys.executable, [str(program)], cwd=str(tmp_path), env=environ, encoding="utf-8", timeout=300)
    shown.expect_exact("elapsed 0:")
    shown.expect_exact("total 288.0")
    shown.expect_exact(pexpect.EOF)
    shown.close()
    assert shown.exitstatus == 0
    assert left(tmp_path, 0) == []


def test_what_a_job_may_be(tmp_path: Path) -> None:
    cluster = tt.Cluster(nworkers_per_group=2)
    text = 'name: "a" cluster { nworkers_per_group: 2 }'
    (tmp_path / "a.conf").write_text(text)
    wanted = tt.Job(name="a", cluster=cluster)
    data = {"name": "a", "cluster": {"nworkers_per_group": 2}}
    for given in (wanted, text, data, tmp_path / "a.conf", str(tmp_path / "a.conf")):
        assert job_of(given) == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nothing.conf", ["nothing.conf", "cannot be read"]),
        ("nothing", ["nothing", ".conf"]),
        ("cluster { nworkers_per_grup: 2 }", ["nworkers_per_grup"]),
        ({"cluster": {"nworkers_per_grup": 2}}, ["nworkers_per_grup"]),
        (7, ["job", "int", "a dict"]),
    ],
)
def test_what_a_job_may_not_be(given: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        tt.notebook_launch(print, given)  # type: ignore[arg-type]
    assert [word for word in words if word not in str(refused.value)] == []
    with pytest.raises(ConfigError, match="must be a function without arguments, and not its result"):
        tt.notebook_launch(None, "cluster {}")  # type: ignore[arg-type]


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        tt.notebook_launch(lambda: None, tt.Job(cluster=tt.Cluster(workspace=str(folder / "w"))))
    assert not (folder / "w").exists()
    return str(refused.value)


def test_threads_of_the_user_are_named(tmp_path: Path) -> None:
    held = threading.Event()
    thread = threading.Thread(target=held.wait, name="downloads")
    thread.start()
    try:
        text = refusal(tmp_path)
    finally:
        held.set()
        thread.join()
    # Servers of an earlier test may be at their end, and are named before it.
    assert text.startswith("tt.notebook_launch = ") and "'downloads'" in text and "(threading.wait)" in text
    assert "would stay locked in the workers: end it first" in text


def test_only_the_main_thread_may_launch() -> None:
    found = []

    def launch() -> None:
        try:
            fork_safety.check("tt.notebook_launch")
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=launch, name="other")
    thread.start()
    thread.join()
    assert "'other': must be called on the main thread" in found[0]


def test_what_has_used_a_gpu_cannot_be_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        text = refusal(tmp_path)
    assert "CUDA has been used in this process" in text and "restart the kernel" in text
    monkeypatch.setattr(fork_safety, "_foreign_threads", lambda: iter(()))
    monkeypatch.setattr(fork_safety, "_native_threads", lambda: ["pt_autograd_0"])
    with pytest.raises(ConfigError, match="gradients of GPUs"):
        fork_safety.check("here")


@pytest.mark.parametrize(
    ("native", "asked", "environ", "expected"),
    [
        ("python", 0, {}, 1),
        ("python", 1, {"OMP_NUM_THREADS": "4"}, 1),
        ("python", 0, {"OMP_NUM_THREADS": "1"}, 1),
        ("python", 0, {"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS = '4': must be 1 here, or not set"),
        ("python", 3, {}, "threads = 3: must be 1 here, or not set"),
        ("ZMQbg/IO/0", 0, {"OMP_NUM_THREADS": "4"}, 0),
        ("ZMQbg/IO/0", 3, {}, 3),
    ],
)
def test_forks_of_a_process_with_threads_for_arithmetic_have_one(
    native: str, asked: int, environ: dict[str, str], expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_safety, "_native_threads", lambda: [native])
    if isinstance(expected, int):
        assert fork_safety.threads_of_forks(asked, environ) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        fork_safety.threads_of_forks(asked, environ)
