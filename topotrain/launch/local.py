"""All units of a job on this machine.

Rule: the launcher decides when a job is over, see running.py; `start` leaves no process behind.
"""

import signal
from dataclasses import dataclass, field, replace

from topotrain.events import Notice
from topotrain.job import Job
from topotrain.launch import Launcher, OnEvent, Outcome, Place
from topotrain.launch.children import Calls
from topotrain.launch.listed import listed
from topotrain.launch.running import Grounds, Run, signals
from topotrain.launch.workspace import LOGS, PROCESSES_FILE, claimed, prepare
from topotrain.topology import Topology


@dataclass(frozen=True, slots=True)
class LocalLauncher(Launcher):
    """Starts every unit on this machine.

    `calls` says what a child runs; only tests change it. `forkserver` is the socket of one that is running already and
    belongs to somebody else; without it the job has its own. `profile`: the step whose spans the processes leave in the
    run directory, counted from 1; 0 for none.
    """

    calls: Calls = field(default_factory=Calls)
    forkserver: str = ""
    profile: int = 0

    def start(self, job: Job, topology: Topology, on_event: OnEvent) -> Outcome:
        """Run the whole job; no process of it is left on return.

        `on_event` is called on this thread, and an exception of it ends the job. On the main thread SIGINT, SIGTERM
        and SIGHUP end the job in order, a second one at once. Raises ConfigError, before anything is started, for a
        workspace that is in use or cannot be written.
        """
        with claimed(job) as workspace, listed(job) as place, signals() as heard:
            run_dir = workspace / "run"
            grounds = Grounds(workspace / PROCESSES_FILE, workspace / LOGS, run_dir / "forkserver.log")
            run = Run(job, topology, on_event, grounds, heard, self.forkserver, place)
            try:
                url, units = prepare(job, workspace, self.profile), topology.units
                url = url if place is None else place.url
                run.begin(self.calls, [Place(unit.rank, len(units), url, str(run_dir)) for unit in units])
                outcome = run.watch()
            finally:
                run.destroy()
            if place is not None:
                place.ended(outcome)
                if place.stopped:
                    on_event(Notice("launcher", "stopped by `topotrain jobs stop`"))
                    return replace(outcome, code=128 + signal.SIGINT, cause=None)
            return outcome
