"""A ledger, see ledger.py, whose main worker has another group leave the job and come again, and a third one join it.

WORKSPACE: at its third step worker (0,0) has group 1 leave; at its sixth it has groups 1 and 2 join, and
waits until each has made a step. Meanwhile the others leave enough to be read: until group 1 is to leave it waits
behind its first step, and so do both once they are back, until the main worker goes on.
"""

import sys
import time
from pathlib import Path

from ledger import train, wait_for

import topotrain as tt
from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import GroupRequest

EPOCHS, SAMPLES = 2, 960
workspace, group = Path(sys.argv[1]), tt.rank()
asked, left, on = workspace / "asked", workspace / "left", workspace / "on"


def after(steps: int) -> None:
    if group:
        again = left.exists()
        Path(workspace, f"back {group}" if again else "begun").touch()
        wait_for((on if again else asked).exists)
        time.sleep(0.0 if again else 0.02)  # computing: there is something left when the others come
    elif steps == 3:
        wait_for(Path(workspace, "begun").exists)
        asked.touch()
        ask(workspace, GroupRequest("leave", 1, 60.0))
        left.touch()
    elif steps == 6:
        for other in (1, 2):
            ask(workspace, GroupRequest("join", other))
        wait_for(lambda: Path(workspace, "back 1").exists() and Path(workspace, "back 2").exists())
        on.touch()


train(SAMPLES, EPOCHS, after)
