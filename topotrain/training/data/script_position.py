"""Where the script of a worker stands, and how a fresh process gets there."""

from collections.abc import Iterator
from typing import Protocol

from topotrain.training.data.distributed_loader import ResumeRecorder


class ScriptPosition(ResumeRecorder, Protocol):
    """What `tt.epochs`, `tt.keep` and the end of a job ask of the feature that resumes scripts."""

    @property
    def steps(self) -> int:
        """Steps that this worker had taken before this process began."""
        ...

    @property
    def in_epochs(self) -> bool:
        """Whether the script is in the middle of a loop over `tt.epochs`."""
        ...

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs of `range(count)` that are left."""
        ...

    def restore_kept(self, name: str) -> None:
        """Load what an object of `tt.keep` held, if there was one of this name."""
        ...

    def finish(self) -> None:
        """The script has ended."""
        ...
