"""The position of a worker's script, and how a fresh process gets there."""

from abc import abstractmethod
from collections.abc import Iterator

from topotrain.training.data.map_dataset import ResumeRecorder


class ScriptPosition(ResumeRecorder):
    """Position of a script, for `tt.epochs`, `tt.keep` and a job's end."""

    in_epochs: bool
    """Whether the script is in the middle of a loop over `tt.epochs`."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps that this worker had taken before this process began."""

    @abstractmethod
    def read_ahead(self) -> None:
        """The loop draws batches before it uses them, and calls `use` for each."""

    @abstractmethod
    def use(self) -> None:
        """The loop is about to use the oldest batch that it has drawn.

        Raises:
            GroupLeaving: the worker's group leaves the job.
        """

    @abstractmethod
    def remaining(self, count: int) -> range:
        """The epochs of the script's next loop over `range(count)`, without beginning it."""

    @abstractmethod
    def epochs(self, count: int) -> Iterator[int]:
        """Begin the script's next loop: the epochs of `range(count)` that are left."""

    @abstractmethod
    def restore_kept(self, name: str) -> None:
        """Load what an object of `tt.keep` held, if there was one of this name."""

    @abstractmethod
    def finish(self) -> None:
        """The script has ended."""
