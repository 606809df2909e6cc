"""The message about a worker's copies of the parameters."""

from dataclasses import dataclass

from topotrain.core.protocol.message import MOST, TO_SERVER, Message, message


@message(173, TO_SERVER)
@dataclass(frozen=True, slots=True)
class CopySums(Message):
    """Worker -> server: sums of the worker's values, before its commit of this step."""

    step: int
    sums: tuple[int, ...]  # flat pairs: the number of a piece on the server, and its `bit_sum`

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and len(self.sums) % 2 == 0
