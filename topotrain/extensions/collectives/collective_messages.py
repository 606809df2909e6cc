"""Message between the units of a collective."""

from dataclasses import dataclass
from math import inf

from topotrain.core.protocol.message import (
    MOST,
    Condition,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)


@message(
    70,
    Route(Sender.GROUP_SERVERS, Receiver.SERVER, Condition.SERVER_COLLECTIVE),
    handled="reduce",
    sent="reduce (send)",
)
@dataclass(frozen=True, slots=True)
class CollectivePart(Message):
    """Rank -> rank: a part of a collective over one bucket.

    With `up` it is a partial sum of gradients, otherwise the result. The body is a view. Upward it stays valid until a
    result of the bucket has come down to the sender. Downward it stays valid until the sender has the parts of all
    ranks of a later reduction of the bucket.

    Attributes:
        ordinal: the backward. Downward, -1 means new values with their `version`, and otherwise the mean of that
            backward.
        weight, count: upward, sum and number of the weights above 0 in the sum.
        each: upward, the common weight, and the body is the plain sum. 0.0: the body is the weighted sum.
        present: upward, a bit per piece, the union so far. A part without a body has no gradient of any rank.
    """

    step: int
    ordinal: int
    bucket: int
    up: bool
    weight: float
    count: int
    each: float
    present: bytes
    version: int

    def is_valid(self) -> bool:
        return (
            -1 <= self.ordinal < MOST
            and 0 <= self.step < MOST
            and 0 <= self.weight < inf
            and 0 <= self.each < inf
            and 0 <= self.count < MOST
            and -1 <= self.version < MOST
        )
