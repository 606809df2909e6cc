"""The interface of features of a worker's client: messages, and hooks.

The client names no feature. It finds out once, when an extension is attached, which messages and hooks it has.
"""

from collections.abc import Sequence

import torch

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel, StepEnd, StepOutcome
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import BodyCodec
from topotrain.core.model.schema import FlatBuffers


class ClientExtension:
    """One feature's part of a worker's client. Each method does nothing here."""

    messages: tuple[type[m.Message], ...] = ()
    """Messages that this extension handles. A message belongs to one extension of a client."""

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        """The client has attached this extension, which may use these parts of it."""

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Memory for the body of one of `messages`, or None (see `Endpoint.place`)."""
        return None

    def handle(self, sender: Address, message: m.Message) -> None:
        """Handle one of `messages`, under exclusive access. Raises ProtocolError."""

    def before_commit(self, step: int, end: StepEnd) -> None:
        """The worker is about to commit a step."""

    def on_applied(self, sender: Address, message: m.Applied) -> None:
        """A server's reply to a step is here, behind its values; under exclusive access."""

    def after_commit(self, end: StepEnd, outcome: StepOutcome) -> None:
        """A step of this worker was applied or skipped, and its new values are here."""

    def missed(self, step: int) -> bool:
        """Whether no reply to this step comes; called under the waiter.

        The group has made the step without the worker, or drops it.
        """
        return False

    def catch_up(self) -> StepOutcome:
        """After `missed`: wait for the group's values and return its present step."""
        raise NotImplementedError

    def body_codec(
        self, slice_map: SliceMap, flats: FlatBuffers, adds: bool, held: Sequence[Bucket]
    ) -> BodyCodec | None:
        """The encoding of bodies, if this extension has one.

        Args:
            slice_map: the map of the parameters.
            flats: the worker's buffers.
            adds: every push of a step counts. Otherwise only the last push of a bucket does.
            held: the buckets that the worker pushes and receives.
        """
        return None

    def on_lost(self, peer: Address, reason: str) -> bool:
        """A connection ended; called under the waiter's exclusive access.

        Returns whether this extension deals with the loss. Otherwise it ends the job, unless the worker is leaving.
        """
        return False


class ClientHooks:
    """The extensions of one client, by class and by the hooks that they override."""

    def __init__(self) -> None:
        self.by_class: dict[type[ClientExtension], ClientExtension] = {}
        self.handlers: dict[type[m.Message], ClientExtension] = {}
        self.before_commit: tuple[ClientExtension, ...] = ()
        self.on_applied: tuple[ClientExtension, ...] = ()
        self.after_commit: tuple[ClientExtension, ...] = ()
        self.missed: tuple[ClientExtension, ...] = ()
        self.on_lost: tuple[ClientExtension, ...] = ()

    def overtaken(self, step: int) -> ClientExtension | None:
        """The extension that knows that no reply to this step of the worker will come."""
        return next((extension for extension in self.missed if extension.missed(step)), None)

    def add(self, extension: ClientExtension) -> None:
        """Call this extension from now on."""
        self.by_class[type(extension)] = extension
        self.handlers.update(dict.fromkeys(extension.messages, extension))
        if overrides(extension, "before_commit"):
            self.before_commit += (extension,)
        if overrides(extension, "on_applied"):
            self.on_applied += (extension,)
        if overrides(extension, "after_commit"):
            self.after_commit += (extension,)
        if overrides(extension, "missed"):
            self.missed += (extension,)
        if overrides(extension, "on_lost"):
            self.on_lost += (extension,)


def overrides(extension: ClientExtension, method: str) -> bool:
    """Whether an extension has its own version of a method of `ClientExtension`."""
    return getattr(type(extension), method) is not getattr(ClientExtension, method)
