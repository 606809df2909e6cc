"""Layout of a value of any shape in the rows of a table.

The rows of a value with two or more dimensions are its slices along the first one, so that single rows can be sent. Any
other value is one long row. A long row is cut into several rows of the table, all of one width.
"""

from dataclasses import dataclass

import torch

WIDEST = 4096
"""Maximum elements of a table's row. A message must hold a whole row."""


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """The layout of a value of shape `shape`.

    The table has `rows` rows of `width` elements: `each` rows for each slice of `size` elements.
    """

    shape: tuple[int, ...]
    rows: int
    width: int
    each: int
    size: int

    @staticmethod
    def of(shape: tuple[int, ...]) -> "ValueLayout":
        slices = shape[0] if len(shape) > 1 else 1
        size = 1
        for length in shape[1:] if len(shape) > 1 else shape:
            size *= length
        # Equal widths, so that a bias, a convolution and a matrix with a million columns are alike for the servers.
        each = max(1, -(-size // WIDEST))
        return ValueLayout(shape, slices * each, max(1, -(-size // each)), each, size)

    def expand(self, slices: torch.Tensor) -> torch.Tensor:
        """Return the row numbers of these slices (1-D int64), in order."""
        if self.each == 1:
            return slices.long()
        return (slices.long()[:, None] * self.each + torch.arange(self.each)).reshape(-1)

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Return slices as rows, in a new tensor."""
        # Slices without elements still need a row, of one element of padding.
        flat = values.reshape(-1, self.size) if self.size else values.new_zeros(self.rows, 1)
        padded = self.each * self.width
        if padded != flat.shape[1]:
            flat = torch.nn.functional.pad(flat, (0, padded - flat.shape[1]))
        # Rows are sent later, so they must not share memory with the value.
        elif flat.data_ptr() == values.data_ptr():
            flat = flat.clone(memory_format=torch.contiguous_format)
        return flat.reshape(-1, self.width)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as slices of `size` elements: the inverse of `split`."""
        return rows.reshape(-1, self.each * self.width)[:, : self.size]
