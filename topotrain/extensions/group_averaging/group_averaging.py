"""Elastic averaging and gossip between server groups, as an extension of a server."""

from topotrain.config.job import Agreement, Job
from topotrain.config.topology import Address, Topology
from topotrain.core.model.schema import BucketValues
from topotrain.core.protocol import Message
from topotrain.core.server.group_sync import GroupSync
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ExchangeExtension, Outbox
from topotrain.extensions.group_averaging.averaging_messages import PairTaken
from topotrain.extensions.group_averaging.averaging_rules import moving_rate
from topotrain.extensions.group_averaging.elastic_averaging import ElasticAveraging
from topotrain.extensions.group_averaging.gossip_averaging import GossipAveraging


class GroupAveraging(ExchangeExtension):
    """The agreement of a server with the other groups where it is kElastic or kGossip.

    Args:
        server: the server.
        job, topology: its job.
    """

    messages = (PairTaken,)

    def __init__(self, server: Server, job: Job, topology: Topology) -> None:
        self._server, self._job, self._groups = server, job, topology.server_groups

    def group_sync(self, values: BucketValues) -> GroupSync | None:
        group, cluster = self._server.me.group, self._job.cluster
        if cluster.agreement is Agreement.kElastic:
            return ElasticAveraging(group, self._groups, values, cluster.sync_freq, moving_rate(cluster))
        return GossipAveraging(group, self._groups, values, cluster.sync_freq, self._job.seed)

    def handle(self, sender: Address, message: Message) -> Outbox:
        """A partner has a reply of this server."""
        group_sync = self._server.state.known.group_sync
        if isinstance(message, PairTaken) and isinstance(group_sync, GossipAveraging):
            group_sync.forget_reply(sender.group, message)
        return ()
