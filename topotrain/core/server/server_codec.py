"""The encoding of a server's bodies: pushes, means and values travel as they are.

An extension may bring another codec (`GradientExtension.server_codec`).

`core.client.body_codec` is the workers' side.
"""

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.model.schema import typed
from topotrain.core.protocol import ProtocolError, Push
from topotrain.core.server.component_state import State


class ServerBodyCodec:
    """A server's encoding of bodies, for all its worker groups: none."""

    def landing(self, worker: Address, bucket: Bucket) -> torch.Tensor | None:
        """Memory for a worker's encoded push; None: its pushes are not encoded."""
        return None

    def push(self, worker: Address, message: Push, bucket: Bucket, like: torch.Tensor) -> torch.Tensor:
        """A worker's gradient as elements like those of `like`.

        Raises:
            ProtocolError: it has another size.
        """
        return typed(body_of(message), like)

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

    def state_dict(self) -> State | None:
        """Return the state, see `component_state`. None: a second copy is not possible."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""


def body_of(message: Push) -> torch.Tensor:
    """The body of a push. Raises ProtocolError if it has none."""
    if message.body is None:
        raise ProtocolError("Push without a body")
    return message.body
