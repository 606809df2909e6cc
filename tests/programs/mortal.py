"""A ledger, see ledger.py, of whose job one process is killed once.

WORKSPACE VICTIM KILLER STEP [hold] [back] [snapshot] [late] [freeze] [fragments]: VICTIM ("server 0/0") is killed when
worker number KILLER has done STEP steps. With `hold` the others wait at their sixth step until it kills: groups that
wait for no other could read all data before. With `back` the main worker waits at its second step until the killer has
made a step in its next life; with `snapshot` the killer waits for a snapshot of the job before it kills; `late`: it
kills only when everything is trained, and the result is about to be saved; `freeze`: it stops VICTIM, and lets it be;
`fragments`: each sample has a cell in three parameters. Each start of the script of worker number N adds a byte to the
file starts-N.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from ledger import Fragmented, Ledger, train, wait_for

import topotrain as tt

EPOCHS, SAMPLES = 3, 96
workspace, victim, killer, at, *wishes = sys.argv[1:]
kills = tt.rank() == int(killer)
killed, back = Path(workspace, "killed"), Path(workspace, "back")


def saved(seconds: float) -> bool:
    """Whether the wish for a snapshot is fulfilled, in this time at most."""
    until = time.monotonic() + seconds
    wait_for(lambda: list(Path(workspace).glob("manifests/*/manifest.json")) or time.monotonic() > until)
    return time.monotonic() <= until


def kill() -> None:
    processes = Path(workspace, "processes.json")
    wait_for(processes.exists)
    killed.touch()
    entries = json.loads(processes.read_text())
    number = signal.SIGSTOP if "freeze" in wishes else signal.SIGKILL
    os.kill(next(entry["pid"] for entry in entries if victim in entry["roles"]), number)


def measured() -> float:
    if kills and not killed.exists():
        wait_for(lambda: "snapshot" not in wishes or saved(1.0))
        kill()
    return 1.0


def after(steps: int) -> None:
    if kills and killed.exists():
        back.touch()
    # A snapshot needs the state of this worker, too, which goes out with its steps. So it goes on meanwhile.
    elif kills and steps >= int(at) and "late" not in wishes and ("snapshot" not in wishes or saved(1.0)):
        kill()
    if "hold" in wishes and not kills and steps == 6:
        wait_for(killed.exists)
    if "back" in wishes and tt.is_main() and steps == 2:
        wait_for(back.exists)


with Path(workspace, f"starts-{tt.rank()}").open("a") as starts:
    starts.write("x")
train(SAMPLES, EPOCHS, after, Fragmented if "fragments" in wishes else Ledger)
if "late" in wishes:
    tt.report(trained=measured)
