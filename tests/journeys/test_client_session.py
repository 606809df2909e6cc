"""TensorFlow's client session: tasks in shells of their own, which only join, and clients that come and go."""

import signal
import time

import pytest
import torch
from free_ports import free_ports
from job_runner import PROGRAMS
from safetensors.torch import load_file
from shells import PATIENCE_S, Shell, Shells, ended

pytestmark = pytest.mark.journey

PROGRAM = str(PROGRAMS / "session.py")


def said(shell: Shell, words: str) -> None:
    """Wait until a process has said this."""
    until = time.monotonic() + PATIENCE_S
    before = []
    for line in shell.stdout:
        if words in line:
            return
        assert time.monotonic() < until, line
        before.append(line)
    raise AssertionError(f"ended without saying {words!r}, but {''.join(before)!r}")


def test_clients_come_and_go(shells: Shells) -> None:
    ps, *workers = (f"localhost:{port}" for port in free_ports(3))
    hosts = f"{ps}/{','.join(workers)}"
    tasks = [shells.python(PROGRAM, "task", hosts, *place.split()) for place in ("worker 1", "ps 0", "worker 0")]
    for task in tasks:
        said(task, "ready at tcp://localhost:")
    target = f"tcp://{workers[0]}"

    shells.environ["TOPOTRAIN_TOKEN"] = "cd" * 32
    stranger = shells.python(PROGRAM, "client", target, "stranger.safetensors")
    shells.environ["TOPOTRAIN_TOKEN"] = "ab" * 32
    killed = shells.python(PROGRAM, "client", target, "killed.safetensors", "--for-ever")
    said(killed, "step 3")
    killed.send_signal(signal.SIGKILL)
    client = shells.python(PROGRAM, "client", target, "far.safetensors")
    alone = shells.python(PROGRAM, "client", "", "near.safetensors")
    ended([client, alone], [0, 0])
    (words,) = ended([stranger], [1])
    assert "has another token than this process" in words

    far, near = (load_file(shells.folder / f"{name}.safetensors") for name in ("far", "near"))
    assert far.keys() == near.keys()
    for name, value in near.items():
        torch.testing.assert_close(far[name], value, rtol=1e-6, atol=1e-7, msg=name)

    for task in tasks:
        assert task.poll() is None
        task.send_signal(signal.SIGINT)
    texts = ended(tasks, [130] * 3)
    assert all("the session is over" in text and "Traceback" not in text for text in texts)


def test_a_task_that_dies_ends_the_session_of_its_client(shells: Shells) -> None:
    ps, *workers = (f"localhost:{port}" for port in free_ports(3))
    hosts = f"{ps}/{','.join(workers)}"
    tasks = [shells.python(PROGRAM, "task", hosts, *place.split()) for place in ("worker 0", "ps 0", "worker 1")]
    for task in tasks:
        said(task, "ready at tcp://localhost:")
    client = shells.python(PROGRAM, "client", f"tcp://{workers[0]}", "no.safetensors", "--for-ever")
    said(client, "step 3")
    tasks[2].send_signal(signal.SIGKILL)
    (words,) = ended([client], [1])
    assert "/job:worker/task:1 is gone" in words and "JobError" in words
    again = shells.python(PROGRAM, "task", hosts, "worker", "1")
    said(again, "ready at tcp://localhost:")
    ended([shells.python(PROGRAM, "client", f"tcp://{workers[1]}", "yes.safetensors")], [0])
