"""The forkserver of a job over all its lives: somebody else's, or one of our own, started anew when it has died.

Rule: who takes it in hand closes it; until then it stays, since loading torch takes longer than all else in a start.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from topotrain.launch.agent import forkserver
from topotrain.launch.agent.orphans import sweep


class ForkserverHandle:
    """See above.

    Args:
        given: the socket of a forkserver that runs already; "": there is to be one of our own.
        log: the file for what our own has to say.
        mark: what whoever is started for this job has in its environment, see `sweep`.
    """

    def __init__(self, given: str, log: Path, mark: str) -> None:
        self._given, self._mark = given, mark
        self.log = log
        self._own: forkserver.OwnedForkserver | None = None

    @property
    def own(self) -> bool:
        """The forkserver is the job's own."""
        return not self._given

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """Of our own."""
        return self._own.process if self._own is not None else None

    def up(self, preload: Sequence[str], environ: Mapping[str, str], again: bool = False) -> str:
        """The socket of the forkserver, started if need be. Raises OSError.

        again: the job has had a life before this one, in which somebody else's may have died.
        """
        if self._given and again and not _answers(self._given):
            self._given = ""
        if self._given:
            return self._given
        if self._own is not None and self._own.process.poll() is not None:
            self._own.close()
            self._own = None
        if self._own is None:
            self._own = forkserver.start(self.log, preload, environ)
        return self._own.path

    def sweep(self) -> None:
        """Kill what a life of the job has left behind, all but the forkserver."""
        sweep(self._mark, spared=set() if self._own is None else {self._own.process.pid})

    def close(self) -> int | None:
        """End our own with all its children; returns its exit code."""
        code = None if self._own is None else self._own.close()
        self._own = None
        sweep(self._mark)
        return code


def _answers(path: str) -> bool:
    try:
        forkserver.ForkserverClient(path).close()
    except OSError:
        return False
    return True
