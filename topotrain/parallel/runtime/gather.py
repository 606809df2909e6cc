"""What a split model holds comes to one worker of its group, whole, in the midst of the training.

Every worker of the group does this at the same point of its script, so the values are those of one step. They come in
pieces, and each that has found its place is told of: no more than AHEAD of a worker's are on the way. So the model need
not fit into anybody's memory, if the places are not in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from topotrain.parallel.placement.parameter_owners import OwnedPart, WholeTensor
from topotrain.parallel.runtime.channel import STEPPED, TensorKey
from topotrain.parallel.runtime.worker_sync import WorkerSync

PIECE_BYTES = 4 << 20
AHEAD = 2
_PIECE, _PLACED = STEPPED - 2, STEPPED - 3
"""`TensorKey.edge` of a piece, and of the word that it has found its place."""


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A parameter or buffer of the whole model, or a part of one; what this worker holds of it may be on meta."""

    whole: WholeTensor
    share: OwnedPart
    held: torch.Tensor

    @property
    def source(self) -> int:
        """The worker that it comes from: worker 0 where it has it, as of an unsplit model."""
        return 0 if self.share.here(0) else self.share.owners[0]


def entries(wholes: Sequence[WholeTensor], tensors: Sequence[torch.Tensor]) -> list[GatheredTensor]:
    """`tensors` are those of all shares, in order."""
    shares = [(whole, share) for whole in wholes for share in whole.shares]
    return [
        GatheredTensor(whole, share, tensor.detach()) for (whole, share), tensor in zip(shares, tensors, strict=True)
    ]


def give(meeting: WorkerSync, held: Sequence[GatheredTensor], what: str) -> None:
    """On workers other than worker 0: send what it is to have from here.

    what: in words, what all of them do.

    Raises:
        ConfigError: worker 0 goes on without it.
    """
    passage = meeting.passage
    mine = list(_pieces([entry for entry in held if entry.source == passage.me]))
    for number in range(len(mine) + AHEAD):
        if number >= AHEAD:
            meeting.take(0, TensorKey(meeting.forwards, number - AHEAD, _PLACED, False), what)
        if number < len(mine):
            entry, rows = mine[number]
            piece = _rowed(entry.held)[rows].clone(memory_format=torch.contiguous_format)
            passage.send(0, TensorKey(meeting.forwards, number, _PIECE, False), piece.view(-1).view(torch.uint8))


def gather(
    meeting: WorkerSync, held: Sequence[GatheredTensor], place: Callable[[GatheredTensor], torch.Tensor], what: str
) -> None:
    """On worker 0: write every entry to its place.

    Raises:
        ConfigError: a worker goes on without it.
    """
    passage = meeting.passage
    for entry in held:
        if entry.source == 0:
            place(entry).copy_(entry.held)
    for source in range(1, passage.size):
        coming = _pieces([entry for entry in held if entry.source == source])
        for number, (entry, rows) in enumerate(coming):
            came = meeting.take(source, TensorKey(meeting.forwards, number, _PIECE, False), what)
            target = _rowed(place(entry))[rows]
            target.copy_(came.view(target.dtype).view(target.shape))
            passage.send(source, TensorKey(meeting.forwards, number, _PLACED, False), torch.empty(0))


def _pieces(held: Sequence[GatheredTensor]) -> Iterator[tuple[GatheredTensor, slice]]:
    """Rows that make up to PIECE_BYTES, at least one; the same on both sides."""
    for entry in held:
        rows = _rowed(entry.held)
        count = len(rows)
        each = max(1, PIECE_BYTES * count // max(1, rows.nbytes))
        yield from ((entry, slice(lo, min(lo + each, count))) for lo in range(0, count, each))


def _rowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.unsqueeze(0)
