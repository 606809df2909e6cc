"""A ledger, see ledger.py, whose workers tell how many steps they have made, and which goes on as long as it must.

FOLDER SAMPLES EPOCHS: behind each step worker number N writes the number of its steps to the file steps-N. As long as
there is no file "on", every step waits for it, for a quarter of a second at most.
"""

import sys
import time
from pathlib import Path

from ledger import train

import topotrain as tt

folder, samples, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
me, on = tt.rank(), folder / "on"


def after(steps: int) -> None:
    # In place of the old number: a reader finds one of both.
    Path(folder, f"new-{me}").write_text(str(steps))
    Path(folder, f"new-{me}").rename(Path(folder, f"steps-{me}"))
    until = time.monotonic() + 0.25
    while not on.exists() and time.monotonic() < until:
        time.sleep(0.01)


train(samples, epochs, after)
