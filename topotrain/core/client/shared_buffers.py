"""Memory that a worker shares with its servers: parameters and gradients."""

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model import shared_windows


class SharedBufferClient(ClientExtension):
    """One worker's part; nothing is sent or awaited unless `ClientModel.windowed`."""

    messages = (m.SharedBuffer,)

    def __init__(self, me: Address) -> None:
        self._me = me
        self._provided: dict[int, m.SharedBuffer] = {}

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel, self._model = channel, model

    def handle(self, sender: Address, message: m.Message) -> None:
        """A server provides the memory of the parameters of one space."""
        assert isinstance(message, m.SharedBuffer)
        self._provided[message.space] = message

    def show(self, name: str, server: Address) -> None:
        """Let a server see, and write, its part of a flat buffer."""
        model = self._model
        for space in model.map.spaces:
            lo, hi = model.map.ranges[space.index][server.index]
            if hi > lo and space.on(self._me.index):
                body = model.flats.flat(name, space.index)[lo:hi]
                self._channel.send(server, m.SharedBuffer(name, space.index, body=body))

    def await_parameters(self) -> None:
        """Wait for the memory of the parameters; it becomes the flat buffer "params"."""
        model = self._model
        spaces = [space.index for space in model.map.spaces if space.length and space.on(self._me.index)]
        self._channel.wait_until(lambda: self._provided.keys() >= set(spaces))
        for space in spaces:
            model.flats.put("params", space, shared_windows.seen(self._provided[space], model.map, None))
