"""The processes of a probe: forks of a forkserver that obey orders.

The forkserver kills them when the connection of this process closes, however this process ends.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.launch.agent.forkserver import ForkRequest, ForkserverClient

_LAST = 2000
"""Bytes at the end of a log in which an error is looked for."""


class ProcessEnded(Exception):
    """A process of the probe has ended without an answer. The text is its last line."""


class ProbedProcess:
    """One process, and the channel to it.

    Args:
        client: of the forkserver.
        call: the function that the process runs, as "module:function".
        spec: what it gets, as JSON.
        log: where its output goes.
    """

    def __init__(self, client: ForkserverClient, call: str, spec: Mapping[str, Any], log: Path) -> None:
        self._client, self._log, self._rest = client, log, b""
        self._channel, theirs = socket.socketpair()
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

    def answer(self, until: float) -> dict[str, Any]:
        """Wait for the next line.

        Args:
            until: by `time.monotonic`.

        Raises:
            ProcessEnded: there is none.
            TimeoutError: there is none yet.
        """
        with selectors.DefaultSelector() as ready:
            ready.register(self._channel, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                data = self._channel.recv(1 << 16)
                if not data:
                    raise ProcessEnded(self._last_words())
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def _last_words(self) -> str:
        text = self._log.read_bytes()[-_LAST:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it left no word"

    def close(self) -> None:
        """Let the process end: without its channel it does not wait for orders."""
        self._channel.close()


class ProbedProgram(ProbedProcess):
    """A process that runs the user's script; see `measured_program`."""

    def __init__(self, client: ForkserverClient, program: str, args: list[str], threads: int, log: Path) -> None:
        self._program = program
        spec = {"program": program, "args": args, "threads": threads}
        super().__init__(client, "topotrain.tools.probe.measured_program:run", spec, log)

    def measured(self, until: float) -> dict[str, Any]:
        """Wait for the answer to the last order.

        Raises:
            ConfigError: the script has failed, or takes too long.
        """
        try:
            found = self.answer(until)
        except ProcessEnded as error:
            raise ConfigError("program", self._program, f"ended without a step: {error}") from None
        except TimeoutError:
            raise ConfigError("program", self._program, "takes too long for its first steps") from None
        if "failed" in found:
            raise ConfigError("program", self._program, found["failed"])
        return found
