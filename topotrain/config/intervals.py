"""Schedules of periodic work: "every `freq` steps from step `after` on"."""

from dataclasses import dataclass

from topotrain.config.job import Job


@dataclass(frozen=True, slots=True)
class StepInterval:
    """A schedule; freq 0: never."""

    freq: int
    after: int

    @staticmethod
    def of(job: Job, what: str) -> "StepInterval":
        """Return the job's "disp", "test", "validate" or "checkpoint" schedule."""
        return StepInterval(getattr(job, f"{what}_freq"), getattr(job, f"{what}_after"))

    def due(self, step: int) -> bool:
        """Whether it is time when `step` steps are done."""
        # As in SINGA: the first time is at step `after`, also at step 0.
        return self.freq > 0 and step >= self.after and (step - self.after) % self.freq == 0

    def passed(self, step: int) -> int:
        """Return how often it was time from step 1 up to this one."""
        # For callers that do not see every step: a rise of the count shows that the work is due.
        if not self.freq or step < max(1, self.after):
            return 0
        # The first time is step `after` itself; step 0 does not count.
        return (step - self.after) // self.freq + (self.after > 0)


def wants_snapshots(job: Job) -> bool:
    """Whether the user wants snapshots, by time or by steps."""
    return job.snapshot_s > 0 or job.checkpoint_freq > 0
