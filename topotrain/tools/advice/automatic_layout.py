"""The layout of a job with `cluster { auto: true }`.

It is the fastest synchronous layout on this machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from topotrain.config.job import Job
from topotrain.config.job_file import dumps_cluster
from topotrain.tools.advice.advice import Advice, Predictor, Wishes, advise
from topotrain.tools.advice.advice_text import speed
from topotrain.tools.advice.auto_rules import without_layout
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.probe.probe_file import Probe

WISHES = Wishes(sync=True, own_fields=True, within_s=10.0)
"""The job waits for the rehearsals."""


@dataclass(frozen=True, slots=True)
class AutomaticLayout:
    """The chosen layout. job: as if its cluster block had been written by hand."""

    job: Job
    advice: Advice

    def explain(self) -> str:
        """Return two lines: which layout and why, and the block to write by hand."""
        winner = self.advice.winner
        kept = dumps_cluster(without_layout(self.job).cluster).splitlines()
        # Each field of a synchronous layout is a line below "cluster {".
        lines = [line for line in dumps_cluster(self.job.cluster).splitlines()[1:-1] if line not in kept]
        block = " ".join(["cluster {", *(line.strip() for line in lines), "}"])
        following = "".join(f"; next: {each.candidate.label}, {speed(each)}" for each in self.advice.preferred[1:2])
        return (
            f"auto: {winner.candidate.label}: {speed(winner)}; {winner.reason}{following}\n"
            f"auto: by hand this is {block}"
        )


def choose(
    job: Job, probe: Probe, predictor: Predictor = predict, show: Callable[[str], None] = lambda text: None
) -> AutomaticLayout:
    """Choose the layout of a job on the machine of the probe.

    Raises ConfigError where none fits.
    """
    memory = probe.machine.memory_bytes or None
    machines = replace(Machines(hosts=0, cores=probe.machine.cores).with_job(job), memory_bytes=memory)
    advice = advise(probe, machines, job, WISHES, predictor, show)
    return AutomaticLayout(advice.winner.candidate.job, advice)
