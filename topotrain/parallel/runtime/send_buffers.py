"""Memory for what a worker sends to the others of its group: used again as soon as its receiver has read it.

Fresh memory costs several times the copy that it is for. And where the road shows memory, a value that lies here is
copied once, by its receiver, while through a socket it would have to be read and written by two busy processes at the
same time.

Rule: a slot is written only while no receiver may read it. Bodies go to a peer in order, and what it says of itself is
how many of them it has read; so nothing that it does not say can free a slot.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

SMALL = 4096  # bytes; less is cheaper to send than to point at
_STEPS = 4  # sizes between a power of two and the next: at most a quarter of a slot is not used

Allocate = Callable[[int, torch.dtype], torch.Tensor]


def private(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that no road shows."""
    return torch.empty(numel, dtype=dtype)


@dataclass(slots=True)
class _Lent:
    """Memory with a value in it, how many of the value's parts have not been read, and whether it is kept then."""

    memory: torch.Tensor
    parts: int
    kept: bool


class SendBuffers:
    """The slots of one worker. Any thread may call it.

    Args:
        allocate: allocate(numel, dtype) gives 1-D memory, which is kept for good.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size
        self._lent: dict[int, deque[_Lent]] = defaultdict(deque)  # by peer, in the order of sending
        self._read: dict[int, int] = defaultdict(int)

    def lend(self, to: int, nbytes: int, parts: int, again: bool) -> torch.Tensor:
        """Memory of so many bytes (1-D uint8) for a value that goes to a peer in so many messages.

        Whoever calls sends them before anything else goes to that peer.

        Args:
            again: such values will be sent again and again; memory for others is not kept.
        """
        again = again and nbytes > SMALL
        with self._lock:
            memory = self._slot(rounded(nbytes)) if again else private(nbytes, torch.uint8)
            self._lent[to].append(_Lent(memory, parts, again))
        return memory[:nbytes]

    def read(self, by: int, count: int) -> bool:
        """A peer has read `count` messages since the beginning; False: that cannot be."""
        with self._lock:
            lent, new = self._lent[by], count - self._read[by]
            if new < 0 or new > sum(one.parts for one in lent):
                return False
            self._read[by] = count
            while new:
                some = min(new, lent[0].parts)
                lent[0].parts -= some
                new -= some
                if not lent[0].parts:
                    self._take_back(lent.popleft())
        return True

    def _slot(self, size: int) -> torch.Tensor:
        free = self._free[size]
        return free.pop() if free else self._allocate(size, torch.uint8)

    def _take_back(self, lent: _Lent) -> None:
        if lent.kept:
            self._free[lent.memory.nbytes].append(lent.memory)


def rounded(nbytes: int) -> int:
    """The size of the slot for so many bytes: there are few sizes, so that values of any size share them."""
    step = max(1, (1 << max(0, nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
