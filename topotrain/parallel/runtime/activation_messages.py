"""Messages between the workers of a group that share one model."""

from dataclasses import dataclass

from topotrain.core.protocol.message import Message, Receiver, Route, Sender, message

_BETWEEN_WORKERS = Route(Sender.GROUP_WORKERS, Receiver.WORKER)


@message(96, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class Activation(Message):
    """Worker -> worker: a part of an activation, or of the gradient of one.

    A body is a view. The sender does not write its memory until the receiver has reported it in `taken`.

    Attributes:
        forward, micro, edge, backward: identify the tensor (`channel.TensorKey`).
        grad: the sender expects the gradient of this activation.
        part, parts, nbytes: the body is part number `part` of `parts`, in order, of the `nbytes` bytes of a contiguous
            tensor. With 0 bytes there is no body.
        sizes, dtype: shape and type of the tensor, where the type is torch's name without "torch.".
        taken: the number of the receiver's activations that the sender has read.
    """

    forward: int
    micro: int
    edge: int
    backward: bool
    grad: bool
    part: int
    parts: int
    nbytes: int
    sizes: tuple[int, ...]
    dtype: str
    taken: int = 0


@message(97, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class ActivationHello(Message):
    """Worker -> worker of its group: the first message on a new connection.

    It is sent by the worker that has opened the connection.
    """
