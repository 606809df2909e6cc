"""Entry points whose processes are started by hand, each a process of its own as in shells of users, in any order."""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from free_ports import free_port, free_ports
from job_runner import PROGRAMS
from shells import PATIENCE_S, ROOT, Shell, Shells, ended

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


# --- the pages' commands -----------------------------------------------------------------------------------------


def commands(page: str) -> list[str]:
    """The lines that begin with "shell N$", in the order of the page, each once."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"^shell \d\$ (.+)$", text, re.MULTILINE)))


def test_the_page_s_commands_train(shells: Shells) -> None:
    ports = free_ports(4)
    found = commands("pserver.md")
    assert len(found) >= 2
    for command in reversed(found):
        tool, *words = re.sub(r" --epochs[= ]\d+", "", command).split()
        words = [re.sub(r"\b(\d{4})\b", lambda n: str(ports[int(n[1]) - 7164]), word) for word in words]
        words = [word.replace("examples/", f"{ROOT}/examples/") for word in words]
        before = {"topotrain": ("-m", "topotrain"), "python": ()}[tool]
        shells.python(*before, *words, *(["--epochs=1"] if "examples/" in command else []))
    said = ended(shells.all, [0] * len(found))
    assert sum("accuracy:" in text for text in said) == 1


# --- endings -----------------------------------------------------------------------------------------------------


def test_a_pserver_that_ends_takes_the_trainers_along(shells: Shells) -> None:
    port = free_port()
    begun = shells.folder / "begun"
    server = pserver(shells, f"--port={port}")
    trainer = program(shells, "--paddle", f"port={port}", "--wait-at", str(begun), "--workspace", "w")
    started(begun, shells.all)
    server.send_signal(signal.SIGINT)
    said = ended([server, trainer], [130, 1])
    assert "the servers were stopped" in said[1] and "Traceback" not in said[1]
    assert nobody_is_left(shells.all)


def test_servers_beside_workers_live_and_end_with_them(shells: Shells) -> None:
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    pair = [program(shells, "--beside", addresses, "--number", n, "--workspace", "w") for n in ("1", "0")]
    ended(pair, [0, 0])
    assert (shells.folder / "w" / "final.safetensors").exists()
    assert nobody_is_left(pair)


def test_a_worker_that_was_started_by_hand_brings_the_result_home_too(shells: Shells) -> None:
    port = free_port()
    words = ("--paddle", f"port={port}", "--workspace", "w", "--os-exit")
    trainer, server = program(shells, *words), pserver(shells, f"--port={port}")
    ended([trainer, server], [0, 0])
    assert (shells.folder / "w" / "final.safetensors").exists()
