"""Entry points whose processes are started by hand, each a process of its own as in shells of users, in any order."""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from free_ports import free_port, free_ports
from job_runner import PROGRAMS, JobRunner
from safetensors.torch import load_file
from shells import PATIENCE_S, ROOT, Shell, Shells, ended
from soak_cases import soak_only, soaked

pytestmark = pytest.mark.journey

PROGRAM = str(PROGRAMS / "by_hand.py")


def pserver(shells: Shells, *flags: str) -> Shell:
    return shells.python("-m", "topotrain", "pserver", *flags)


def program(shells: Shells, *words: str) -> Shell:
    return shells.python(PROGRAM, *words)


def started(file: Path, shells: Sequence[Shell]) -> None:
    """Wait until training has begun."""
    until = time.monotonic() + PATIENCE_S
    while not file.exists():
        dead = [shell.communicate()[0] for shell in shells if shell.poll() is not None]
        assert not dead and time.monotonic() < until, dead
        time.sleep(0.02)


def nobody_is_left(shells: Sequence[Shell]) -> bool:
    """No process of these shells' groups lives, children included."""
    until = time.monotonic() + PATIENCE_S
    while any(group_lives(shell.pid) for shell in shells):  # a child sees its parent's end a moment later
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# --- the same bits -----------------------------------------------------------------------------------------------

LAYOUT = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp"


def test_paddle_and_tensorflow_end_with_the_bits_of_topotrain_run(shells: Shells, runner: JobRunner) -> None:
    port, _, ps, more_ps, *workers = free_ports(6)
    flags = [f"num_of_gradient_servers=2;port={port};ports_num=2;trainer_id={number}" for number in range(2)]
    hosts = [",".join(f"localhost:{p}" for p in ports) for ports in ((ps, more_ps), workers)]
    tasks = [("worker", 0), ("ps", 1), ("worker", 1), ("ps", 0)]
    waves = [
        [
            program(shells, "--paddle", flags[1], "--workspace", "paddle"),
            program(shells, "--paddle", flags[0], "--workspace", "paddle"),
            pserver(shells, "--num_of_gradient_servers=2", f"--port={port}", "--ports_num", "2", "--use_gpu", "False"),
        ],
        [program(shells, "--tf", f"{hosts[0]}/{hosts[1]}/{job}/{task}", "--workspace", "tf") for job, task in tasks],
    ]
    expected = runner.run(LAYOUT, "by_hand.py").final
    for wave in waves:
        ended(wave, [0] * len(wave))
    for entry_point in ("paddle", "tf"):
        final = load_file(shells.folder / entry_point / "final.safetensors")
        assert final.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(final[name], value), f"{name} differs through the entry point of {entry_point}"


# --- the pages' commands -----------------------------------------------------------------------------------------


def commands(page: str) -> list[str]:
    """The lines that begin with "shell N$", in the order of the page, each once."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"^shell \d\$ (.+)$", text, re.MULTILINE)))


@pytest.mark.parametrize(
    ("page", "port", "backwards"),
    soaked([("pserver.md", 7164, True)], [("clusterspec.md", 2222, False), ("data-parallel.md", 0, True)]),
)
def test_the_page_s_commands_train(shells: Shells, page: str, port: int, backwards: bool) -> None:
    ports = free_ports(4)
    found = commands(page)
    assert len(found) >= 2
    for command in reversed(found) if backwards else found:
        tool, *words = re.sub(r" --epochs[= ]\d+", "", command).split()
        words = [re.sub(r"\b(\d{4})\b", lambda n: str(ports[int(n[1]) - port]), word) for word in words]
        words = [word.replace("examples/", f"{ROOT}/examples/") for word in words]
        before = {"topotrain": ("-m", "topotrain"), "python": ()}[tool]
        shells.python(*before, *words, *(["--epochs=1"] if "examples/" in command else []))
    said = ended(shells.all, [0] * len(found))
    assert sum("accuracy:" in text for text in said) == 1


# --- endings -----------------------------------------------------------------------------------------------------


@soak_only  # in one process: launch/by_hand/test_manual_workers.py
def test_a_trainer_that_is_stopped_ends_the_job(shells: Shells) -> None:
    port = free_port()
    flags = f"num_of_gradient_servers=2;port={port}"
    server = pserver(shells, "--num_of_gradient_servers=2", f"--port={port}")
    begun = shells.folder / "begun"
    first, second = (
        program(shells, "--paddle", f"{flags};trainer_id={n}", "--wait-at", str(begun), "--workspace", "w")
        for n in range(2)
    )
    started(begun, shells.all)
    second.send_signal(signal.SIGINT)
    said = ended([server, first, second], [1, 1, -signal.SIGINT])
    assert "trainer 1 failed: it was stopped (Ctrl-C)" in said[0]
    assert "trainer 1 failed: it was stopped (Ctrl-C)" in said[1]
    assert "Traceback" not in said[0] + said[1]
    assert nobody_is_left(shells.all)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    soaked([(signal.SIGINT, 130, "the servers were stopped")], [(signal.SIGKILL, -signal.SIGKILL, "lost server 0/0")]),
)
def test_a_pserver_that_ends_takes_the_trainers_along(
    shells: Shells, number: signal.Signals, code: int, words: str
) -> None:
    port = free_port()
    begun = shells.folder / "begun"
    server = pserver(shells, f"--port={port}")
    trainer = program(shells, "--paddle", f"port={port}", "--wait-at", str(begun), "--workspace", "w")
    started(begun, shells.all)
    server.send_signal(number)
    said = ended([server, trainer], [code, 1])
    assert words in said[1] and "Traceback" not in said[1]
    assert nobody_is_left(shells.all)


def test_servers_beside_workers_live_and_end_with_them(shells: Shells) -> None:
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    pair = [program(shells, "--beside", addresses, "--number", n, "--workspace", "w") for n in ("1", "0")]
    ended(pair, [0, 0])
    assert (shells.folder / "w" / "final.safetensors").exists()
    assert nobody_is_left(pair)


@soak_only  # of a shard: test_shards.py
def test_a_worker_that_is_killed_takes_the_server_beside_it_along(shells: Shells) -> None:
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    begun = shells.folder / "begun"
    pair = [
        program(shells, "--beside", addresses, "--number", n, "--workspace", "w", "--wait-at", str(begun))
        for n in ("1", "0")
    ]
    started(begun, pair)
    pair[0].send_signal(signal.SIGKILL)
    said = ended(pair, [-signal.SIGKILL, 1])
    # Its server went with it: which of the two was missed first is chance.
    assert "worker 0/1 is gone, the job cannot go on" in said[1] or "lost server 0/1" in said[1]
    assert nobody_is_left(pair)
    again = [program(shells, "--beside", addresses.split(",")[0], "--workspace", "w")]
    ended(again, [0])
    assert (shells.folder / "w" / "final.safetensors").exists()
    assert nobody_is_left(again)
