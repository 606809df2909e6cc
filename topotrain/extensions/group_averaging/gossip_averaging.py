"""Gossip: server groups that average with a partner by chance.

AD-PSGD (Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, 2018) averages pairs of workers.
It needs a bipartite graph, because a worker waits for its partner. Here no group waits (`PairwiseSync`), so any group
may be the partner of any other one, as in NoLoCo (Kolehmainen et al., 2025), and two groups may choose each other at
the same time.
"""

import torch

from topotrain.core.model.schema import BucketValues
from topotrain.core.protocol import Message, PairReply
from topotrain.core.server.group_sync import GroupMessages, PairwiseSync
from topotrain.extensions.group_averaging.averaging_messages import PairTaken

_BITS = (1 << 64) - 1


class GossipAveraging(PairwiseSync):
    """Pairwise averaging of one server with a partner by chance.

    Args:
        group, groups, values, sync_freq: as for PairwiseSync.
        seed: of the partners. A job with the same seed draws the same ones.
    """

    def __init__(self, group: int, groups: int, values: BucketValues, sync_freq: int, seed: int) -> None:
        super().__init__(group, groups, values, sync_freq)
        self._seed = seed

    def partner(self, bucket: int, sync: int) -> int:
        # The same for all buckets, and on all shards: where they count the same updates, whole models are averaged.
        drawn = drawn_number(self._seed, self._group, sync) % (self._groups - 1)
        return drawn + (drawn >= self._group)

    def _move(self, group: int, message: PairReply, change: torch.Tensor) -> GroupMessages:
        out = super()._move(group, message, change)
        # The next offer goes to another group, so that this one would keep its reply, a copy of the bucket, for long.
        taken: Message = PairTaken(message.bucket, message.sync)
        return [*out, (group, taken)]

    def forget_reply(self, group: int, message: PairTaken) -> None:
        """A group has the reply to its offer, and will not offer the same again."""
        key = (group, message.bucket)
        if key in self._answers:
            sync, change, mark = self._answers[key]
            self._answers[key] = sync, None if sync <= message.sync else change, mark


def drawn_number(*words: int) -> int:
    """Return a number below 2^64 that these words draw, as the seed of a generator."""
    # SplitMix64 (Steele, Lea and Flood, 2014): without state, so a second copy and a late bucket draw the same.
    found = 0
    for word in words:
        found = (found + word + 0x9E3779B97F4A7C15) & _BITS
        found = ((found ^ (found >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        found = ((found ^ (found >> 27)) * 0x94D049BB133111EB) & _BITS
        found ^= found >> 31
    return found
