"""The message about a worker's copies of the parameters."""

from dataclasses import dataclass

from topotrain.core.protocol.message import MOST, TO_SERVER, Message, message


@message(173, TO_SERVER)
@dataclass(frozen=True, slots=True)
class CopySums(Message):
    """Worker -> server: before the commit of this step, flat pairs (number of a piece on the server, its `bit_sum`)."""

    step: int
    sums: tuple[int, ...]

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and len(self.sums) % 2 == 0
