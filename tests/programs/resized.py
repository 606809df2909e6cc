"""A ledger, see ledger.py, whose main worker has workers join the job and leave it.

WORKSPACE, then how many workers join (above 0) or leave (below 0) at its third step, at the third one of the life of
the job that follows, and so on. Whoever asks is answered in that next life, so a file in WORKSPACE counts what was
asked. Then, perhaps, when worker (0,1) is killed once: "asked", as soon as the first change is, or "begins", as the
life that follows the first change begins.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from ledger import train

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import ResizeRequest

EPOCHS, SAMPLES = 3, 120
workspace, changes = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",") if word]
dies = sys.argv[3] if len(sys.argv) > 3 else ""
asked, dead = workspace / "asked", workspace / "dead"


def done() -> int:
    return len(asked.read_text()) if asked.exists() else 0


def die_if(when: str) -> None:
    if dies == when and tt.rank() == 1 and done() and not dead.exists():
        dead.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wish(change: int) -> None:
    try:
        ask(workspace, ResizeRequest("join" if change > 0 else "leave", abs(change), 60.0))
    except ConfigError as error:
        with Path(workspace, "refused").open("a") as file:
            file.write(f"{error}\n")


def after(steps: int) -> None:
    global waits
    die_if("asked")
    if waits or (tt.is_main() and steps >= 3 and done() < len(changes)):
        threading.Event().wait(0.2)  # computing: the job must not come to its end before it has changed
    if not waits and tt.is_main() and steps >= 3 and done() < len(changes):
        waits = True
        change = changes[done()]
        with asked.open("a") as file:
            file.write("x")
        threading.Thread(target=wish, args=(change,)).start()


waits = False
die_if("begins")
train(SAMPLES, EPOCHS, after)
