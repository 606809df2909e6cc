"""The encoding of the bodies of pushes, means and values: by default none.

An extension may bring another `BodyCodec`.
"""

from typing import NoReturn

import torch

from topotrain.config.sharding import Bucket
from topotrain.core.protocol import ProtocolError, ReducedGradient, Values


class BodyCodec:
    """A worker's encoding of bodies, which leaves them as they are.

    `landing`, `mean` and `values` are for bodies that are encoded.
    """

    def push(self, bucket: Bucket, weight: float, present: int, gradient: torch.Tensor) -> torch.Tensor:
        """The body of a push.

        `gradient` may change from here on, unless it is the body itself.
        """
        return gradient

    def is_coded(self, message: ReducedGradient | Values, bucket: Bucket) -> bool:
        """Whether the body of this message is encoded.

        Raises ProtocolError if it must not be.
        """
        return not_coded(message, bucket)

    def landing(self, message: ReducedGradient | Values, bucket: Bucket) -> torch.Tensor:
        """Where an encoded body is to be received."""
        _refuse(bucket)

    def mean(self, bucket: Bucket, data: torch.Tensor) -> torch.Tensor:
        """Decode a mean; it stays until the next one of the bucket."""
        _refuse(bucket)

    def values(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Bring "params" to what the servers show now, by an encoded body."""
        _refuse(bucket)

    def restart(self, bucket: Bucket) -> None:
        """Values came as they are, and stand in "params"."""


def not_coded(message: ReducedGradient | Values, bucket: Bucket) -> bool:
    """Return False: the body is not encoded.

    Raises ProtocolError for a message that claims to be encoded.
    """
    if isinstance(message, Values) and message.coded:
        _refuse(bucket)
    return False


def _refuse(bucket: Bucket) -> NoReturn:
    raise ProtocolError(f"bucket {bucket.id} came encoded, which its dtype never is")
