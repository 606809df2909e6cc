"""The launcher's part of a replay.

It kills workers where the recording has their deaths, and ends the job where the replay is to stop.
"""

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from topotrain.config.job import ConfigError
from topotrain.config.private_files import make_folder, open_file, write_text
from topotrain.core.events import Event, ReplayReport, Started
from topotrain.extensions.decision_record.process_order import DIFFERS, ENDED, REACHED, SETTINGS, WHOLE_LIFE
from topotrain.extensions.decision_record.replay_order import ReplayOrder
from topotrain.launch.agent.workspace import REPLAYED, RunFolder
from topotrain.tools.replay.decision_file import DecisionFile

Until = tuple[int, int]
"""A server group, and its version."""


class ReplayStopped(Exception):
    """The replay has come to the place where it stops.

    This is the version at which it was to stop, or the end of a job that was interrupted.
    """


class RecordedDeaths:
    """Which servers have to have all messages of a process before it is killed.

    The workers of a group die together. A process is known by the name of its worker, and its number from 0.
    """

    def __init__(self, record: DecisionFile) -> None:
        self._by_group: dict[tuple[int, int], set[tuple[str, str]]] = {}  # group, number -> worker, server
        lives = [
            (worker, life, server)
            for server in record.servers
            for worker, known in ReplayOrder(record.entries(server), record.whole).lives.items()
            for life in known
        ]
        # Server (0,0) serves workers of other servers, and they tell only their own ones that they have finished.
        ended = {(worker, life.number) for worker, life, _ in lives if life.ended}
        for worker, life, server in lives:
            if (worker, life.number) not in ended:
                self._by_group.setdefault((worker.group, life.number), set()).add((str(worker), str(server)))

    def due(self, worker: str, number: int, whole: Mapping[tuple[str, int], set[str]]) -> set[str]:
        """Return the workers that can be killed now.

        Each server that needs messages of one of these processes has all of them. Otherwise the result is empty.

        whole: worker and number of its process -> the servers that have all messages of this process.
        """
        group = int(worker.split(" ")[1].split("/")[0])
        wanted = self._by_group.get((group, number), set())
        if all(server in whole.get((each, number), set()) for each, server in wanted):
            return {each for each, _ in wanted}
        return set()


class ReplayRun(RunFolder):
    """Puts a recording into the run directory, and follows the job.

    Args:
        record: the recording.
        until: where to stop. None: at the end.
    """

    def __init__(self, record: DecisionFile, until: Until | None) -> None:
        self._record, self._until = record, until
        self._deaths = RecordedDeaths(record)
        self._whole: dict[tuple[str, int], set[str]] = {}  # worker, number of its process -> servers
        self._processes: dict[str, tuple[int, int | None]] = {}  # worker -> number of its process, pidfd
        self._due: set[tuple[str, int]] = set()
        self._stopped: set[str] = set()
        self.folder = Path()
        """Where the servers leave the values of the last version."""

    def fill(self, run_dir: Path) -> None:
        if self.folder.name:
            raise ConfigError("", None, "the whole job starts again, which the recording does not have", "replay")
        self.folder = run_dir / REPLAYED
        make_folder(self.folder)
        for name, data in self._record.parts.items():
            with os.fdopen(open_file(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(data)
        write_text(self.folder / SETTINGS, json.dumps({"whole": self._record.whole, "until": self._until}))

    def __call__(self, event: Event) -> None:
        """Receive an event of the job.

        Raises:
            ReplayStopped: the replay is where it is to stop.
            ConfigError: the program does not do what the recording has.
        """
        match event:
            case Started(who=who, pid=pid) if who.startswith("worker"):
                number = self._processes[who][0] + 1 if who in self._processes else 0
                self._forget(who)
                self._processes[who] = number, _opened(pid)
                self._kill_due()
            case ReplayReport(what=what, who=who, text=text) if what == DIFFERS:
                raise ConfigError("", None, text, "replay")
            case ReplayReport(what=what, who=who, worker=worker, number=number) if what == WHOLE_LIFE:
                self._whole.setdefault((worker, number), set()).add(who)
                self._due |= {(each, number) for each in self._deaths.due(worker, number, self._whole)}
                self._kill_due()
            case ReplayReport(what=what, who=who) if what in (REACHED, ENDED):
                self._stopped.add(who)
                if self._stopped >= self._awaited(what):
                    raise ReplayStopped

    def _awaited(self, what: str) -> set[str]:
        """Return the servers that have to stop before the job ends."""
        groups = None if what == ENDED or self._until is None else {self._until[0]}
        return {str(server) for server in self._record.servers if groups is None or server.group in groups}

    def _kill_due(self) -> None:
        for worker, number in sorted(self._due):
            known, descriptor = self._processes.get(worker, (-1, None))
            if known == number:
                self._due.discard((worker, number))
                # It may have ended by itself.
                with contextlib.suppress(ProcessLookupError):
                    if descriptor is not None:
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def _forget(self, worker: str) -> None:
        descriptor = self._processes.get(worker, (-1, None))[1]
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        for worker in self._processes:
            self._forget(worker)
        self._processes.clear()


def _opened(pid: int) -> int | None:
    """Return the descriptor of a process; None: it has ended."""
    # A pidfd never signals another process, also when the kernel has reused the pid.
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None
