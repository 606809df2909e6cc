"""Error feedback: a sender adds the error of one encoding to the next values.

`ErrorFeedback` does so for gradients, `DeltaStream` for values. `codec_for` chooses the codec of a dtype.
"""

from collections.abc import Sequence

import torch

from topotrain.config.job import Compression
from topotrain.core.server.component_state import State, restore_tensor
from topotrain.core.server.nonfinite import all_finite
from topotrain.extensions.compression.codecs import (
    CastCodec,
    Codec,
    E3M0Codec,
    Int8Codec,
    ScratchMemory,
    TopKCodec,
    drop_denormals,
)

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def codec_for(
    kind: Compression, dtype: torch.dtype, ratio: float, scratch: ScratchMemory | None = None
) -> Codec | None:
    """Return the codec for bodies of this dtype, or None if they are sent unchanged.

    It is None for kNone, for dtypes other than the four floats, and for a cast of a dtype that has 2 bytes already.

    Args:
        ratio: the fraction of the elements that kTopK sends, 0 < ratio <= 1.
        scratch: scratch memory shared by the codecs of one thread. None: the codec has its own.
    """
    if kind is Compression.kNone or dtype not in _FLOATS:
        return None
    if kind is Compression.kInt8:
        return Int8Codec(scratch)
    if kind is Compression.kE3M0:
        return E3M0Codec(scratch)
    if kind is Compression.kTopK:
        return TopKCodec(ratio, scratch)
    short = torch.float16 if kind is Compression.kFp16 else torch.bfloat16
    return CastCodec(short, scratch) if dtype.itemsize > short.itemsize else None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for residuals of bodies of this dtype."""
    # A short float would lose the residual again.
    return torch.float64 if dtype is torch.float64 else torch.float32


class ErrorFeedback:
    """Encodes a stream of gradients; the error of one encoding is added to the next.

    So the sum of everything received is the sum of everything given, except for one residual (Seide et al. 2014), and
    SGD converges as without compression (Karimireddy et al. 2019). With a second buffer, `draft`, a residual counts
    only from `settle` on.

    Args:
        codec: the codec.
        residual: 1-D, with the `working_dtype` of the gradients, zero at first (or restored). Changed in place.
        draft: like `residual`, with any content. None: every encoding counts at once.
    """

    def __init__(self, codec: Codec, residual: torch.Tensor, draft: torch.Tensor | None = None) -> None:
        self.codec = codec
        self.residual = residual
        # Until `settle`, an encoding may be replaced by another of its step, or dropped with the step (GradScaler).
        self._draft = residual if draft is None else draft
        self.drafted = False  # there is an encoding that was neither settled nor dropped

    def encode(
        self, gradient: torch.Tensor, out: torch.Tensor, more: bool = False, absent: Sequence[slice] = ()
    ) -> None:
        """Encode a gradient plus the residual into `out` (see `Codec`).

        Args:
            gradient: 1-D, as long as the residual.
            more: the encoding adds to the last one, which was neither settled nor dropped, instead of replacing it.
            absent: parts without a gradient. They are encoded as 0, and their residual is kept.
        """
        before = self._draft if more and self.drafted else self.residual
        # The residual of an absent part is saved, because `_draft` may be the same memory as `before`.
        kept = [before[part].clone() for part in absent]
        left = torch.add(before, gradient, out=self._draft)
        for part in absent:
            # The residual of an absent part is sent when the part has a gradient again.
            left[part] = 0
        # Not `left.abs() > largest`, which is False for NaN.
        lost = None if self.codec.encode(left, out) else ~(left.abs() <= self.codec.largest)
        self.codec.add(out, left, sign=-1)
        # An overflow must not return in later steps.
        if lost is not None:
            left.masked_fill_(lost, 0)
        for part, rest in zip(absent, kept, strict=True):
            left[part] = rest
        self.drafted = True

    def settle(self, factor: float = 1.0) -> None:
        """Count the last encoding: its error becomes the residual.

        Args:
            factor: its gradients turned out to be this many times as large as earlier ones (a new loss scale, which is
                known only at the end of a step). Its error is corrected as if the residual had been rescaled before.
        """
        if self.drafted:
            if factor != 1.0:
                # The draft contains the residual in the old scale. The correction is linear, so it may come late.
                self._draft.add_(self.residual, alpha=factor - 1.0)
            self.residual, self._draft = self._draft, self.residual
        self.drafted = False

    def drop(self) -> None:
        """Discard the last encoding. Without a draft it has already counted."""
        self.drafted = False

    def state_dict(self) -> State:
        return {"residual": self.residual, "draft": self._draft if self.drafted else None}

    def load_state_dict(self, state: State) -> None:
        self.residual.copy_(state["residual"])
        self.drafted = state["draft"] is not None
        if self.drafted:
            self._draft.copy_(state["draft"])


class DeltaStream:
    """Sends changing values from one sender to one receiver as differences.

    Both sides hold the values as the receiver knows them, and add the same decoded differences. The error of an
    encoding is part of the next difference, so no residual is needed (DoubleSqueeze, Tang et al. 2019, compresses this
    second direction too).

    - Both copies are equal bit for bit after any number of rounds, if each encoding arrives once and in order. `rounds`
      counts them.
    - Float32 denormals count as 0, since not all processes compute with them.
    - Values that are not finite are sent as the codec carries them. In the next round they count as 0 in both copies,
      so that later values replace them.

    Args:
        codec: the codec.
        held: 1-D values as the receiver knows them, of the values' dtype. Changed in place. `restart` sets them.
    """

    def __init__(self, codec: Codec, held: torch.Tensor) -> None:
        self.codec = codec
        self.held = held
        self.rounds = 0

    def restart(self, values: torch.Tensor) -> None:
        """Continue from these values, which both sides have (they were sent unchanged)."""
        self.held.copy_(values)
        # Both sides drop denormals, because not all processes compute with them.
        drop_denormals(self.held)
        self.rounds = 0

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Sender: encode the changes into `out` (see `Codec`), and add them to `held`."""
        # Both copies treat values that are not finite as 0 in the next round, so that later values replace them.
        self._mend()
        delta = self.codec.scratch.buffer("delta", values.numel(), working_dtype(values.dtype))
        self.codec.encode(torch.sub(values, self.held, out=delta), out)
        self._take(out)

    def decode(self, data: torch.Tensor) -> None:
        """Receiver: add the changes to `held`. Raises ValueError as `Codec.decode`."""
        self._mend()
        self._take(data)

    def state_dict(self) -> State:
        return {"held": self.held, "rounds": self.rounds}

    def load_state_dict(self, state: State) -> None:
        restore_tensor(self.held, state["held"])
        self.rounds = state["rounds"]

    def _mend(self) -> None:
        if not all_finite(self.held):
            self.held.masked_fill_(~torch.isfinite(self.held), 0)

    def _take(self, data: torch.Tensor) -> None:
        self.codec.add(data, self.held)
        drop_denormals(self.held)
        self.rounds += 1
