"""Which messages to a server have an order that matters, and the checks of a step.

Messages of different senders without an order can be handled in any order, with the same bits: gradients are staged
apart for each worker group, and added up in the order of the workers. Messages of one sender always keep their order.
"""

import zlib

import torch

from topotrain.config.job import Apply, Job
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.protocol.codec import encode
from topotrain.core.server.consistency import SNAPSHOT
from topotrain.extensions.decision_record.order_entries import CHECKS

# By name, because the extensions of some messages may be deleted.
_END = "Fail StepDecisionRequest HostReady Drained FinalValue FinalRequest ModelBufferValue LastWrites BufferRequest"
_START = frozenset({"SchemaPart", "SharedBuffer", "Init", "StateRequest", "StatePart"})
_SNAPSHOTS = "SnapshotRequest SnapshotPart Remainder"
_TIMES = "StepTime ExchangeTime"
_COMPARED = "WorkerValue PassedCall PassBegun"
"""Values that workers add up, or compare, in the order of the workers."""
_GRADIENTS = "Push BackwardEnd GradientOverride StepRates HostPush HostStepEnd"
_SUMMED = frozenset({"Push", "GradientOverride", "HostPush"})
_ASIDE = frozenset({"InnerStateRequest", "InnerStatePart"})
_LATER = ("ages", "resets", "digest")
"""Fields that commits in the first recordings, which stay readable, do not have."""
_SAMPLED = 64
"""Elements of a bucket's gradient that its check reads, about."""


class MessageOrder:
    """Tells which messages to a server have an order.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        free = f"{_END} {_SNAPSHOTS} {_TIMES} {_COMPARED}".split()
        # Otherwise a gradient changes nothing before its step is decided.
        self._free = frozenset([*free, *(() if job.apply is Apply.kOnArrival else _GRADIENTS.split())])

    def has_order(self, sender: Address, message: m.Message) -> bool:
        """Whether it matters when this message is handled."""
        name = type(message).__name__
        # All workers describe the same model. Without it, a server has no memory for what follows.
        if name in _START:
            return sender.role is Role.SERVER
        if name == "WorkerStatePart":  # those with a number belong to a snapshot
            return bool(getattr(message, "number", 0) < 0)
        # Snapshots come by the clock, and change no value.
        if isinstance(message, m.StepDecision) and message.change == SNAPSHOT:
            return False
        return name not in self._free


def is_aside(kind: int) -> bool:
    """Whether a worker sends this kind of message beside those of its script.

    The thread of a connection sends it. So its place among the messages of one sender depends on chance, too.
    """
    return m.KINDS[kind].__name__ in _ASIDE if kind in m.KINDS else False


class StepChecks:
    """Two bytes for each step of a worker, which a replay compares.

    A difference shows that the script computes something else.
    """

    def __init__(self) -> None:
        self._sums: dict[Address, int] = {}  # of the gradients since the last commit

    def add(self, sender: Address, message: m.Message) -> None:
        """A worker has sent a message that may have a part of its gradient."""
        body = message.body
        # A state for a snapshot comes by the clock, and has a body, too.
        if body is None or not body.numel() or type(message).__name__ not in _SUMMED:
            return
        flat = body.detach().reshape(-1).view(torch.uint8)
        # The lowest byte of some elements: it changes first.
        stride = max(4, flat.numel() // _SAMPLED // 4 * 4)
        number = zlib.crc32(flat[::stride].contiguous().numpy().tobytes(), getattr(message, "bucket", 0))
        # A sum, because the buckets of a backward may come in any order.
        self._sums[sender] = self._sums.get(sender, 0) + number & 0xFFFF_FFFF

    def commit(self, sender: Address, message: m.Commit) -> bytes:
        """Return the checks of a step: of the commit, and of the gradient."""
        meta = zlib.crc32(encode(message, _LATER)[1])
        made = bytes((meta & 0xFF, self._sums.pop(sender, 0) % 0xFB))
        assert len(made) == CHECKS
        return made

    def forget(self, sender: Address) -> None:
        """The process of a worker is gone."""
        self._sums.pop(sender, None)
