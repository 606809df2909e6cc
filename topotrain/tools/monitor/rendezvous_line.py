"""A line on a terminal about the wait at the rendezvous, redrawn in place."""

import sys
import time

from topotrain.launch.multinode.node_rendezvous import RendezvousNotice
from topotrain.tools.monitor.live_terminal import redraws

SHOWN_S = 1.0
"""Seconds of a wait before the line appears."""
_CLEAR = "\r\x1b[2K"


class LiveRendezvousNotice(RendezvousNotice):
    """Shows the wait in one line, which the next one replaces."""

    def __init__(self, rank: int, nprocs: int) -> None:
        super().__init__(rank, nprocs)
        self._shown_at, self._shown = time.monotonic() + SHOWN_S, False

    def show(self, text: str, now: float) -> None:
        if now >= self._shown_at:
            self._shown = True
            sys.stderr.write(f"{_CLEAR}{text}")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            self._shown = False
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


def rendezvous_line(rank: int, nprocs: int) -> RendezvousNotice:
    """Return the notice for stderr: a line in place on a terminal, lines elsewhere."""
    return (LiveRendezvousNotice if redraws(sys.stderr) else RendezvousNotice)(rank, nprocs)
