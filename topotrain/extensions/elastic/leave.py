"""How a worker leaves a job that continues without it, between two steps.

The servers handle it as any lost worker (`membership`): batches that were read and not applied are leased again.
This module only lets the step finish, and ends the script.
"""

from contextlib import suppress

from topotrain.training.context import Context


class GroupLeaving(BaseException):
    """Raised where the script requests a batch."""

    # No subclass of Exception, so that a script's `except Exception` does not catch it.

    def __init__(self) -> None:
        super().__init__("this worker's group leaves the job")


def leave(here: Context) -> None:
    """End what the stopped script had begun, and report its last counts."""
    # The other groups continue without this worker, so nothing that is missing here matters to them.
    with suppress(Exception):
        if here.worker is not None:
            here.worker.client.values.settle()
        if here.loader is not None:
            here.loader.close()
    if here.worker is not None:
        here.worker.leave_job()
