"""Processes and jobs beside a command: forks of a forkserver.

The forkserver kills them when the connection of this process closes, however this process ends.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topotrain.config.job import Job
from topotrain.config.topology import layout
from topotrain.launch import EventListener
from topotrain.launch.agent import forkserver, temporary_folders
from topotrain.launch.agent.forkserver import ForkRequest, ForkserverClient
from topotrain.launch.local import LocalLauncher
from topotrain.tools.monitor.monitored_run import with_loopback

_LAST = 2000
"""Bytes at the end of a log in which an error is looked for."""


class ProcessEnded(Exception):
    """A process has ended without an answer. The text is its last line."""


class ForkedProcess:
    """One process, and the channel to it."""

    def __init__(self, client: ForkserverClient, call: str, spec: Mapping[str, Any], log: Path) -> None:
        self._log = log
        self._channel, theirs = socket.socketpair()
        self._answers = self._channel.makefile("rb")
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            client.spawn(ForkRequest(log.stem, call, spec, theirs.fileno(), output, output))
        finally:
            # Only the child keeps them: so the end of the child is the end of the channel.
            theirs.close()
            os.close(output)

    def order(self, **words: Any) -> None:
        """Send an order. A process that has ended is noticed by its missing answer."""
        try:
            self._channel.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            return

    def answer(self, patience_s: float | None = None) -> dict[str, Any]:
        """Wait for the next line.

        Raises:
            ProcessEnded: there is none.
            TimeoutError: there is none yet. No further one can be waited for.
        """
        self._channel.settimeout(patience_s)
        try:
            line = self._answers.readline()
        except ConnectionError:  # it has ended before it has read its order
            line = b""
        found = dict(json.loads(line)) if line else {}
        if not line or "event" in found:  # an event is what the forkserver says of a process that fails, or ends
            lines = self._log.read_bytes()[-_LAST:].decode(errors="replace").strip().splitlines()
            last = lines[-1].strip() if lines else "it left no word"
            raise ProcessEnded(found.get("text", last))
        return found

    def close(self) -> None:
        """Let the process end: without its channel it does not wait for orders."""
        self._answers.close()
        self._channel.close()


@dataclass(frozen=True)
class ForkedProcesses:
    """A forkserver, and a folder for the processes that it forks."""

    folder: Path
    path: str  # of its socket
    client: ForkserverClient
    began: float  # when it was asked for, by `time.monotonic`

    def start(self, call: str, spec: Mapping[str, Any], name: str) -> ForkedProcess:
        return ForkedProcess(self.client, call, spec, self.folder / f"{name}.log")

    def run_job(self, job: Job, on_event: EventListener, profile: int = 0) -> str:
        """Run a job on this machine, as `topotrain run` does; return why it failed, or "".

        Raises SystemExit where a signal has ended it.
        """
        launcher = LocalLauncher(forkserver=self.path, profile=profile)
        outcome = launcher.start(job, with_loopback(layout(job.cluster)), on_event)
        if outcome.code > 128:
            raise SystemExit(outcome.code)
        cause = "" if outcome.code == 0 else f"exit code {outcome.code}"
        return cause if outcome.cause is None else outcome.cause.text


@contextmanager
def forked_processes(path: str) -> Iterator[ForkedProcesses]:
    """Use a running forkserver in the block; "": one of its own, which ends with it."""
    with ExitStack() as stack:
        began = time.monotonic()
        folder, lock = temporary_folders.make()
        stack.callback(os.close, lock)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        path = path or stack.enter_context(closing(forkserver.start(folder / "forkserver.log"))).path
        yield ForkedProcesses(folder, path, stack.enter_context(closing(ForkserverClient(path))), began)
