"""Codecs: a 1-D tensor of floats becomes fewer bytes, and floats again.

The number of bytes depends only on the number of elements, so a receiver knows it in advance. A codec keeps no state
between calls. `error_feedback` compensates its errors.
"""

from abc import ABC, abstractmethod
from math import ceil, sqrt

import numpy as np
import torch

from topotrain.core.server.nonfinite import all_finite
from topotrain.extensions.compression.encoded_sizes import BLOCK, SMALL_BLOCK, e3m0_bytes, int8_bytes, kept

_SINGLE = torch.finfo(torch.float32)
_TOP_SCALE = _SINGLE.max / 127 * (1 - 2**-22)  # 127 times the largest scale must not round to infinity
_SAMPLES = 4096  # elements looked at for a first guess of top-k's threshold


class ScratchMemory:
    """Reusable memory for one thread. Fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of any content. The next call with this name reuses it."""
        # Bytes, so that one allocation serves all dtypes and all smaller sizes.
        size = numel * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            held = self._buffers[name] = torch.empty(size, dtype=torch.uint8)
        return held[:size].view(dtype)


class Codec(ABC):
    """A way to write floats as bytes.

    - `values` and `out` are contiguous 1-D CPU tensors of float32, float64, bfloat16 or float16.
    - `data` is a contiguous 1-D uint8 tensor of exactly `size(numel)` bytes. It begins at a multiple of 4 bytes of its
      storage.
    - Decoding gives the same bits on every machine. Each element takes at most one rounded operation per step. No
      element decodes to a float32 denormal, which some processes round to zero and others do not.
    - The scratch memory is for one thread.
    """

    def __init__(self, largest: float, scratch: ScratchMemory | None) -> None:
        self.largest = largest  # larger magnitudes are sent as this one
        self.scratch = scratch or ScratchMemory()

    @abstractmethod
    def size(self, numel: int) -> int:
        """Return the bytes of an encoding of `numel` elements."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> bool:
        """Write `values` into the bytes `out`.

        Returns False if a value was not finite, or larger than `largest`.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write the decoded values of `data` into `out`.

        Raises:
            ValueError: `data` cannot be an encoding of that size.
        """

    def add(self, data: torch.Tensor, out: torch.Tensor, sign: int = 1) -> None:
        """Add the decoded values of `data` to `out`, or subtract them with `sign` -1.

        Raises:
            ValueError: as `decode`.
        """
        # Through scratch memory, since an addition of two dtypes would allocate a copy. Not fused into one operation,
        # because processors differ in whether they round in between.
        single = self.scratch.buffer("work", out.numel(), torch.float32)
        self.decode(data, single)
        out.add_(single, alpha=sign)


class CastCodec(Codec):
    """kFp16 and kBf16: each element rounded to a shorter float.

    Half the bytes of float32. kFp16 keeps 11 significant bits up to 65504. Larger finite numbers become ±65504, and
    numbers below 2^-25 become 0. kBf16 keeps 8 bits and float32's range. Infinities and NaN are preserved.
    """

    def __init__(self, dtype: torch.dtype, scratch: ScratchMemory | None = None) -> None:
        super().__init__(torch.finfo(dtype).max, scratch)
        self.dtype = dtype

    def size(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> bool:
        short = _checked(self, out, values).view(self.dtype)
        short.copy_(values)
        whole = all_finite(short)
        # A finite number too large for the short dtype became infinite. It is sent as the largest finite number.
        if not whole:
            _saturate(values, short)
        if self.dtype is torch.bfloat16:
            # A bfloat16 denormal is a float32 denormal, and would decode differently where denormals are flushed.
            drop_denormals(short)
        return whole

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_checked(self, data, out).view(self.dtype))


class Int8Codec(Codec):
    """kInt8: blocks of 512 elements with a float32 scale, rounded to nearest.

    The scale is the largest magnitude of the block / 127. A quarter of the bytes of float32. The error is at most half
    a scale. One large element costs the precision of the small ones in its block, so blocks are short (Dettmers 2016).
    Blocks smaller than about 1e-36 become 0. An element that is not finite is decoded as NaN and does not affect its
    neighbors: it has the code -128 in a block with a negative scale.
    """

    def __init__(self, scratch: ScratchMemory | None = None) -> None:
        super().__init__(_SINGLE.max, scratch)

    def size(self, numel: int) -> int:
        return int8_bytes(numel)

    def _parts(self, data: torch.Tensor, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return (scales, codes, elements) of the full blocks and of the rest, by block."""
        numel = flat.numel()
        # All scales come first: they are 4 bytes wide, and the data begins at a multiple of 4.
        split = data.numel() - numel
        scales, codes = data[:split].view(torch.float32), data[split:].view(torch.int8)
        rows = numel // BLOCK
        cuts = (
            (slice(0, rows), slice(0, rows * BLOCK), BLOCK),
            (slice(rows, None), slice(rows * BLOCK, None), numel % BLOCK),
        )
        return [
            (scales[row].unsqueeze(1), codes[part].view(-1, wide), flat[part].view(-1, wide))
            for row, part, wide in cuts
            if flat[part].numel()
        ]

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> bool:
        _checked(self, out, values)
        single, whole = _single(values, self.scratch)
        work = self.scratch.buffer("work", values.numel(), torch.float32)
        for (scales, codes, x), (_, _, y) in zip(self._parts(out, single), self._parts(out, work)):
            torch.abs(x, out=y)
            torch.amax(y, 1, keepdim=True, out=scales)
            # An element that is not finite shows in its block's largest magnitude: one look at the scales is enough.
            if all_finite(scales):
                self._round(x, y, scales, codes)
            else:
                self._round_around(x, y, scales, codes)
                whole = False
        return whole

    def _round(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        scales.div_(127).clamp_(max=_TOP_SCALE)
        # A denormal scale has an infinite reciprocal. Such a block is sent as zeros.
        scales.masked_fill_(scales < _SINGLE.tiny, 0)
        inverse = scales.reciprocal()
        inverse.masked_fill_(scales == 0, 0)
        torch.mul(x, inverse, out=y)
        codes.copy_(y.round_())

    def _round_around(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """Encode the rare case: some elements of `x` are not finite."""
        bad = ~torch.isfinite(x)
        finite = x.masked_fill(bad, 0)
        torch.amax(finite.abs(), 1, keepdim=True, out=scales)
        self._round(finite, y, scales, codes)
        codes.masked_fill_(bad, -128)
        marked = bad.any(1, keepdim=True)
        # A negative scale marks a block with elements that are not finite. -0.0 would not be less than 0.
        scales.copy_(torch.where(marked, -scales.clamp(min=_SINGLE.tiny), scales))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        _checked(self, data, out)
        if out.dtype is not torch.float32:
            single = self.scratch.buffer("work", out.numel(), torch.float32)
            self.decode(data, single)
            out.copy_(single)
            return
        for scales, codes, x in self._parts(data, out):
            # The order of operations is part of the format: both sides must decode the same bits.
            x.copy_(codes)
            x.mul_(scales.abs())
            # The mask costs a pass over all elements, so it is made only if some block is marked.
            if bool((scales < 0).any()):
                x.masked_fill_((codes == -128) & (scales < 0), float("nan"))


class E3M0Codec(Codec):
    """kE3M0: a sign and three bits of exponent, in blocks of 256 with a scale.

    An eighth of the bytes of float32. The scale is a float32, the largest magnitude of the block. An element becomes 0,
    or the scale times the nearest of 1, 1/2, ... 1/64: it is off by a factor of at most the square root of 2, and 0
    below 1/90 of the scale. Blocks smaller than about 1e-36 become 0. An element that is not finite is decoded as NaN:
    it has the code of -0 in a block with a negative scale. Streaming DiLoCo (Douillard et al., 2025) sends outer
    gradients so.
    """

    # The largest element of a block becomes a float16 of the exponent field 7. All below 1/90 of it are denormals, of
    # the field 0, so the field is the code. A mantissa above that of sqrt(2) is rounded up to the next power of two.
    _TOP = 2.0**-8 * (2 - 2**-11) / sqrt(2)
    _LEAST = _SINGLE.tiny * 128  # a 64th of a smaller scale would be a denormal

    def __init__(self, scratch: ScratchMemory | None = None) -> None:
        super().__init__(_SINGLE.max, scratch)
        levels = [0.0, *(2.0**-k for k in range(6, -1, -1))]
        levels += [-level for level in levels]
        pairs = torch.tensor([[levels[byte & 15], levels[byte >> 4]] for byte in range(256)])
        # Of each byte the two elements in it, as one number: to look up a number takes a third of the time of a row.
        self._pairs = pairs.view(torch.int64).flatten()

    def size(self, numel: int) -> int:
        return e3m0_bytes(numel)

    def _by_block(self, flat: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """Return (block numbers, elements) of the full blocks and of the rest, by block."""
        rows, rest = divmod(flat.numel(), SMALL_BLOCK)
        if not rest:
            return [(slice(0, rows), flat.view(-1, SMALL_BLOCK))] if rows else []
        full = rows * SMALL_BLOCK
        found = [(slice(0, rows), flat[:full].view(-1, SMALL_BLOCK))] if rows else []
        return [*found, (slice(rows, rows + 1), flat[full:].view(1, -1))]

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> bool:
        _checked(self, out, values)
        single, whole = _single(values, self.scratch)
        split = out.numel() - (values.numel() + 1) // 2
        scales, packed = out[:split].view(torch.float32), out[split:]
        # An element that is not finite shows in the scale of its block.
        if self._find_scales(single, scales):
            self._pack(self._magnitudes(single, scales), packed)
            return whole
        bad = ~torch.isfinite(single)
        finite = single.masked_fill(bad, 0)
        self._find_scales(finite, scales)
        self._pack(self._magnitudes(finite, scales).masked_fill_(bad, 8), packed)
        marks = torch.zeros(values.numel(), dtype=torch.float32).masked_fill_(bad, 1)
        for rows, mark in self._by_block(marks):
            row, marked = scales[rows], mark.amax(1) > 0
            # A negative scale marks a block with elements that are not finite. -0.0 would not be less than 0.
            row.copy_(torch.where(marked, -row.clamp(min=_SINGLE.tiny), row))
        return False

    def _find_scales(self, x: torch.Tensor, scales: torch.Tensor) -> bool:
        """Write the largest magnitude of each block; False: some are not finite."""
        lowest = self.scratch.buffer("inverse", scales.numel(), torch.float32)
        # Two passes that write nothing take less time than one that writes all magnitudes, and one over these.
        for rows, its in self._by_block(x):
            torch.amax(its, 1, out=scales[rows])
            torch.amin(its, 1, out=lowest[rows])
        # By numpy, of which a call takes half the time: the numbers are few.
        least, most = lowest.numpy(), scales.numpy()
        # The sign of a zero is dropped.
        np.abs(np.maximum(most, np.negative(least, out=least), out=most), out=most)
        most[most < self._LEAST] = 0
        return bool(np.isfinite(most).all())

    def _magnitudes(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the codes: three bits of exponent, and 8 where negative."""
        numel = x.numel()
        work = self.scratch.buffer("work", numel, torch.float32)
        inverse = self.scratch.buffer("inverse", scales.numel(), torch.float32)
        factors, most = inverse.numpy(), scales.numpy()
        factors.fill(0)
        np.divide(self._TOP, most, out=factors, where=most > 0)
        for (rows, its), (_, shares) in zip(self._by_block(x), self._by_block(work), strict=True):
            torch.mul(its, inverse[rows].unsqueeze(1), out=shares)
        short = self.scratch.buffer("short", numel, torch.float16).copy_(work)
        # Eight codes in a word, and room for an even number, as `_pack` needs it.
        words = self.scratch.buffer("codes", -(-numel // 8), torch.int64)
        codes = words.view(torch.uint8)[:numel]
        # Of sixteen bits s00eeemmmmmmmmmm the upper eight, s00eeemm.
        np.right_shift(short.view(torch.int16).numpy(), 8, out=codes.view(torch.int8).numpy(), casting="unsafe")
        _signs_beside_exponents(words.numpy(), self.scratch.buffer("signs", words.numel(), torch.int64).numpy())
        return codes

    def _pack(self, codes: torch.Tensor, packed: torch.Tensor) -> None:
        """Write two codes into each byte, the first one low."""
        pairs = self.scratch.buffer("codes", 2 * packed.numel(), torch.uint8)
        # The last byte may be half empty.
        pairs[codes.numel() :] = 0
        both = pairs.view(torch.int16).numpy()
        high = self.scratch.buffer("signs", packed.numel(), torch.int16).numpy()
        # Of the sixteen bits 0000bbbb0000aaaa the low byte becomes bbbbaaaa, and the copy keeps the low byte.
        np.bitwise_or(np.right_shift(both, 4, out=high), both, out=high)
        np.copyto(packed.numpy(), high, casting="unsafe")

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        _checked(self, data, out)
        split = data.numel() - (out.numel() + 1) // 2
        scales, packed = data[:split].view(torch.float32), data[split:]
        pairs = self.scratch.buffer("pairs", packed.numel(), torch.int64)
        index = self.scratch.buffer("index", packed.numel(), torch.int32)
        torch.index_select(self._pairs, 0, index.copy_(packed), out=pairs)
        elements = pairs.view(torch.float32)[: out.numel()]
        marked = bool((scales.numpy() < 0).any())
        target = out if out.dtype is torch.float32 else elements
        for (rows, x), (_, found) in zip(self._by_block(elements), self._by_block(target), strict=True):
            row = scales[rows].unsqueeze(1)
            if marked:
                # The code of -0 has no other use.
                x.masked_fill_((x.view(torch.int32) == -(1 << 31)) & (row < 0), float("nan"))
            # Powers of two, so that nothing is rounded.
            torch.mul(x, row.abs() if marked else row, out=found)
        if target is not out:
            out.copy_(elements)


def _signs_beside_exponents(words: np.ndarray, signs: np.ndarray) -> None:
    """Change each byte s00eeemm of `words` into 0000seee, and s into 0 where eee is 0.

    Overwrites `signs`.
    """
    each = 0x0101010101010101
    np.bitwise_and(np.right_shift(words, 4, out=signs), 8 * each, out=signs)
    np.bitwise_and(np.right_shift(words, 2, out=words), 7 * each, out=words)
    # With 7 added the fourth bit of a byte is set where the exponent is not 0.
    words += 7 * each
    signs &= words
    words -= 7 * each
    words |= signs


class TopKCodec(Codec):
    """kTopK: the k = max(1, ceil(ratio · n)) elements of largest magnitude.

    They are sent as int32 indices and float32 values, 8 bytes each, which is smaller than float32 for ratios below 0.5.
    Of equal magnitudes the first are taken, so the same input always gives the same bytes. NaN counts as largest, then
    the infinities, and they are preserved. The other elements are decoded as 0. So this codec is useful with error
    feedback only (Stich et al. 2018, Lin et al. 2018).
    """

    def __init__(self, ratio: float, scratch: ScratchMemory | None = None) -> None:
        super().__init__(_SINGLE.max, scratch)
        self.ratio = ratio

    def kept(self, numel: int) -> int:
        """Return how many elements are sent. Raises ValueError for more than 2^31 - 1."""
        if numel >= 2**31:
            raise ValueError(f"kTopK: {numel} elements in one piece, at most {2**31 - 1} can be numbered")
        return kept(self.ratio, numel)

    def size(self, numel: int) -> int:
        return 8 * self.kept(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> bool:
        indices, numbers = self._parts(_checked(self, out, values))
        single, whole = _single(values, self.scratch)
        if not values.numel():
            return True
        bits = self.scratch.buffer("work", values.numel(), torch.int32)
        torch.bitwise_and(single.view(torch.int32), 0x7FFFFFFF, out=bits)  # orders as magnitudes do, NaN above all
        found = largest(bits.numpy(), indices.numel(), self.scratch)
        indices.copy_(found)
        torch.index_select(single, 0, found, out=numbers)
        drop_denormals(numbers)
        return whole and all_finite(numbers)

    def _parts(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = data.numel() // 2
        return data[:half].view(torch.int32), data[half:].view(torch.float32)

    def _read(self, data: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices, numbers = self._parts(_checked(self, data, out))
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < out.numel():
            raise ValueError(f"kTopK: an index is not in 0 … {out.numel() - 1}")
        return indices.long(), numbers

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        indices, numbers = self._read(data, out)
        out.zero_().index_copy_(0, indices, numbers.to(out.dtype))

    def add(self, data: torch.Tensor, out: torch.Tensor, sign: int = 1) -> None:
        indices, numbers = self._read(data, out)
        out.index_copy_(0, indices, out[indices].add(numbers, alpha=sign).to(out.dtype))


def largest(bits: np.ndarray, k: int, scratch: ScratchMemory) -> torch.Tensor:
    """Return the indices (int64) of the k largest of a 1-D int32 array.

    The array has no negatives. Of equal elements the first are taken. A threshold is guessed from a sample, rather too
    low, and the exact choice is made among the elements above it, or among all if the guess was too high.
    """
    # The guess costs one pass, a selection among all elements several.
    floor = _guess(bits, k)
    chosen: np.ndarray | None = None
    if floor is not None:
        mask = scratch.buffer("mask", bits.size, torch.bool).numpy()
        chosen = np.flatnonzero(np.greater_equal(bits, floor, out=mask))
        if chosen.size < k:
            if floor == 1:  # `chosen` has all nonzero elements; the first k elements have enough zeros for the rest
                return torch.from_numpy(np.concatenate((chosen, np.flatnonzero(bits[:k] == 0)[: k - chosen.size])))
            chosen = None
        elif 2 * chosen.size > bits.size:
            chosen = None  # most elements are nearly equal: a first selection costs more than it saves
    among = bits if chosen is None else bits[chosen]
    threshold = np.partition(among, among.size - k)[among.size - k]
    above = np.flatnonzero(among > threshold)
    # `flatnonzero` is in ascending order, so of equal elements the first ones fill the remaining places.
    picked = np.concatenate((above, np.flatnonzero(among == threshold)[: k - above.size]))
    return torch.from_numpy(picked if chosen is None else chosen[picked])


def _guess(bits: np.ndarray, k: int) -> int | None:
    """Return a number >= 1 that about k elements reach, or None if it is not worth it."""
    step = (bits.size // _SAMPLES) | 1  # odd, so that a matrix with rows of even length is sampled in all columns
    sample = bits[::step]
    expected = k * sample.size / bits.size
    # Four standard deviations above the expected rank: the guess is rarely too high.
    rank = ceil(expected + 4 * sqrt(expected)) + 4
    if 4 * rank >= sample.size:
        return None
    # At least 1: zeros are left out, since gradients can be full of them and a selection among many equals is slow.
    return max(1, int(np.partition(sample, sample.size - rank)[sample.size - rank]))


def _checked(codec: Codec, data: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    expected = codec.size(values.numel())
    if data.dtype is not torch.uint8 or data.numel() != expected:
        raise ValueError(
            f"{type(codec).__name__}: {data.numel()} elements of {data.dtype} for {values.numel()} numbers, "
            f"not {expected} bytes"
        )
    return data


def _saturate(values: torch.Tensor, short: torch.Tensor) -> None:
    """Replace finite values that became infinite by the largest finite numbers."""
    limit = torch.finfo(short.dtype).max
    over = torch.isinf(short) & torch.isfinite(values)
    short.copy_(torch.where(over, torch.sign(short) * limit, short))


def _single(values: torch.Tensor, scratch: ScratchMemory) -> tuple[torch.Tensor, bool]:
    """Return float32 values (themselves or a copy), and whether all finite ones fit."""
    if values.dtype is torch.float32:
        return values, True
    single = scratch.buffer("single", values.numel(), torch.float32)
    single.copy_(values)
    # Only float64 has finite values outside float32's range.
    fits = values.dtype is not torch.float64 or all_finite(single)
    if not fits:
        _saturate(values, single)
    return single, fits


def drop_denormals(x: torch.Tensor) -> None:
    """Set elements not above the smallest normal float32 to +0, in place."""
    torch.ops.aten.hardshrink.out(x, _SINGLE.tiny, out=x)
