"""How far predictions were from jobs that were then measured.

`python -m benchmarks.predictions --held-out` predicts forty jobs on which nothing in the product was tuned, runs them,
and compares the time of a step. Each figure here is the error within which nine of ten of these jobs are, by what is
between the processes. docs/prediction.md has the summary.
"""

from topotrain.config.job import Job, TransportChoice
from topotrain.tools.prediction.machines import Machines

SHARED_MEMORY, TCP, LINK, STRAGGLER = 0.37, 0.24, 0.21, 0.43


def expected_error(job: Job, machines: Machines) -> float:
    """Return the relative error to expect of a rehearsed step.

    0.2 is a fifth more or less.
    """
    if any(times > 1 for times in machines.stragglers.values()):
        return STRAGGLER
    if machines.hosts > 1 or machines.link is not None:
        return LINK
    return TCP if job.cluster.transport is TransportChoice.kTcp else SHARED_MEMORY
