"""`topotrain run --lecture`: real jobs whose messages are held and explained, and have the bits of the others."""

import io
import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pexpect
import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, HOGWILD, SANDBLASTER, JobRunner
from wait_limit import ended_after

from topotrain.extensions.slow_deliveries.explanations import SENTENCES, FrameworkKind
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recording_file import FILE, read_recording
from topotrain.tools.recording.travel_track import MOST_TRAVELS

pytestmark = pytest.mark.journey

TCP = " transport: kTcp"
OUTER = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
ISLANDS = f"nworker_groups: 2 server_worker_separate: true sync_freq: 4 {OUTER}"
PAUSE_S = 0.01
TOLD = re.compile(r"(worker|server) \d/\d (?!failed)\w+")


def explained(text: str, kind: FrameworkKind) -> Counter[tuple[str, str]]:
    """How often each (receiver, word) was explained, read back from the sentences. No other line may look like one."""
    patterns = {}
    for what, template in SENTENCES[kind].items():
        fields = {"sender": "(?P<sender>[a-z]+ [0-9]/[0-9])", "to": "(?P<to>[a-z]+ [0-9]/[0-9])", "step": "[1-9][0-9]*"}
        parts = {name: f"@{name}@" for name in (*fields, "part")}
        pattern = re.escape(template.format(**parts))
        for name, value in {**fields, "part": "(slice [0-9]+|all its slices)"}.items():
            pattern = pattern.replace(f"@{name}@", value, 1)
        patterns[what] = re.compile(pattern)
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        matches = [(match["to"], what) for what, pattern in patterns.items() if (match := pattern.match(line))]
        assert len(matches) == 1 or not TOLD.match(line), (line, matches)
        found.update(matches)
    return found


SYNCHRONOUS = {"push", "mean", "commit", "applied", "vote", "apply"}


@pytest.mark.parametrize(
    ("cluster", "kind", "words"),
    [
        (SANDBLASTER, FrameworkKind.SANDBLASTER, SYNCHRONOUS),
        (SANDBLASTER + TCP, FrameworkKind.SANDBLASTER, SYNCHRONOUS | {"values"}),
        (ALLREDUCE, FrameworkKind.ALLREDUCE, SYNCHRONOUS),
        (f"{ALLREDUCE} algorithm: kRing {TCP}", FrameworkKind.ALLREDUCE, SYNCHRONOUS | {"values", "partial"}),
        (DOWNPOUR, FrameworkKind.DOWNPOUR, SYNCHRONOUS),
        (DOWNPOUR + TCP, FrameworkKind.DOWNPOUR, SYNCHRONOUS | {"values"}),
        (HOGWILD, FrameworkKind.HOGWILD, {"push", "commit", "applied", "difference", "master"}),
        (f"{HOGWILD} agreement: kRingAverage", FrameworkKind.HOGWILD, {"push", "commit", "offer", "reply"}),
        (ISLANDS, FrameworkKind.ISLANDS, {"push", "commit", "applied", "values"}),
        (f"{ISLANDS} nworkers_per_group: 2", FrameworkKind.ISLANDS, {"gradient", "mean", "push", "values"}),
    ],
    ids=[
        "Sandblaster",
        "Sandblaster over TCP",
        "AllReduce",
        "AllReduce in a ring",
        "Downpour",
        "Downpour over TCP",
        "Hogwild",
        "Hogwild in a ring",
        "islands",
        "islands of two workers",
    ],
)
def test_each_message_of_a_framework_is_explained(
    runner: JobRunner, cluster: str, kind: FrameworkKind, words: set[str]
) -> None:
    ended = runner.run(cluster, "small.py", "--epochs", "1", options=("--lecture", str(PAUSE_S)))
    told = explained(ended.err, kind)
    assert {what for _, what in told} >= words, told
    received = Counter[str]()
    for (to, _), count in told.items():
        received[to] += count
    # Each process holds one message at a time, so it cannot have had them in less time.
    assert max(received.values()) * PAUSE_S <= ended.report["wall_seconds"]
    assert ended.report["steps"] > 0 and "main says hello" in ended.out
    # The page gets the same sentences.
    history = JobHistory()
    for timed in read_recording(ended.workspace / FILE):
        history.add(timed)
    sentences = [travel[-1] for travel in history.view()["travels"]]
    assert sentences == [line for line in ended.err.splitlines() if TOLD.match(line)][-MOST_TRAVELS:]


@pytest.mark.parametrize("cluster", [SANDBLASTER, SANDBLASTER + TCP, ALLREDUCE], ids=["shared", "TCP", "AllReduce"])
def test_a_synchronous_job_has_the_same_bits(runner: JobRunner, cluster: str) -> None:
    args = ("steady.py", "--epochs", "1")
    slow = runner.run(cluster, *args, name="slow", options=("--lecture", str(PAUSE_S), "--quiet"))
    fast = runner.run(cluster, *args, name="fast")
    assert slow.final.keys() == fast.final.keys()
    assert all(torch.equal(value, fast.final[name]) for name, value in slow.final.items())
    # --quiet shows no sentence.
    assert not [line for line in slow.err.splitlines() if TOLD.match(line)]


@pytest.mark.parametrize(
    ("seconds", "cluster", "said"),
    [
        ("0", ALLREDUCE, "--lecture = 0.0: must be from 0.01 to 5 seconds for each message"),
        ("nan", ALLREDUCE, "--lecture = nan: must be from 0.01 to 5 seconds for each message"),
        ("6", ALLREDUCE, "--lecture = 6.0: must be from 0.01 to 5 seconds for each message"),
        ("1", "nworkers_per_group: 16", "needs a job of at most 16 workers and servers: this one has 17"),
        (
            "1",
            "nworkers_per_group: 2 nservers_per_group: 2 engine: kGloo",
            "the gradients travel inside torch.distributed",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(runner: JobRunner, seconds: str, cluster: str, said: str) -> None:
    ended = runner.run(cluster, "small.py", options=("--lecture", seconds), code=2)
    assert said in ended.err and len(ended.err.splitlines()) == 1 and not ended.workspace.exists()


def test_ctrl_c_during_a_long_pause_leaves_no_process(runner: JobRunner) -> None:
    command = runner.command(SANDBLASTER, "small.py", options=("--lecture", "5"))
    with subprocess.Popen(command, cwd=runner.folder, stderr=subprocess.PIPE, text=True) as job, ended_after(120):
        assert job.stderr is not None
        for line in job.stderr:
            if TOLD.match(line):
                break
        pids = [entry["pid"] for entry in json.loads((runner.folder / "job" / "processes.json").read_text())]
        job.send_signal(signal.SIGINT)
        job.stderr.read()
        assert job.wait() == 130
    assert len(pids) > 5 and not [pid for pid in pids if pid != os.getpid() and Path(f"/proc/{pid}").exists()]


def test_on_a_terminal_sentences_scroll_above_the_table(runner: JobRunner) -> None:
    command = runner.command(DOWNPOUR, "small.py", "--epochs", "1", options=("--lecture", str(PAUSE_S)))
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "JPY_PARENT_PID")}
    shown = pexpect.spawn(
        command[0],
        command[1:],
        cwd=str(runner.folder),
        env={**clean, "TERM": "xterm-256color"},
        dimensions=(40, 200),
        encoding="utf-8",
        timeout=90,
    )
    shown.logfile_read = written = io.StringIO()
    shown.expect_exact("elapsed 0:")
    shown.expect("pushes its gradient of slice [0-9]+ to server 0/[01], step 1 of its group")
    shown.expect_exact(pexpect.EOF)
    # The last drawing: the figures of the end, every worker finished, and the cursor is there again.
    screen = written.getvalue()
    last = screen[screen.rindex("elapsed ") :]
    assert re.match(r"elapsed \d+:\d\d  epoch (1|-)  done (100 %|\d+ %|-)  ETA ", last)
    assert last.count("finished") == 4 and screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    shown.close()
    assert shown.exitstatus == 0
