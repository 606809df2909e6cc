"""The messages that decide on a step.

They are commits of workers, and votes and decisions between servers.
"""

from collections.abc import Iterator, Sequence

from topotrain.config.topology import Topology
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_frames import BucketShape, Parcel
from topotrain.tools.prediction.flow.flow_routes import Flow, Route, server


def commit_to(held: Sequence[BucketShape]) -> Parcel:
    """A worker's commit to the server of these buckets."""
    return frames.commit(len(held), sum(shape.pieces for shape in held))


def vote_routes(topology: Topology, sg: int, steps: float) -> Iterator[Route]:
    """The votes of a server group for so many decisions, and the decisions."""
    for shard in range(1, topology.shards):
        yield Flow(server(sg, shard), server(sg, 0), frames.VOTE.times(steps))
        yield Flow(server(sg, 0), server(sg, shard), frames.DECISION.times(steps))
