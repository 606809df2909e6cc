"""The extensions of a worker's client: the only place that names them.

Tables and split models attach their client extensions (`TableClient`, `NetworkChannel`) when the script makes the first
table, or splits the model.
"""

from topotrain.config.job import Compression
from topotrain.config.topology import Topology
from topotrain.core.client.client_extension import ClientExtension
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.worker_values.value_client import ValueClient
from topotrain.training.data.data_client import DataClient


def client_extensions(topology: Topology) -> tuple[ClientExtension, ...]:
    """Return the extensions of one worker's client in a job of this layout."""
    cluster = topology.cluster
    # Other groups wait for the steps of this one.
    waited_for = cluster.max_staleness is not None or cluster.outer is not None
    found: list[ClientExtension] = [DataClient(waited_for), WorkerStateClient(), ValueClient(cluster)]
    if cluster.backup:
        from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient

        found.append(BackupWorkersClient())
    # A worker of a group that cannot recover in place is never told to.
    if cluster.nworkers_per_group > 1 and not cluster.backup:
        from topotrain.extensions.in_place_recovery.in_place_client import InPlaceClient

        found.append(InPlaceClient())
    if cluster.outer is not None:
        from topotrain.extensions.inner_state.inner_state_client import InnerStateClient
        from topotrain.extensions.outer_optimizer.round_client import RoundClient

        found += [RoundClient(cluster.fragments), InnerStateClient()]
    if cluster.compression is not Compression.kNone:
        from topotrain.extensions.compression.compression_client import CompressionClient

        found.append(CompressionClient(cluster))
    if cluster.outer is not None:
        from topotrain.extensions.outer_optimizer.grace.exchange_times import ExchangeTimes
        from topotrain.extensions.outer_optimizer.grace.grace_window import has_windows

        if has_windows(cluster):
            found.append(ExchangeTimes())
    return tuple(found)
