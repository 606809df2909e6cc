"""What a worker's process is made of: the only place that names the features which take part in `tt.prepare`."""

from collections.abc import Callable
from dataclasses import dataclass

from topotrain.comm.router import RouterConfig
from topotrain.config.topology import Address
from topotrain.core.profiling.spans import SILENT
from topotrain.extensions.backup_workers.replay_batches import BackupExtension
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotWriter
from topotrain.extensions.resume.resume_extension import ResumeExtension
from topotrain.extensions.tables.frontend.table_extension import TableExtension
from topotrain.launch.runtime.process_host import LongWait, Recorders, WorkerConnections, untold
from topotrain.parallel.api.prepare_split import SplitExtension
from topotrain.training.context import Connector, PrepareExtension


def prepare_extensions() -> tuple[PrepareExtension, ...]:
    """The features of a worker's process, in the order in which they are called; fresh ones for each `Context`."""
    return SplitExtension(), TableExtension(), BackupExtension(), ResumeExtension()


@dataclass(frozen=True, slots=True)
class WorkerConnector(Connector):
    """Opens a worker's connections; the fields are those of `WorkerConnections`."""

    serving: Callable[[Address, tuple[str, ...]], None] = lambda *_: None
    trouble: Callable[[], None] = lambda: None
    recorder: Recorders = lambda *_: SILENT
    writer: SnapshotWriter | None = None
    long_wait: LongWait = untold

    def connect(self, place: RouterConfig, me: Address) -> WorkerConnections:
        """As `context.Connector` has it."""
        server = (self.serving, self.trouble, self.recorder, self.writer)
        return WorkerConnections(place, me, *server, self.long_wait)
