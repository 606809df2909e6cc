"""What a feature adds to a worker's client: `ClientExtension`, and what it may use of the client.

The client names no feature. It knows of an extension which messages it handles and which of the methods below it has;
both are looked up once, when the extension is attached.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.body_codec import BodyCodec
from topotrain.core.client.client_types import StepEnd, StepOutcome, Waiter
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.profiling.spans import Recorder


class ClientAccess(Protocol):
    """What an extension, or a part of the client, may use of it (`client.Client`)."""

    me: Address
    servers: tuple[Address, ...]
    desk: Address
    spans: Recorder
    map: SliceMap  # once the model is known
    begun: set[Address]
    """Servers that know more than a script that was started again, until it commits a step."""

    @property
    def waiter(self) -> Waiter:
        """How this worker waits."""
        ...

    def bucket(self, sender: Address, number: int) -> Bucket:
        """The bucket of which a server speaks. Raises ProtocolError where it is not the server's."""
        ...

    def settle(self) -> None:
        """Wait until the step that was committed lazily is applied, and all its values are here."""
        ...

    def tell(self, to: Address, message: m.Message) -> None:
        """Send a message."""
        ...

    def mention(self, to: Address, message: m.Message) -> None:
        """Send a message that may come too late: with the job over, it is dropped."""
        ...

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what was asked for. Raises JobError, PeerLost."""
        ...

    def fetch(self) -> None:
        """Wait for current values of the whole model."""
        ...

    def receive_values(self, number: int) -> AbstractContextManager[None]:
        """The block asks for values; the round of this number is received, and stands in "params" at the block's end.

        Raises JobError, PeerLost.
        """
        ...


class ClientExtension:
    """One feature's part of a worker's client. Each method does nothing here."""

    messages: tuple[type[m.Message], ...] = ()
    """What this extension handles. A message belongs to one extension of a client."""

    def bind(self, client: ClientAccess) -> None:
        """The client has attached this extension."""

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Memory for the body of one of `messages`, or None (see `Endpoint.place`)."""
        return None

    def handle(self, sender: Address, message: m.Message) -> None:
        """One of `messages` is here; called under the waiter's exclusive access. Raises ProtocolError."""

    def before_commit(self, step: int, end: StepEnd) -> None:
        """The worker is about to commit a step."""

    def after_commit(self, end: StepEnd, outcome: StepOutcome) -> None:
        """A step that the worker committed is applied, or skipped, and its new values are here."""

    def body_codec(
        self, slice_map: SliceMap, flats: FlatBuffers, adds: bool, held: Sequence[Bucket]
    ) -> BodyCodec | None:
        """How bodies travel, if this extension decides that; asked for when the model is known.

        Args:
            slice_map: the map of the parameters.
            flats: the worker's buffers.
            adds: every push of a step counts; else the last one of a bucket.
            held: the buckets that the worker pushes and is sent.
        """
        return None

    def on_lost(self, peer: Address, reason: str) -> bool:
        """A connection ended; called under the waiter's exclusive access.

        Returns whether the loss is this extension's to judge. Otherwise it ends the job, unless the worker is leaving.
        """
        return False


class LateSteps(ClientExtension, ABC):
    """An extension of jobs in which a group makes a step without waiting for all of its workers."""

    @abstractmethod
    def missed(self, step: int) -> bool:
        """Whether the group has made this step without the worker; called under the waiter's exclusive access."""

    @abstractmethod
    def catch_up(self, through: int = -1) -> StepOutcome:
        """Wait for the values that the others are at, and learn which step they are in.

        through: not before all workers are through with the batches of this epoch, as this one is.
        """

    @abstractmethod
    def through(self, epoch: int) -> None:
        """Tell the servers that this worker wants no more batches of an epoch; never waits."""


def overrides(extension: ClientExtension, method: str) -> bool:
    """Whether an extension has its own version of a method of `ClientExtension`."""
    return getattr(type(extension), method) is not getattr(ClientExtension, method)
