"""Whole jobs on this machine whose processes die, parts played in place of training: who starts again, and what it
leaves behind."""

import gc
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.launch_targets import CALLS, launch, marked, parts, processes
from topotrain.core.events import Exited, Failed, Frozen, Incident, Lost, Notice, Output, Started, Thawed
from topotrain.launch.local import LocalLauncher
from topotrain.launch.log_lines import without_stamps
from topotrain.launch.recovery import attempt_state, resume_point

pytestmark = pytest.mark.journey


def told(events, kind):
    return [event for event in events if isinstance(event, kind)]


def plays(**roles):
    return [arg.replace("_", " ") for arg in parts(**roles)]


def open_fds(pid):
    return sorted(os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{pid}/fd"))


def test_a_group_starts_again_as_often_as_it_may_and_leaves_nothing_open(tmp_path, mark):
    units, counts, lives = {}, [], []

    def hear(event):
        if isinstance(event, Started) and event.who.startswith("unit"):
            units[event.who] = event.pid
        if isinstance(event, Notice) and event.text.startswith("life"):
            lives.append((event.who, event.text))
            if len(lives) % 2 == 0:  # both workers, which share memory
                gc.collect()  # what an earlier test has left in this process closes its descriptors now
                counts.append([len(open_fds(units["unit 0"])), len(os.listdir("/proc/self/fd"))])
                counts[-1].append(sum("memfd" in name for name in open_fds(units["unit 0"])))
                for number in range(len(lives) // 2):
                    Path(tmp_path, "run", f"go-{number}").touch()

    roles = plays(worker_0_0="mortal", worker_0_1="mortal", worker_1_0="until over", worker_1_1="until over")
    groups = {"nworker_groups": 2, "nworkers_per_procs": 4}
    outcome, events = launch(tmp_path, [*roles, "server 0/0=until over"], hear, restarts=3, **groups)
    assert (outcome.code, outcome.cause) == (0, None)
    assert [text for who, text in lives if who == "worker 0/0"] == [f"life {number}" for number in range(4)]
    assert len({(unit, memfds) for unit, _, memfds in counts}) == 1
    # This process may have a descriptor open for a moment. One for each restart would be in the later counts, too.
    assert max(own for _, own, _ in counts[2:]) <= max(own for _, own, _ in counts[:2])
    assert counts[0][2] == 1
    actions = [incident.action for incident in told(events, Incident)]
    assert actions == [f"group 0 starts again (incarnation {number})" for number in (1, 2, 3)]
    assert told(events, Lost) == told(events, Failed) == []
    started = [event.who for event in told(events, Started)]
    assert [started.count(who) for who in ("worker 0/0", "worker 0/1", "worker 1/0", "server 0/0")] == [4, 4, 1, 1]
    said = "".join(event.text for event in told(events, Output))
    assert said == "life 0\nlife 1\nlife 2\nlife 3\n"
    log = without_stamps((tmp_path / "logs" / "worker-0-0.log").read_bytes()).decode().splitlines()
    assert [line for line in log if not line.startswith("---")] == said.splitlines()
    assert sum(line.startswith("--- worker 0/0 starts again: worker 0/") for line in log) == 3
    for entry in processes(tmp_path):
        if entry["workers"]:
            who = "worker {}/{}".format(*entry["workers"][0])
            assert (entry["pid"], entry["exit"]) == (outcome.pids[who], 0)
            assert entry["address"] == [f"test://{entry['pid']}"]


def test_a_process_that_stays_frozen_is_ended(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(attempt_state, "LEASE_S", 0.3)
    roles = plays(worker_0_0="until over", worker_0_1="frozen", server_0_0="until over")
    outcome, events = launch(tmp_path, roles, restarts=1)
    assert (outcome.code, outcome.cause) == (0, None)
    (stopped,) = told(events, Frozen)
    (incident,) = told(events, Incident)
    assert (stopped.who, incident.action) == ("worker 0/1", "group 0 starts again (incarnation 1)")
    assert incident.what == f"worker 0/1 (pid {stopped.pid}) was frozen for 0.3 s and was ended"
    assert told(events, Lost) == told(events, Failed) == []
    assert Exited("worker 0/1", stopped.pid, -9) in events


def test_a_process_that_is_frozen_for_a_moment_goes_on_and_a_signal_ends_a_job_with_a_frozen_one(tmp_path, mark):
    heard = []

    def hear(event):
        if isinstance(event, Frozen | Thawed):
            heard.append(type(event))
            if len(heard) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                os.kill(event.pid, signal.SIGCONT if isinstance(event, Frozen) else signal.SIGSTOP)

    roles = plays(worker_0_0="stay", worker_0_1="frozen", server_0_0="stay")
    outcome, events = launch(tmp_path, roles, hear, restarts=1)
    assert (outcome.code, outcome.cause) == (143, None)
    assert heard[:3] == [Frozen, Thawed, Frozen]
    assert told(events, Incident) == []
    assert marked(mark) == []


def test_the_whole_job_starts_again_with_its_server_and_leaves_nothing_open(tmp_path, mark, monkeypatch):
    counts, tokens, forkservers, asked = [], [], set(), []
    snapshots = tmp_path / "manifests"
    snapshots.mkdir()  # of an earlier job

    def latest(workspace, notifier):
        asked.append(workspace)
        notifier.notify(f"found {len(asked)}")
        return SimpleNamespace(path=snapshots / str(len(asked)))

    def hear(event):
        if isinstance(event, Notice) and event.text.startswith("resumed"):
            counts.append(len(os.listdir("/proc/self/fd")))
            tokens.append((tmp_path / "run" / "token").read_bytes())
            forkservers.add(forkserver(mark))
            if len(counts) == 2:  # now the job has snapshots of its own
                snapshots.rename(tmp_path / "aside")
                snapshots.mkdir()
            (tmp_path / "run" / "go").touch()

    monkeypatch.setattr(resume_point, "latest", latest)
    # A job that is continued and dies before its first snapshot is continued again.
    launcher = LocalLauncher(CALLS, resume=f"{tmp_path}/elsewhere/000007")
    roles = plays(worker_0_0="until over", worker_0_1="until over", server_0_0="reborn")
    outcome, events = launch(tmp_path, roles, hear, launcher, restarts=3)
    assert (outcome.code, outcome.cause) == (0, None)
    resumed = [event.text for event in told(events, Notice) if event.text.startswith("resumed")]
    assert resumed == [f"resumed from '{where}'" for where in (*[launcher.resume] * 2, f"{snapshots}/1")]
    assert Notice("launcher", f"the whole job starts again from {launcher.resume}") in events
    assert asked == [tmp_path] * 2
    assert Notice("launcher", "found 2") in events
    assert [event.action for event in told(events, Incident)] == ["the whole job starts again"] * 3
    assert told(events, Failed) == []
    assert len(set(tokens)) == 3
    assert len(set(counts)) == 1
    assert len(forkservers) == 1
    log = without_stamps((tmp_path / "logs" / "servers-unit-0.log").read_bytes()).decode()
    assert log == "--- server 0/0 starts again: the whole job starts again ---\n" * 3
    assert {entry["exit"] for entry in processes(tmp_path) if entry["roles"] != ["launcher"]} == {0}


def forkserver(mark):
    """The pid of the launcher's forkserver. Its forks have the same command line, and after a wrap lower pids."""
    ours = f"PPid:\t{os.getpid()}\n"
    own = [each for each in marked(mark) if ours.encode() in of(each, "status")]
    (pid,) = [each for each in own if b"launch.agent.forkserver" in of(each, "cmdline")]
    return pid


def of(pid, name):
    return Path("/proc", str(pid), name).read_bytes()


def test_a_signal_during_a_restart_ends_the_job(tmp_path, mark):
    roles = plays(worker_0_0="deaf", worker_0_1="deaf", server_0_0="deaf")
    deaf, pids = set(), {}

    def hear(event):
        if isinstance(event, Started):
            pids[event.who] = event.pid
        if isinstance(event, Notice):
            deaf.add(event.who)
        if len(deaf) == 3 and isinstance(event, Notice):
            os.kill(pids["server 0/0"], signal.SIGKILL)
        if isinstance(event, Incident):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome, events = launch(tmp_path, roles, hear, restarts=3)
    assert (outcome.code, outcome.cause) == (143, None)
    assert len(told(events, Incident)) == 1
    assert marked(mark) == []
