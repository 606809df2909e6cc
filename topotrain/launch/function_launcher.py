"""The launcher of a function of this process, such as one of a notebook.

The processes of the job are forks of a fork of this process. See `agent/forked_forkserver.py` for the reason.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.launch import EventListener, JobOutcome, JobWatch, Launcher
from topotrain.launch.agent.children import EntryPoints
from topotrain.launch.agent.forked_forkserver import ForkedForkserver
from topotrain.launch.fork_safety import check, threads_of_forks
from topotrain.launch.local import LocalLauncher
from topotrain.launch.recovery.resume_point import asked_for
from topotrain.launch.runtime.entry_points import run_worker
from topotrain.training.context import current

_WORKER = "this process:function"


@dataclass(frozen=True, slots=True)
class FunctionLauncher(Launcher):
    """Runs a function as the program of a job.

    function: it is called in each worker. caller: the name in errors. watch: as for `LocalLauncher`.
    """

    function: Callable[[], object]
    caller: str = field(default="tt.notebook_launch")
    watch: JobWatch = field(default_factory=JobWatch)

    def start(self, job: Job, topology: Topology, on_event: EventListener) -> JobOutcome:
        """Run the whole job, and leave no process of it behind.

        Raises ConfigError, before anything is started, also where this process must not be forked.
        """
        if current() is not None:
            accepted = "must be called in a process of its own, and this one is a worker of a job already"
            raise ConfigError(self.caller, None, accepted)
        check(self.caller)
        job = replace(job, threads=threads_of_forks(job.threads))
        resume = asked_for(job, Path(job.workspace))
        served = ForkedForkserver({_WORKER: partial(run_worker, function=self.function)})
        with closing(served):
            calls = EntryPoints(worker=_WORKER)
            return LocalLauncher(calls, served.path, resume=resume, watch=self.watch).start(job, topology, on_event)
