"""Gather a split model on worker 0 of its group during training.

Every worker of the group calls this at the same point of its script, so all values are of the same step. Tensors are
sent in pieces of up to PIECE_BYTES, so the model need not fit in memory if the destinations are elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from topotrain.parallel.placement.parameter_owners import OwnedPart, WholeTensor
from topotrain.parallel.runtime.channel import ControlEdge, TensorKey
from topotrain.parallel.runtime.worker_sync import WorkerSync

PIECE_BYTES = 4 << 20
AHEAD = 2  # one piece is on its way while worker 0 writes the other


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A parameter or buffer of the whole model, or a part of one.

    `held` is this worker's tensor, on the meta device if another worker holds it.
    """

    whole: WholeTensor
    share: OwnedPart
    held: torch.Tensor

    def of(self, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return its part of a whole tensor."""
        return self.share.of(targets[self.whole.names[0]])

    @property
    def source(self) -> int:
        """The worker that sends it: worker 0 if it holds the tensor, else the first owner."""
        return 0 if self.share.here(0) else self.share.owners[0]


def entries(wholes: Sequence[WholeTensor], tensors: Sequence[torch.Tensor]) -> list[GatheredTensor]:
    """Pair all shares of `wholes` with `tensors`, which are in the same order."""
    shares = [(whole, share) for whole in wholes for share in whole.shares]
    return [
        GatheredTensor(whole, share, tensor.detach()) for (whole, share), tensor in zip(shares, tensors, strict=True)
    ]


def give(sync: WorkerSync, held: Sequence[GatheredTensor], what: str) -> None:
    """Send this worker's tensors to worker 0. Other workers than worker 0 call this.

    Args:
        what: the purpose in words, for error messages.

    Raises:
        ConfigError: worker 0 continues without this call.
    """
    channel = sync.channel
    mine = list(_pieces([entry for entry in held if entry.source == channel.me]))
    for number in range(len(mine) + AHEAD):
        # Worker 0 acknowledges each piece: so it never holds more than AHEAD pieces of a worker.
        if number >= AHEAD:
            sync.receive(0, TensorKey(sync.forwards, number - AHEAD, ControlEdge.PIECE_WRITTEN, False), what)
        if number < len(mine):
            entry, rows = mine[number]
            # A copy, because rows of a tensor need not be contiguous, and are sent as bytes.
            piece = _rowed(entry.held)[rows].clone(memory_format=torch.contiguous_format)
            channel.send(
                0, TensorKey(sync.forwards, number, ControlEdge.PIECE, False), piece.view(-1).view(torch.uint8)
            )


def gather(sync: WorkerSync, held: Sequence[GatheredTensor], targets: Mapping[str, torch.Tensor], what: str) -> None:
    """Write every tensor into `targets`, by first names. Worker 0 calls this.

    Raises:
        ConfigError: another worker continues without this call.
    """
    channel = sync.channel
    for entry in held:
        if entry.source == 0:
            entry.of(targets).copy_(entry.held)
    # One worker after another: the others wait for their acks with AHEAD pieces sent.
    for source in range(1, channel.size):
        coming = _pieces([entry for entry in held if entry.source == source])
        for number, (entry, rows) in enumerate(coming):
            came = sync.receive(source, TensorKey(sync.forwards, number, ControlEdge.PIECE, False), what)
            target = _rowed(entry.of(targets))[rows]
            target.copy_(came.view(target.dtype).view(target.shape))
            channel.send(source, TensorKey(sync.forwards, number, ControlEdge.PIECE_WRITTEN, False), torch.empty(0))


def _pieces(held: Sequence[GatheredTensor]) -> Iterator[tuple[GatheredTensor, slice]]:
    """Yield slices of rows of up to PIECE_BYTES, at least one row."""
    for entry in held:
        rows = _rowed(entry.held)
        count = len(rows)
        # Sender and receiver compute the same slices, so a piece needs no description.
        each = max(1, PIECE_BYTES * count // max(1, rows.nbytes))
        yield from ((entry, slice(lo, min(lo + each, count))) for lo in range(0, count, each))


def _rowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.unsqueeze(0)
