"""How a value of any shape lies in a table's rows.

Rule: the rows of a value of two or more dimensions are its slices along the first one, so that single rows can travel;
anything else is one long row. A long row is cut into several of the table's, all of one width: a bias, a convolution
and a matrix with a million columns are the same to the servers.
"""

from dataclasses import dataclass

import torch

WIDEST = 4096
"""Elements of a table's row, at most: a row is what a message holds whole."""


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """A value of shape `shape`: `rows` rows of `width` elements, `each` of them for each slice of `size` elements."""

    shape: tuple[int, ...]
    rows: int
    width: int
    each: int
    size: int

    @staticmethod
    def of(shape: tuple[int, ...]) -> "ValueLayout":
        """The layout of a value of this shape."""
        slices = shape[0] if len(shape) > 1 else 1
        size = 1
        for length in shape[1:] if len(shape) > 1 else shape:
            size *= length
        each = max(1, -(-size // WIDEST))
        return ValueLayout(shape, slices * each, max(1, -(-size // each)), each, size)

    def expand(self, slices: torch.Tensor) -> torch.Tensor:
        """Numbers of the table's rows that hold these slices (1-D int64), in order."""
        if self.each == 1:
            return slices.long()
        return (slices.long()[:, None] * self.each + torch.arange(self.each)).reshape(-1)

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Slices, one after the other, as rows: a tensor of its own."""
        flat = values.reshape(-1, self.size) if self.size else values.new_zeros(self.rows, 1)
        padded = self.each * self.width
        if padded != flat.shape[1]:
            flat = torch.nn.functional.pad(flat, (0, padded - flat.shape[1]))
        elif flat.data_ptr() == values.data_ptr():
            flat = flat.clone(memory_format=torch.contiguous_format)
        return flat.reshape(-1, self.width)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse: one line of `size` elements per slice."""
        return rows.reshape(-1, self.each * self.width)[:, : self.size]
