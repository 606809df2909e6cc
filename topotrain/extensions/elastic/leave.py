"""How a worker leaves a job that goes on without it: between two of its steps, and without the end of its script.

Rule: servers learn of it as of any lost worker (`membership`): what was read and not applied is handed out again. So
nothing has to be said here; what is done in order is that no step is torn, and that the script is told.
"""

from contextlib import suppress

from topotrain.training.context import Context


class GroupLeaving(BaseException):
    """Raised where the script asks for a batch; no `except Exception` of a script keeps it."""

    def __init__(self) -> None:
        super().__init__("this worker's group leaves the job")


def leave(here: Context) -> None:
    """After the script has been stopped: what it had under way is over, and what it did is told once more."""
    with suppress(Exception):  # whatever is missing, the others do not miss it
        if here.worker is not None:
            here.worker.client.values.settle()
        if here.loader is not None:
            here.loader.close()
    if here.worker is not None:
        here.worker.leave_job()
