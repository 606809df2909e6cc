"""The composition of a worker's process: the only place that names its extensions.

Tables and split models attach their client extensions (`TableClient`, `NetworkChannel`) when the script makes the first
table, or splits the model.
"""

from topotrain.config.job import Compression
from topotrain.config.topology import Topology
from topotrain.core.client.client_extension import ClientExtension
from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient
from topotrain.extensions.backup_workers.replay_batches import BackupExtension
from topotrain.extensions.compression.compression_client import CompressionClient
from topotrain.extensions.resume.resume_extension import ResumeExtension
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.tables.frontend.table_extension import TableExtension
from topotrain.parallel.api.prepare_split import SplitExtension
from topotrain.training.context import PrepareExtension
from topotrain.training.data.data_client import DataClient


def prepare_extensions() -> tuple[PrepareExtension, ...]:
    """Return the extensions of `tt.prepare`, in the order in which they are called.

    Every `Context` gets new ones.
    """
    return SplitExtension(), TableExtension(), BackupExtension(), ResumeExtension()


def client_extensions(topology: Topology) -> tuple[ClientExtension, ...]:
    """Return the extensions of one worker's client in a job of this layout."""
    cluster = topology.cluster
    found: list[ClientExtension] = [DataClient(cluster.max_staleness is not None), WorkerStateClient()]
    if cluster.backup:
        found.append(BackupWorkersClient())
    if cluster.compression is not Compression.kNone:
        found.append(CompressionClient(cluster))
    return tuple(found)
