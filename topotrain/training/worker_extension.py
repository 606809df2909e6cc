"""Extensions of a worker: a `WorkerExtension` adds a feature to its steps.

The worker names no feature.
"""

from dataclasses import dataclass, fields

from topotrain.core.client.client_context import StepEnd, StepOutcome


class WorkerExtension:
    """One feature's part of a worker's steps. Each method does nothing here."""

    def weight(self) -> float | None:
        """The weight of the next commit. None: samples, or what `tt.weight` was given."""
        return None

    def before_clip(self) -> None:
        """The script asks for a bound on the norm. Raises RuntimeError to refuse it."""

    def before_step(self) -> None:
        """The script has called step(), and nothing of it is sent. Raises RuntimeError."""

    def before_commit(self, step: int, end: StepEnd) -> None:
        """The step is about to be committed; all of the worker's own gradients are sent."""

    def before_change(self) -> None:
        """The script is about to change parameters between two steps. Raises PeerLost."""

    def repeats_change(self) -> bool:
        """Whether the script repeats a change that an earlier process has made here."""
        return False

    def after_commit(self, outcome: StepOutcome | None) -> None:
        """A step was applied, skipped, or made without this worker. None: not known yet."""

    def after_step(self, outcome: StepOutcome | None) -> None:
        """The step is over. None: made alone, or its outcome is not known yet."""

    def step_reported(self) -> None:
        """Every `after_step` has been called."""

    def after_epoch(self) -> None:
        """The others have made steps while this worker had no batch left."""

    def leave_epoch(self, epoch: int) -> bool:
        """The script left a loop over the loader. Returns whether the servers know."""
        return False

    def job_over(self) -> None:
        """The job has ended, and its result is in the model of worker (0,0).

        The extension that was attached last is called first.
        """

    def left_job(self) -> None:
        """The worker leaves while the job goes on."""

    def rejoin(self, taken: int) -> StepOutcome | None:
        """This process replaces one that is gone. Returns the group's step, if known.

        taken: the number of the group's steps that the tally counts already.
        """
        return None


_Extensions = tuple[WorkerExtension, ...]


@dataclass(slots=True)
class WorkerHooks:
    """For each hook, the extensions of one worker that override it, in their order."""

    weight: _Extensions = ()
    before_clip: _Extensions = ()
    before_step: _Extensions = ()
    before_commit: _Extensions = ()
    before_change: _Extensions = ()
    repeats_change: _Extensions = ()
    after_commit: _Extensions = ()
    after_step: _Extensions = ()
    step_reported: _Extensions = ()
    after_epoch: _Extensions = ()
    leave_epoch: _Extensions = ()
    job_over: _Extensions = ()
    left_job: _Extensions = ()
    rejoin: _Extensions = ()

    def add(self, extension: WorkerExtension) -> None:
        """Call this extension from now on."""
        # The fields have the names of the hooks. Only overridden hooks are called, so that one without a user costs an
        # empty loop in each step.
        for hook in fields(self):
            if getattr(type(extension), hook.name) is not getattr(WorkerExtension, hook.name):
                setattr(self, hook.name, (*getattr(self, hook.name), extension))
