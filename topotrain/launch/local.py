"""The launcher that runs all units of a job on this host.

When a whole job restarts, each attempt has its own `RunLoop`. All attempts share one claim on the workspace and, while
it runs, one forkserver.
"""

import secrets
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from topotrain.config.job import Job
from topotrain.config.topology import Topology, layout
from topotrain.extensions.elastic.eligibility import absent_groups
from topotrain.launch import AlwaysTaken, EventListener, JobOutcome, JobWatch, Launcher, Outlet, UnitPlace
from topotrain.launch.agent.children import AttemptInfo, EntryPoints
from topotrain.launch.agent.forkserver_handle import ForkserverHandle
from topotrain.launch.agent.stop_signals import signals
from topotrain.launch.agent.workspace import LOGS, PROCESSES_FILE, RunFolder, claimed, prepare
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.job_shutdown import LauncherContext, RunFiles
from topotrain.launch.recovery.recovery_policy import recovery
from topotrain.launch.recovery.resume_point import ResumeSource
from topotrain.launch.registered_job import RegisteredJob, listed
from topotrain.launch.run_loop import RunLoop
from topotrain.launch.shared_forkserver import SharedForkserver


@dataclass(frozen=True, slots=True)
class LocalLauncher(Launcher):
    """Starts every unit on this host.

    calls: the functions that child processes run. Only tests change it.
    forkserver: the socket of a running forkserver of another process. "": the job starts its own.
    shared: a forkserver that was started for this job.
    profile: the step to profile, counted from 1; 0 for none. The processes write its spans into the run directory.
    resume: the snapshot that the job resumes from. "": the job starts at step 0.
    outlet: where the program's output goes.
    watch: knows the state of the job.
    folder: fills the run directory of each start.
    """

    calls: EntryPoints = field(default_factory=EntryPoints)
    forkserver: str = ""
    shared: SharedForkserver | None = None
    profile: int = 0
    resume: str = ""
    outlet: Outlet = field(default_factory=AlwaysTaken)
    watch: JobWatch = field(default_factory=JobWatch)
    folder: RunFolder = field(default_factory=RunFolder)

    def start(self, job: Job, topology: Topology, on_event: EventListener) -> JobOutcome:
        """Run the whole job, and leave no process of it behind.

        `on_event` is called on this thread. An exception in it ends the job. On the main thread SIGINT, SIGTERM and
        SIGHUP end the job in order; the last two allow a last snapshot (`grace`). A second signal ends the job at once.
        Raises ConfigError, before anything is started, for a workspace that is in use or not writable.
        """
        # The mark is new for each start: `sweep` must not find processes of another job.
        began, mark = time.monotonic(), secrets.token_hex(16)
        with claimed(job) as workspace, listed(job, watch=self.watch) as place, signals() as stop:
            goes_on = recovery(job, topology, began)
            log = workspace / "run" / "forkserver.log"
            with closing(ForkserverHandle(self.forkserver, log, mark, self.shared)) as forkserver:
                files = RunFiles(workspace / PROCESSES_FILE, workspace / LOGS, workspace / "run")
                requests = JobRequests() if place is None else place.requests
                host = LauncherContext(
                    *(on_event, files, stop, forkserver, mark, place),
                    outlet=self.outlet,
                    requests=requests,
                )
                attempt = AttemptInfo(0, self.resume, absent_groups(job, topology))
                # Before the first attempt: it notes which snapshots an earlier job has left.
                origin = ResumeSource(workspace, self.resume)
                try:
                    while True:
                        run = RunLoop(job, topology, host, goes_on)
                        outcome = self._run(run, attempt, job, workspace, place)
                        # A signal that comes during a restart ends the job.
                        again = run.shutdown.again and not stop.came
                        if goes_on is None or not again:
                            break
                        why, resized = "", run.executor.resized
                        if resized is None:
                            # The budget of restarts is kept, and all else begins anew.
                            goes_on.begin_attempt()
                        else:
                            job, topology = resized, layout(resized.cluster, link_mbit=topology.link_mbit)
                            goes_on.begin_resized(job, topology)
                            why = f"the job goes on with nworkers_per_group: {job.cluster.nworkers_per_group}"
                        resume = origin.newest(host)
                        attempt = AttemptInfo(attempt.number + 1, resume, goes_on.absent_groups, why)
                        if place is not None:
                            # The addresses of the last attempt must not be found in the store.
                            place.again()
                finally:
                    for promise in host.promises:
                        promise.send("the job ended before it trained again")
            if stop.came:
                # Before the block of the terminal's output ends, which would wait for its reader.
                self.outlet.hurry()
            outcome = replace(outcome, seconds=time.monotonic() - began)
            if stop.came and (outcome.code or run.shutdown.again):  # else the job was complete before its last snapshot
                outcome = replace(outcome, code=128 + stop.came[0], cause=None)
            if place is not None:
                place.ended(outcome)
            return outcome

    def _run(
        self, run: RunLoop, attempt: AttemptInfo, job: Job, workspace: Path, place: RegisteredJob | None
    ) -> JobOutcome:
        """Run one attempt from its first process to its last."""
        try:
            url = prepare(job, workspace, self.profile, self.folder)
            url, units = url if place is None else place.url, run.topology.units
            folder, mbit = str(workspace / "run"), run.topology.link_mbit
            places = [UnitPlace(u.rank, len(units), url, folder, link_mbit=mbit) for u in units]
            run.start(self.calls, places, attempt)
            return run.run()
        finally:
            # Also after an exception in `on_event`: no process is left behind.
            run.destroy()
