"""What an encoding leaves out is not forgotten: its sender adds it to what it encodes next.

`ErrorFeedback` does so for gradients, `DeltaStream` for values. `codec_for` says how bodies of a dtype are written, if
they are at all.
"""

from collections.abc import Sequence

import torch

from topotrain.config.job import Compression
from topotrain.core.model.finite import all_finite
from topotrain.extensions.compression.codecs import (
    CastCodec,
    Codec,
    Int8Codec,
    ScratchMemory,
    TopKCodec,
    drop_denormals,
)

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def codec_for(
    kind: Compression, dtype: torch.dtype, ratio: float, scratch: ScratchMemory | None = None
) -> Codec | None:
    """The codec for bodies of this dtype, or None where they travel as they are.

    That is so for kNone, for dtypes that are not among the four floats, and for a cast of what has 2 bytes already.

    Args:
        ratio: the share of the elements that kTopK sends, 0 < ratio <= 1.
        scratch: memory to work in, shared by the codecs of one thread; None: its own.
    """
    if kind is Compression.kNone or dtype not in _FLOATS:
        return None
    if kind is Compression.kInt8:
        return Int8Codec(scratch)
    if kind is Compression.kTopK:
        return TopKCodec(ratio, scratch)
    short = torch.float16 if kind is Compression.kFp16 else torch.bfloat16
    return CastCodec(short, scratch) if dtype.itemsize > short.itemsize else None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which what is left of bodies of this dtype is kept: short floats would lose it again."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class ErrorFeedback:
    """A stream of gradients, encoded; what one encoding left out is added to the next.

    So the sum of all that was received is the sum of all that was given, but for one residual (Seide et al. 2014), and
    SGD converges as without compression (Karimireddy et al. 2019). With a second buffer, `draft`, what is left counts
    from `settle` on only: an encoding may be replaced by another one of the same step, or dropped with the step, as a
    GradScaler does, and the residual is what it was before.

    Where an element is not finite, or larger than the codec can carry, nothing is kept: the residual is 0 there. An
    overflow does not come back in later steps.

    Args:
        codec: how to write.
        residual: 1-D, dtype `working_dtype` of the gradients', zero at first (or as restored). Changed in place.
        draft: like `residual`, any content; None: every encoding counts at once.
    """

    def __init__(self, codec: Codec, residual: torch.Tensor, draft: torch.Tensor | None = None) -> None:
        self.codec = codec
        self.residual = residual
        self._draft = residual if draft is None else draft
        self.drafted = False  # something was encoded that has been neither settled nor dropped

    def encode(
        self, gradient: torch.Tensor, out: torch.Tensor, more: bool = False, absent: Sequence[slice] = ()
    ) -> None:
        """Write a gradient (1-D, as long as the residual) and what was left before into `out` (see `Codec`).

        Args:
            more: after an encoding that is neither settled nor dropped: in addition to it, not instead of it.
            absent: parts that have no gradient: they are written as 0, and what is left of them stays.
        """
        before = self._draft if more and self.drafted else self.residual
        kept = [before[part].clone() for part in absent]
        left = torch.add(before, gradient, out=self._draft)
        for part in absent:
            left[part] = 0
        lost = None if self.codec.encode(left, out) else ~(left.abs() <= self.codec.largest)
        self.codec.add(out, left, sign=-1)
        if lost is not None:
            left.masked_fill_(lost, 0)
        for part, rest in zip(absent, kept, strict=True):
            left[part] = rest
        self.drafted = True

    def settle(self, factor: float = 1.0) -> None:
        """What was encoded counts: go on from what it left. Does nothing if there was nothing since the last call.

        factor: its gradients turned out to be this many times as large as those before them (a new loss scale, which
        is known at the end of a step only). What they left is corrected to what it would be, had the residual been
        rescaled before.
        """
        if self.drafted:
            if factor != 1.0:
                self._draft.add_(self.residual, alpha=factor - 1.0)
            self.residual, self._draft = self._draft, self.residual
        self.drafted = False

    def drop(self) -> None:
        """What was encoded does not count (with a draft; without one it has counted already)."""
        self.drafted = False

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from here on (a new loss scale): so is what is left of them."""
        self.residual.mul_(factor)


class DeltaStream:
    """Values that change, from one sender to one receiver: what travels is the difference to what was shown before.

    Both sides hold the values as the receiver knows them, and add to them the same decoded numbers. What an encoding
    left out is still in the next difference, so it needs no residual (DoubleSqueeze, Tang et al. 2019, has this second
    direction too). Both copies are equal bit for bit after any number of rounds, provided that each encoding arrives
    once and in order; `rounds` counts them. Float32 denormals count as 0, since not all processes compute with them.

    Values that are not finite arrive as the codec carries them. Elements of the copies that are not finite count as 0
    in the next round, on both sides, so that later values replace them.

    Args:
        codec: how to write.
        held: 1-D values as the receiver knows them, of the values' dtype. Changed in place. `restart` sets them.
    """

    def __init__(self, codec: Codec, held: torch.Tensor) -> None:
        self.codec = codec
        self.held = held
        self.rounds = 0

    def restart(self, values: torch.Tensor) -> None:
        """Both sides, with the same values (which traveled as they are): go on from these."""
        self.held.copy_(values)
        drop_denormals(self.held)
        self.rounds = 0

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Sender: write what changed into `out` (see `Codec`), and note it as shown."""
        self._mend()
        room = self.codec.scratch.room("delta", values.numel(), working_dtype(values.dtype))
        self.codec.encode(torch.sub(values, self.held, out=room), out)
        self._take(out)

    def decode(self, data: torch.Tensor) -> None:
        """Receiver: bring `held` to what the sender has shown. Raises ValueError as `Codec.decode` does."""
        self._mend()
        self._take(data)

    def _mend(self) -> None:
        if not all_finite(self.held):
            self.held.masked_fill_(~torch.isfinite(self.held), 0)

    def _take(self, data: torch.Tensor) -> None:
        self.codec.add(data, self.held)
        drop_denormals(self.held)
        self.rounds += 1
