"""The forkserver of a job over all its attempts.

It is the job's own, restarted after a death, one that the job's units on this host share, or one that another process
owns. The owner of the handle closes it.
"""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from topotrain.config.private_files import copy_file
from topotrain.launch.agent import forkserver
from topotrain.launch.agent.orphans import ForkserverProcess, sweep
from topotrain.launch.shared_forkserver import SharedForkserver


class ForkserverHandle:
    """A handle to the forkserver of a job.

    Args:
        given: the socket of a running forkserver; "": the job starts its own.
        log: the log file of the job's own forkserver.
        mark: the mark in the environment of all processes of this job, see `sweep`.
        shared: the forkserver that the units of the job on this host share, if they do.
    """

    def __init__(self, given: str, log: Path, mark: str, shared: SharedForkserver | None = None) -> None:
        self._given, self._mark, self._shared = given, mark, shared
        self._log = log
        self._own: forkserver.OwnedForkserver | None = None

    @property
    def own(self) -> bool:
        """Whether the forkserver is the job's own, or its units'."""
        return not self._given

    @property
    def log(self) -> Path:
        """The log file of the forkserver."""
        return self._log if self._shared is None else self._shared.log

    @property
    def process(self) -> "subprocess.Popen[bytes] | ForkserverProcess | None":
        """The process of the job's own forkserver."""
        if self._shared is not None:
            return self._shared.process
        return self._own.process if self._own is not None else None

    def up(self, preload: Sequence[str], environ: Mapping[str, str], again: bool = False) -> str:
        """Return the forkserver's socket, and start the forkserver if needed.

        again: this is not the first attempt, so a forkserver of another owner may have died. Raises OSError.
        """
        if self._shared is not None:
            try:
                return self._shared.up(environ)
            except FileNotFoundError:
                if not again:
                    raise
                # A program that cleans up has removed its folder.
                self._shared.leave()
                self._shared = None
        # Not at the first attempt: then the user gets the error about a socket without a forkserver.
        if self._given and again and not _answers(self._given):
            self._given = ""
        if self._given:
            return self._given
        # A death of the forkserver is the reason of some restarts.
        if self._own is not None and self._own.process.poll() is not None:
            self._own.close()
            self._own = None
        # It stays between attempts: loading torch takes longer than the rest of a start.
        if self._own is None:
            self._own = forkserver.start(self.log, preload, environ)
        return self._own.path

    def sweep(self) -> None:
        """Kill all processes that an attempt of the job has left, except the forkserver."""
        sweep(self._mark, spared=set() if self._own is None else {self._own.process.pid})

    def close(self) -> int | None:
        """End the job's own forkserver; return its exit code, or None if it has none."""
        code = None if self._own is None else self._own.close()
        self._own = None
        if self._shared is not None:
            # The folder of the log goes with its last user.
            with suppress(OSError):
                copy_file(self._shared.log, self._log)
            code = self._shared.leave()
            self._shared = None
        # After the forkserver: until then it would reap the processes, and their pids could be reused.
        sweep(self._mark)
        return code


def _answers(path: str) -> bool:
    try:
        # A connection alone is no request, so nothing is forked.
        forkserver.ForkserverClient(path).close()
    except OSError:
        return False
    return True
