"""Encoding of bodies on both sides: gradients, means and values as they are.

An extension may bring other codecs (`ClientExtension.body_codec`, `GradientExtension.server_codec`).
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.model.schema import typed
from topotrain.core.protocol import Message, ProtocolError, Push, ReducedGradient, Values


class BodyCodec:
    """A worker's encoding of bodies, which leaves them as they are.

    `landing`, `mean` and `values` are for bodies that are encoded.
    """

    def push(self, bucket: Bucket, weight: float, present: int, gradient: torch.Tensor) -> torch.Tensor:
        """The body of a push. `gradient` may change later, unless it is the body itself."""
        return gradient

    def is_coded(self, message: ReducedGradient | Values, bucket: Bucket) -> bool:
        """Whether the body is encoded. Raises ProtocolError if it must not be."""
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
    """Return False. Raises ProtocolError if the message claims to be encoded."""
    if isinstance(message, Values) and message.coded:
        _refuse(bucket)
    return False


def _refuse(bucket: Bucket) -> NoReturn:
    raise ProtocolError(f"bucket {bucket.id} came encoded, which its dtype never is")


def present_body(message: Message) -> torch.Tensor:
    """The body of a message that must have one. Raises ProtocolError."""
    if message.body is None:
        raise ProtocolError(f"{type(message).__name__} without a body")
    return message.body


class ServerBodyCodec:
    """A server's encoding of bodies, for all its worker groups: none."""

    def landing(self, worker: Address, bucket: Bucket) -> torch.Tensor | None:
        """Memory for a worker's encoded push; None: its pushes are not encoded."""
        return None

    def push(self, worker: Address, message: Push, bucket: Bucket, like: torch.Tensor) -> torch.Tensor:
        """A push as elements like those of `like`. Raises ProtocolError for another size."""
        return typed(present_body(message), like)

    def mean(self, group: int, bucket: Bucket, present: int, mean: torch.Tensor) -> None:
        """Encode a mean, and make it, in place, the one that the workers will decode."""

    def mean_body(self, group: int, bucket: Bucket, mean: torch.Tensor) -> torch.Tensor:
        """The body in which that mean travels."""
        return mean

    def step_done(self, group: int, applied: bool, inv_scale: float) -> None:
        """The group's step was applied, or skipped: its means count, or do not."""

    def forget(self, group: int) -> None:
        """The processes of the group's workers have ended."""

    def show(self, group: int, bucket: Bucket, values: torch.Tensor, anew: bool) -> None:
        """All workers of the group are about to be sent these values.

        anew: the values must not travel as a difference to earlier ones.
        """

    def difference(self, group: int, bucket: Bucket) -> torch.Tensor | None:
        """The encoded body of the values shown last. None: they travel as they are."""
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state, see `component_state`. None: a second copy is not possible."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
