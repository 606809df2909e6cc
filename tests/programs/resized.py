"""A ledger, see ledger.py, whose main worker has workers join the job and leave it.

WORKSPACE, then how many workers join (above 0) or leave (below 0) at its third step, its sixth one and so on. Whoever
asks waits for the job to end this life; as each life begins at its first line, files in WORKSPACE say what was asked.
"""

import json
import sys
import threading
from pathlib import Path

from ledger import train

import topotrain as tt
from topotrain.job import ConfigError
from topotrain.launch.door import ask
from topotrain.launch.resizing import Resize

EPOCHS, SAMPLES = 3, 120
workspace, changes = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
lives = Path(workspace, "lives")


def wish(change: int) -> None:
    """Answered in another life, unless it is refused."""
    try:
        ask(workspace, Resize("join" if change > 0 else "leave", abs(change), 60.0))
    except ConfigError as error:
        with Path(workspace, "refused").open("a") as file:
            file.write(json.dumps(str(error)) + "\n")


asked: list[threading.Thread] = []


def after(steps: int) -> None:
    if not tt.is_main() or steps % 3:
        return
    done = len(lives.read_text()) if lives.exists() else 0
    if done < len(changes) and not asked:
        with lives.open("a") as file:
            file.write("x")
        asked.append(threading.Thread(target=wish, args=(changes[done],)))
        asked[0].start()
    elif asked:
        threading.Event().wait(0.05)  # computing: the job must not come to its end before it has changed


train(SAMPLES, EPOCHS, after)
