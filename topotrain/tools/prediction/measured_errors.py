"""How far predictions were from jobs that were then measured.

`python -m benchmarks.predictions --held-out` predicts forty jobs on which nothing in the product was tuned, runs them,
and compares the time of a step. All have two workers, on the probed machine. Each figure here is the error within which
nine of ten of these jobs are, by what is between the processes. docs/prediction.md has the summary.
"""

from topotrain.config.job import Job, TransportChoice
from topotrain.config.topology import Topology
from topotrain.tools.prediction.machines import Machines

WORKERS = 2
SHARED_MEMORY, TCP, LINK, STRAGGLER = 0.37, 0.24, 0.21, 0.43
LARGEST = STRAGGLER


def error_in_words(error: float | None) -> str:
    """Return an expected error as it stands behind a figure, such as "± 21 %"."""
    return "(error not measured)" if error is None else f"± {error * 100:.0f} %"


def expected_error(job: Job, machines: Machines, topology: Topology, probed_cores: int) -> float | None:
    """Return the relative error to expect of a step; None: it was not measured.

    0.2 is a fifth more or less.
    """
    if topology.worker_groups * topology.workers_per_group != WORKERS or machines.cores not in (None, probed_cores):
        return None
    if any(times > 1 for times in machines.stragglers.values()):
        return STRAGGLER
    if machines.hosts > 1 or machines.link is not None:
        return LINK
    return TCP if job.cluster.transport is TransportChoice.kTcp else SHARED_MEMORY
