"""Buffers for tensors that a worker sends to others of its group.

A buffer is reused as soon as its receiver has read it, since fresh memory costs several times the copy into it. It is
written only while no receiver may read it: messages reach a peer in order, and the peer reports how many it has read.
"""

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from topotrain.core.model.schema import BufferMemory

SMALL = 4096  # bytes; smaller tensors are cheaper to send inline than by reference
_STEPS = 4  # sizes between a power of two and the next: at most a quarter of a buffer is unused


@dataclass(slots=True)
class _Lent:
    """A buffer in use: its unread parts, and whether it is kept afterwards."""

    memory: torch.Tensor
    parts: int
    kept: bool

    def read(self, most: int) -> int:
        """Count up to `most` of its parts as read; return how many."""
        count = min(most, self.parts)
        self.parts -= count
        return count


class SendBuffers:
    """The send buffers of one worker. Any thread may call it."""

    def __init__(self, memory: BufferMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size
        self._lent: dict[int, deque[_Lent]] = defaultdict(deque)  # by peer, in the order of sending
        self._read: dict[int, int] = defaultdict(int)

    def lend(self, to: int, nbytes: int, parts: int, again: bool) -> torch.Tensor:
        """Return `nbytes` bytes (1-D uint8) for a value that goes to a peer.

        The value is sent in `parts` messages. The caller must send these before any other message to that peer.

        Args:
            again: such values will be sent again. Memory for other values is not kept.
        """
        again = again and nbytes > SMALL
        with self._lock:
            memory = self._slot(rounded(nbytes)) if again else torch.empty(nbytes, dtype=torch.uint8)
            self._lent[to].append(_Lent(memory, parts, again))
        return memory[:nbytes]

    def read(self, by: int, count: int) -> bool:
        """Note how many messages a peer has read so far. False: that is not possible."""
        with self._lock:
            lent, new = self._lent[by], count - self._read[by]
            # A peer cannot have read more messages than were sent to it.
            if new < 0 or new > sum(one.parts for one in lent):
                return False
            self._read[by] = count
            while new:
                new -= lent[0].read(new)
                if not lent[0].parts:
                    self._return(lent.popleft())
        return True

    def _slot(self, size: int) -> torch.Tensor:
        # If the transport shares memory, the value in it is copied once, by its receiver.
        free = self._free[size]
        return free.pop() if free else self._memory.allocate(size, torch.uint8)

    def _return(self, lent: _Lent) -> None:
        if lent.kept:
            self._free[lent.memory.nbytes].append(lent.memory)


def rounded(nbytes: int) -> int:
    """Return the size of the buffer for `nbytes` bytes."""
    # Few sizes, so that values of different sizes can share buffers.
    step = max(1, (1 << max(0, nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
