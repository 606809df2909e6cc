"""The launcher's handle of a unit's process."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topotrain.config.private_files import open_file
from topotrain.launch import TABLE, UnitPlace, arguments
from topotrain.launch.agent.children import AttemptInfo, EntryPoints
from topotrain.launch.agent.pipes import LineReader


@dataclass(slots=True)
class UnitProcess:
    """A running unit: its process, its events, and the log of its stderr."""

    rank: int
    process: "subprocess.Popen[bytes]"
    lines: LineReader
    log: Path

    @property
    def who(self) -> str:
        return f"unit {self.rank}"

    def command(self, command: str, **values: Any) -> None:
        """Send a command to the unit.

        The commands are listed in `supervisor.py`.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), json.dumps({"command": command, **values}).encode() + b"\n")

    def close(self) -> None:
        """Wait for the end of the process, and close its pipes."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def begin(
    place: UnitPlace, calls: EntryPoints, life: AttemptInfo, environ: Mapping[str, str], log: Path
) -> UnitProcess:
    """Start the unit at `place`. Raises OSError."""
    option, variable = TABLE["rendezvous"]
    words = arguments(place)
    if "@" in place.rendezvous:  # all users of this host can read a command line, and a URL may contain a password
        at = words.index(option)
        del words[at : at + 2]
        environ = {**environ, variable: place.rendezvous}
    command = [sys.executable, "-m", "topotrain.launch.agent.unit_main", *words]
    command += ["--worker-call", calls.worker, "--server-call", calls.server]
    command += ["--life", str(life.number), "--resume", life.resume]
    command += ["--absent", ",".join(map(str, sorted(life.absent))), "--why", life.why]
    with os.fdopen(open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, env=environ, start_new_session=True, bufsize=0, **pipes)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return UnitProcess(place.rank, process, LineReader(process.stdout.fileno()), log)
