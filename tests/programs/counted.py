"""A ledger, see ledger.py, whose workers tell how many steps they have made, and which goes on as long as it must.

FOLDER SAMPLES EPOCHS [LATE]: behind each step worker number N writes the number of its steps to the file steps-N. As
long as there is no file "on", every step waits for it, for a quarter of a second at most. Worker number LATE waits
before its `tt.prepare`, and again behind its first step, until each other worker has made two more steps; then it makes
the file "on".
"""

import sys
import time
from pathlib import Path

from ledger import train, wait_for

import topotrain as tt

folder, samples, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
late = int(sys.argv[4]) if len(sys.argv) > 4 else -1
me, on = tt.rank(), folder / "on"


def others() -> dict[str, int]:
    """The steps of each other worker."""
    counts = {path.name: path.read_text() for path in folder.glob("steps-*") if path.name != f"steps-{me}"}
    return {name: int(count or 0) for name, count in counts.items()}


def await_two_more() -> None:
    before = others()
    wait_for(lambda: all(count >= before[name] + 2 for name, count in others().items()))


def after(steps: int) -> None:
    # In place of the old number: a reader finds one of both.
    Path(folder, f"new-{me}").write_text(str(steps))
    Path(folder, f"new-{me}").rename(Path(folder, f"steps-{me}"))
    if me == late:
        if steps == 1:
            await_two_more()
            on.touch()
        return
    until = time.monotonic() + 0.25
    while not on.exists() and time.monotonic() < until:
        time.sleep(0.01)


if me == late:
    await_two_more()
train(samples, epochs, after)
