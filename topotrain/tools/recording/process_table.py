"""The processes of a recorded job."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from topotrain.tools.recording.history_series import Moment
from topotrain.tools.recording.process_figures import ProcessTrack
from topotrain.tools.recording.recorded_layout import RecordedLayout


class ProcessTable:
    """The processes of the present layout.

    number: of the event with which the job begins.
    """

    def __init__(self, number: int) -> None:
        self.changed = number
        """The number of the event that changed a process last."""
        self._processes: dict[str, ProcessTrack] = {}
        self._groups: dict[int, list[ProcessTrack]] = {}
        """The workers of each group."""
        self._servers_in_workers = False

    @property
    def by_name(self) -> Mapping[str, ProcessTrack]:
        """The processes by name."""
        return self._processes

    def all(self) -> Collection[ProcessTrack]:
        """Return all processes."""
        return self._processes.values()

    def workers(self, group: int) -> Sequence[ProcessTrack]:
        """Return the workers of a group."""
        return self._groups.get(group, ())

    def use(self, layout: RecordedLayout, number: int) -> None:
        """Use a layout from now on. The tracks of processes that stay are kept."""
        known = self._processes
        self._processes, self._groups = {}, {}
        for address, unit, host in layout.residents():
            name = str(address)
            track = known.get(name) or ProcessTrack(address, unit, host)
            track.place(unit, host)
            self._processes[name] = track
            if track.is_worker:
                self._groups.setdefault(address.group, []).append(track)
        self._servers_in_workers = layout.servers_in_workers
        self.change(number)

    def change(self, number: int) -> None:
        """Note that this event has changed a process."""
        self.changed = number

    def end_all(self, now: Moment, state: str) -> None:
        """Let all processes without a reported end stop with the job."""
        for process in self.all():
            if process.states.now and process.is_present:
                process.stop_with_job(now, state)

    def mirror(self, process: ProcessTrack, now: Moment) -> None:
        """Give the servers inside a worker's process its state."""
        if not self._servers_in_workers or not process.is_worker:
            return
        for other in self.all():
            same = other.address.index == process.address.index or other.address.index == 0
            if not other.is_worker and other.unit == process.unit and same:
                other.enter(now, process.states.now or "starting")

    def as_data(self) -> list[dict[str, Any]]:
        """Return the processes as in the view."""
        return [process.as_data() for process in self.all()]

    def states_since(self, cursor: int, whole: bool) -> dict[str, Any]:
        """Return the states of processes behind a cursor, as in the view.

        whole: also the processes without such states.
        """
        states = {name: process.states.since(cursor) for name, process in self._processes.items()}
        return {name: entries for name, entries in states.items() if whole or entries}
