"""What the launch tests call in place of the process host, how they start a launcher and look for survivors.

A child plays the part that the job's args give it: "worker 0/1=raise"; the others finish.
"""

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import Cluster, ConfigError, Job, OnFailure
from topotrain.config.topology import layout
from topotrain.core.events import Event, Failed, Finished, Notice, Saved, Serving, StepDone, Unsaved, to_json
from topotrain.launch import JobOutcome
from topotrain.launch.agent.children import EntryPoints
from topotrain.launch.local import LocalLauncher
from topotrain.launch.runtime.child_channel import ChildChannel
from topotrain.launch.runtime.unit_commands import SigtermHandler

PLAY = "tests.support.launch_targets:play"
CALLS = EntryPoints(PLAY, PLAY, (PLAY.partition(":")[0],))
MARK = "TOPOTRAIN_TEST"


def play(spec, channel, fds):
    parts = dict(arg.split("=", 1) for arg in spec["args"])
    spec = {**spec, "job_dir": str(Path(spec["run_dir"]).parent)}
    answer = ANSWERS.get(parts.get(spec["who"], ""))
    termination = SigtermHandler()

    class SnapshotAnswer:
        def on_command(self, command):
            if answer and command["command"] == "snapshot":
                Path(spec["job_dir"], "saved").touch()
                control.emit(answer)

    control = ChildChannel(channel)
    control.start(termination, SnapshotAnswer())
    if "job" in spec:
        termination.take_over(job_file.loads(spec["job"], "the job"))
    spec["saved"] = Path(spec["job_dir"], "saved").exists()  # before anyone can ask this life of the job for a snapshot
    control.emit(Serving(spec["who"], (f"test://{os.getpid()}",), os.getpid()))
    return part(parts.get(spec["who"], "finish"))(spec, control, fds)


def finish(spec, control, fds):
    return 0


def raises(spec, control, fds):
    raise RuntimeError("boom")


def misconfigured(spec, control, fds):
    raise ConfigError("seed", 3, "must be 4")


def program(spec, control, fds):
    control.emit(Failed(spec["who"], "program", "ZeroDivisionError: division by zero", "Traceback: line 7"))
    return 1


def exit_3(spec, control, fds):
    print("last words")
    sys.exit(3)


def killed(spec, control, fds):
    os.kill(os.getpid(), signal.SIGKILL)


def execs(spec, control, fds):
    """Becomes another program, which ends well."""
    os.execv("/bin/sleep", ["sleep", "30"])


def closes(spec, control, fds):
    """Closes what it has not opened, and ends well a long time later."""
    os.closerange(3, 4000)
    time.sleep(30)
    return 0


def lingers(spec, control, fds):
    """Leaves a thread that waits for a word, though not for ever."""
    path = Path(spec["run_dir"], "go")
    threading.Thread(target=lambda: wait_for(path.exists, 30), name="lingerer").start()
    return 0


def stay(spec, control, fds):
    while True:
        signal.pause()


def forks(spec, control, fds):
    """A fork of it ends at SIGTERM, as ever."""
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            stay(spec, control, fds)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    control.emit(Notice(spec["who"], "forked"))
    return stay(spec, control, fds)


def own_handler(spec, control, fds):
    """A script that deals with SIGTERM itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    control.emit(Notice(spec["who"], "own"))
    return stay(spec, control, fds)


def deaf(spec, control, fds):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control.emit(Notice(spec["who"], "deaf"))
    return stay(spec, control, fds)


def brood(spec, control, fds):
    """Has a child in its own process group, and one that went away from it."""
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    control.emit(Notice(spec["who"], "brood"))
    return stay(spec, control, fds)


def group(spec, control, fds):
    subprocess.Popen(["sleep", "600"])
    control.emit(Notice(spec["who"], "brood"))
    return stay(spec, control, fds)


def lost_peer(spec, control, fds):
    control.emit(Failed(spec["who"], "peer", "lost somebody", ""))
    return stay(spec, control, fds)


def witness(spec, control, fds):
    """Has lost a peer when somebody writes the file that it names."""
    path = Path(spec["run_dir"], "go")
    control.emit(Notice(spec["who"], str(path)))
    wait_for(path.exists, 300)
    return lost_peer(spec, control, fds)


def late_program(spec, control, fds):
    """Fails only after somebody else was heard to have lost a peer."""
    done = Path(spec["run_dir"], "peer-was-heard")
    wait_for(done.exists)
    return program(spec, control, fds)


def talk(spec, control, fds):
    assert os.path.isdir(spec["sockets"]) and spec["program"] == "play.py" and spec["incarnation"] == 0
    print("one\ntwo")
    print("warned", file=sys.stderr)
    print("input", repr(sys.stdin.read()))
    os.write(1, b"\xff half")
    return 0


def mortal(spec, control, fds):
    """Says which life it has, waits for a word, and dies three times; then it finishes, and says so."""
    number = spec["incarnation"]
    print("life", number)
    control.emit(Notice(spec["who"], f"life {number}"))
    wait_for(Path(spec["run_dir"], f"go-{number}").exists, 60)
    return killed(spec, control, fds) if number < 3 else last(spec, control, fds)


def last(spec, control, fds):
    """The others need not wait any longer."""
    Path(spec["run_dir"], "over").touch()
    return 0


def until_over(spec, control, fds):
    wait_for(Path(spec["run_dir"], "over").exists, 60)
    return 0


def once(spec, control, fds):
    """Only its first incarnation is killed."""
    return 0 if spec["incarnation"] else killed(spec, control, fds)


def done(spec, control, fds):
    """Dies when all it had to do is done."""
    control.emit(Finished(spec["who"], 1, 1, 0.0, 0, 0, 0))
    last(spec, control, fds)
    return killed(spec, control, fds)


def frozen(spec, control, fds):
    """Its first incarnation is stopped, and has a child in its process group; continued, it waits for a word."""
    if not spec["incarnation"]:
        subprocess.Popen(["sleep", "600"])
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_for(Path(spec["run_dir"], "go").exists, 60)
    return last(spec, control, fds)


def frozen_once(spec, control, fds):
    """Is stopped in the first life of the job."""
    lives = Path(spec["job_dir"], "lives")
    if not lives.exists():
        lives.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return last(spec, control, fds)


def reborn(spec, control, fds):
    """Dies when it is told to; in a life of the whole job that follows, it ends well."""
    lives = Path(spec["job_dir"], "lives")
    if lives.exists() and len(lives.read_text()) == 3:
        return last(spec, control, fds)
    control.emit(Notice(spec["who"], f"resumed from '{spec['resume']}'"))
    wait_for(Path(spec["run_dir"], "go").exists, 60)
    with lives.open("a") as file:
        file.write("x")
    return killed(spec, control, fds)


def life(spec, control, fds):
    """Stays in the first life of the job."""
    lives = Path(spec["log"]).parent / "lives"
    if lives.exists():
        return 0
    return stay(spec, control, fds)


def stay_once(spec, control, fds):
    """Stays until the life of the job that follows a snapshot; there it makes a step."""
    if not spec["saved"]:
        return stay(spec, control, fds)
    control.emit(StepDone(spec["who"], 1.0, 71, 8, None, 0.0, 0, 0, 0))
    return 0


def share(spec, control, fds):
    """Two workers meet in shared memory: each writes its own byte and waits for the other's."""
    assert spec["shared_memfd"] and len(fds) == 1
    os.ftruncate(fds[0], 4096)
    with mmap.mmap(fds[0], 4096) as memory:
        mine = spec["workers"][0][0]
        memory[mine] = 1
        wait_for(lambda: memory[1 - mine] == 1)
    return 0


def world(spec, control, fds):
    """What a child finds around itself."""
    assert os.getsid(0) == os.getpgrp() == os.getpid()
    assert sys.stdin.read() == ""
    assert os.environ["OMP_NUM_THREADS"] == "1" and os.environ["GREETING"] == "hello"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "torch" not in sys.modules  # a child that imports it costs each of these tests seconds
    print("cwd", os.getcwd())
    print("fds", [os.read(fd, 10).decode() for fd in fds])
    sys.exit(7)


def torch_world(spec, control, fds):
    """torch is there, single-threaded, and DataLoader workers can be started."""
    assert "torch" in sys.modules
    import torch
    from torch.utils.data import DataLoader

    assert torch.get_num_threads() == 1
    loader = DataLoader(list(range(8)), batch_size=4, num_workers=1)
    assert sum(int(batch.sum()) for batch in loader) == 28
    return 0


def threads(spec, control, fds):
    """How many threads torch computes with here, on the first thread and on another one."""
    import torch

    found = [torch.get_num_threads()]
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    control.emit(Notice(spec["who"], f"{found} {os.environ.get('OMP_NUM_THREADS')}"))
    return 0


SAVED, UNSAVED = Saved("server 0/0", 3, 70, "manifests/000003", "end"), Unsaved("server 0/0", "why")
ANSWERS = {"saves": SAVED, "saves once": SAVED, "unsaved": UNSAVED, "unsaved until over": UNSAVED}
OTHER_NAMES = {
    "raise": raises,
    "saves": stay,
    "saves once": stay_once,
    "unsaved": stay,
    "unsaved until over": until_over,
}


def part(name: str) -> Callable[..., Any]:
    """The function of a part: "exit 3" is `exit_3`."""
    return OTHER_NAMES.get(name) or globals()[name.replace(" ", "_")]


def wait_for(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Return when the condition holds; a condition that does not come to hold is an error."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s} s: {condition}")
        select.select([], [], [], 0.01)


def marked(mark: str) -> list[int]:
    """Pids whose environment at their start, or at that of the process they are a fork of, had our mark."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def parts(**roles: str) -> tuple[str, ...]:
    """parts(worker_0_1="stay") -> ("worker 0/1=stay",)"""
    return tuple("{} {}/{}={}".format(*who.split("_"), part) for who, part in roles.items())


def small_job(
    workspace: Path,
    args: Sequence[str] = (),
    restarts: int | None = None,
    grace_s: float = 0.0,
    checkpoint_freq: int = 0,
    **counts: Any,
) -> Job:
    """Two workers and a server in two units, unless told otherwise; without `restarts` a death ends the job.

    grace_s: 0, since only the parts that are made for it take a last snapshot.
    """
    counts = {"nworkers_per_group": 2, "poll_time": 20, **counts}
    cluster = Cluster(workspace=str(workspace), **counts)
    policy: dict[str, Any] = {"on_failure": OnFailure.kStop, "grace_s": grace_s, "checkpoint_freq": checkpoint_freq}
    if restarts is not None:
        policy |= {"on_failure": OnFailure.kContinue, "restarts": restarts}
    return Job(program="play.py", args=tuple(args), cluster=cluster, **policy)


def launch(
    folder: Path,
    args: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
    launcher: LocalLauncher | None = None,
    **settings: Any,
) -> tuple[JobOutcome, list[Event]]:
    """The outcome of a `small_job`, and what was told meanwhile."""
    events = []

    def hear(event: Event) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    job = small_job(folder, args, **settings)
    return (launcher or LocalLauncher(CALLS)).start(job, layout(job.cluster), hear), events


def processes(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "processes.json").read_text())


def main(workspace: str, *args: str) -> None:
    """A launcher process of its own: prints each event, ends with the outcome's code."""

    def show(event: Event) -> None:
        print(to_json(event), flush=True)

    job = small_job(Path(workspace), args)
    try:
        outcome = LocalLauncher(CALLS).start(job, layout(job.cluster), show)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main(*sys.argv[1:])
