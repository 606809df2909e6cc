"""A ledger, see ledger.py, whose script ends its own processes.

HOW WHEN [MARK]: HOW is "exit" (os._exit), "exec" (os.execv) or "c" (exit of the C library). WHEN it is "end", every
worker does so when all is trained; "middle": worker 1 does so once, at its fifth step, and makes the file MARK.
"""

import ctypes
import os
import sys
from pathlib import Path

from ledger import train

import topotrain as tt

EPOCHS, SAMPLES = 3, 96
how, when, *mark = sys.argv[1:]


def leave() -> None:
    if how == "exit":
        os._exit(0)
    if how == "exec":
        os.execv("/bin/true", ["true"])
    ctypes.CDLL(None).exit(0)


def after(steps: int) -> None:
    if when == "middle" and tt.rank() == 1 and steps == 5 and not Path(*mark).exists():
        Path(*mark).touch()
        leave()


train(SAMPLES, EPOCHS, after)
tt.report(trained=1.0)
if when == "end":
    leave()
