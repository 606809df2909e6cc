"""The channel between the workers of a group: tensors under keys.

- Sending never waits, so two workers cannot block each other.
- A tensor is copied into a buffer (`send_buffers`), which a receiver on the same host can map. It is sent in parts of
  at most PART_BYTES.
- Every message also carries the number of messages read from the other side, which frees their buffers.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Collection
from functools import partial

import torch

from topotrain.config.sharding import ITEM_BYTES
from topotrain.config.topology import Address
from topotrain.core.client.client import Client
from topotrain.core.client.group_channel import GroupChannel
from topotrain.core.model.schema import PrivateMemory, torch_dtype
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.transport_contract import MessageSender
from topotrain.parallel.runtime.activation_messages import Activation, ActivationHello
from topotrain.parallel.runtime.channel import ArrivedTensors, TensorKey
from topotrain.parallel.runtime.send_buffers import SendBuffers

# Well below the limit of a frame's payload, since a receiver allocates a part when it is announced.
PART_BYTES = 16 << 20


class NetworkChannel(GroupChannel):
    """One worker's channel to the other workers of its group.

    The client delivers messages on transport threads.

    Args:
        client: the worker's client.
        sender: sends the worker's messages. It never waits.
        buffers: memory for sending, which the transport may share with the receiver.
    """

    messages = (Activation, ActivationHello)
    purpose = "split model"

    def __init__(
        self,
        client: Client,
        sender: MessageSender,
        buffers: SendBuffers | None = None,
    ) -> None:
        super().__init__(client.channel, sender)
        self._store, self._slots = ArrivedTensors(), buffers or SendBuffers(PrivateMemory())
        # Buffers are lent and messages sent in the same order, whichever thread of autograd sends.
        self._turn = threading.Lock()
        self._read: dict[int, int] = defaultdict(int)  # messages of each worker
        self._coming: dict[tuple[int, TensorKey], list[torch.Tensor]] = {}  # parts of tensors that are not whole yet
        client.attach(self)

    @property
    def hello(self) -> Message:
        return ActivationHello()

    # --- the channel ---------------------------------------------------------------------------------------------

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool = False) -> None:
        """Send a tensor under a key without waiting; `tensor` has been read on return.

        Args:
            grad: in the forward, the sender wants a gradient back. In the backward, there is a gradient. Without one
                `tensor` is empty, which means zero.

        Raises:
            PeerLost: the connection to the worker is lost.
        """
        tensor = tensor.detach()
        if to == self.me:
            with self._channel.waiter.update():
                self._store.put(to, key, tensor.clone(), grad)  # the script may write to its own tensor next
            return
        nbytes = tensor.nbytes
        parts = _parts(nbytes)
        message = partial(
            Activation,
            forward=key.forward,
            micro=key.micro,
            edge=key.edge,
            backward=key.backward,
            grad=grad,
            parts=parts,
            nbytes=nbytes,
            sizes=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        with self._turn:
            # Negative edges are control messages and gathered pieces: small, or not sent at every step.
            flat = self._slots.lend(to, nbytes, parts, again=key.edge >= 0)
            if nbytes:
                flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for part in range(parts):
                body = flat[part * PART_BYTES : (part + 1) * PART_BYTES] if nbytes else None
                self._post(to, message(part=part, taken=self._read[to], body=body))

    def arrived(self, source: int, key: TensorKey) -> bool:
        """Return whether `receive` would not wait. Raises as `receive`."""
        # Without the lock: a tensor that arrives meanwhile is found below.
        if self._store.has(source, key):
            return True
        self._channel.waiter.look()
        if self._channel.failure is not None:
            raise self._channel.failure
        with self._channel.waiter.update():  # a tensor that arrived before the peer left still counts
            found = self._store.has(source, key)
            if not found:
                self._check([source])
            return found

    def receive(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """Wait for a tensor and return it and its `grad`.

        Tensors under the same key come in the order they were sent. The tensor belongs to the caller.

        Raises:
            JobError, PeerLost: the tensor will not arrive.
        """
        self.wait_any([(source, key)])
        with self._channel.waiter.update():
            return self._store.pop(source, key)

    def wait_any(self, wanted: Collection[tuple[int, TensorKey]]) -> None:
        """Wait until one of (source, key) has arrived. Raises as `receive`."""
        if not self._any(wanted):
            sources = {source for source, _ in wanted}
            with self._channel.spans.span("wait for workers"):
                self._channel.wait_until(lambda: self._any(wanted) or self._any_left(sources))
                with self._channel.waiter.update():
                    if not self._any(wanted):
                        self._check(sources)

    def _any(self, wanted: Collection[tuple[int, TensorKey]]) -> bool:
        return any(self._store.has(source, key) for source, key in wanted)

    # --- calls by the client -------------------------------------------------------------------------------------

    def place(self, sender: Address, message: Message) -> torch.Tensor | None:
        """Allocate memory for one part. Raises ProtocolError for an impossible one."""
        if not isinstance(message, Activation):
            return None
        if message.nbytes <= 0 or message.parts != _parts(message.nbytes) or not 0 <= message.part < message.parts:
            raise ProtocolError(f"part {message.part} of {message.parts} of {message.nbytes} bytes")
        # The announced size decides how many parts come. Only one part is allocated at a time.
        return torch.empty(min(PART_BYTES, message.nbytes - message.part * PART_BYTES), dtype=torch.uint8)

    def handle(self, sender: Address, message: Message) -> None:
        """Handle a part or a hello, in order. Raises ProtocolError."""
        if isinstance(message, ActivationHello):
            self._connected.add(sender.index)
        elif isinstance(message, Activation):
            self._receive_part(sender, message)

    def _receive_part(self, sender: Address, message: Activation) -> None:
        if not self._slots.read(sender.index, message.taken):
            raise ProtocolError(f"{sender} reports {message.taken} messages read, which is not possible")
        # The part is in memory of this worker now, so the sender may reuse its buffer.
        self._read[sender.index] += 1
        key = TensorKey(message.forward, message.micro, message.edge, message.backward)
        came = self._coming.setdefault((sender.index, key), [])
        if message.body is not None:
            came.append(message.body)
        if message.part != max(0, len(came) - 1):
            raise ProtocolError(f"part {message.part} of {message.parts} of {key}, {len(came)} have come")
        if message.part + 1 == message.parts:
            del self._coming[sender.index, key]
            self._store.put(sender.index, key, _whole(message, came), message.grad)


def _parts(nbytes: int) -> int:
    return max(1, -(-nbytes // PART_BYTES))


def _whole(message: Activation, came: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor from all its parts. Raises ProtocolError if they do not fit."""
    # The announced size is compared with the bytes received, and never allocated.
    if message.dtype not in ITEM_BYTES or min(message.sizes, default=0) < 0:
        raise ProtocolError(f"an activation of {message.sizes} elements of {message.dtype}")
    expected = math.prod(message.sizes) * ITEM_BYTES[message.dtype]
    if sum(part.nbytes for part in came) != expected:
        raise ProtocolError(f"an activation of {message.nbytes} bytes, but {message.sizes} needs {expected}")
    if not came:
        return torch.empty(message.sizes, dtype=torch_dtype(message.dtype))
    flat = came[0] if len(came) == 1 else torch.cat(came)
    return flat.view(torch_dtype(message.dtype)).view(message.sizes)
