"""A start of a job with its present layout, and its header.

The header describes the start in recordings and exports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.events import Resized
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.recording.recorded_layout import layout_data
from topotrain.tools.recording.recorded_lines import RecordingHeader


@dataclass(frozen=True)
class JobStart:
    """One start of a job.

    started: seconds since 1970. resumed: the job goes on from a snapshot. hosts: the names of the units' hosts, by
    rank; empty: all run here.
    """

    job: Job
    topology: Topology
    started: float
    resumed: bool = False
    hosts: Sequence[str] = ()

    def after(self, event: Resized) -> "JobStart":
        """Return the same start with the layout that it has from this event on."""
        return replace(self, topology=resized_layout(self.topology, event.workers))

    @cached_property
    def header(self) -> RecordingHeader:
        """The header.

        The arguments of the program are not in it: a recording may be shown to others.
        """
        from importlib.metadata import version

        described: dict[str, Any] = {
            "name": self.job.name,
            "framework": self.topology.framework,
            "workspace": self.job.workspace,
            "program": self.job.program,
            "block": job_file.dumps_cluster(self.topology.cluster),
        }
        bound = self.topology.cluster.max_staleness
        if bound is not None:
            described["staleness_bound"] = bound
        return RecordingHeader(
            topotrain=version("topotrain"),
            started=self.started,
            resumed=self.resumed,
            job=described,
            layout=layout_data(self.topology, self.hosts),
        )
