"""The recording of a job that this process starts."""

from dataclasses import replace
from pathlib import Path

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import make_folder
from topotrain.config.topology import Topology
from topotrain.launch.agent.workspace import RECORDED, RunFolder
from topotrain.tools.replay.decision_file import DecisionFile, recorded

OPTION = "--record"


class JobRecord(RunFolder):
    """Lets the processes of a job record, and collects what they have written.

    Args:
        job, topology: of the job that is asked for.
    """

    def __init__(self, job: Job, topology: Topology) -> None:
        self.drops_snapshots = topology.synced and wants_snapshots(job)
        """Whether the job writes no snapshots: one comes by the clock, and exchanges of server groups wait for it."""
        self.job = replace(job, snapshot_s=0.0, checkpoint_freq=0) if self.drops_snapshots else job
        """The job to run."""
        self._folder = Path()
        self._starts = 0

    def fill(self, run_dir: Path) -> None:
        self._folder = run_dir / RECORDED
        self._starts += 1
        make_folder(self._folder)

    def collect(self, whole: bool) -> DecisionFile:
        """Return the recording of the job that has ended.

        whole: it came to its end.

        Raises:
            ConfigError: all processes were started again meanwhile.
            OSError: the parts cannot be read.
        """
        if self._starts > 1:
            accepted = "is not written: the whole job was started again, and a recording is of one start"
            raise ConfigError(OPTION, None, accepted)
        return recorded(self.job, whole, self._folder)


def check_recordable(job: Job, topology: Topology, resumed: bool) -> None:
    """Raise ConfigError for a job that cannot be recorded.

    The order of decisions is not enough to make the decisions of such a job again.
    """
    cluster = job.cluster
    if resumed:
        raise ConfigError(OPTION, None, "cannot be used for a job that goes on from a snapshot")
    if cluster.replicas > 1:
        raise ConfigError("cluster.replicas", cluster.replicas, f"must be 1 with {OPTION}")
    if cluster.backup:
        why = "a worker learns at any moment that a step was made without it"
        raise ConfigError("cluster.backup", cluster.backup, f"must be 0 with {OPTION}: {why}")
    if topology.torch_collective:
        raise ConfigError("cluster.engine", cluster.engine, f"must be kOwn with {OPTION}")
