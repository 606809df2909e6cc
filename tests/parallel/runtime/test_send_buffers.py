"""Memory for what workers send each other: used again when it has been read, and never before."""

from collections import Counter, deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from topotrain.parallel.runtime.send_buffers import SMALL, SendBuffers, rounded


class Memory:
    """Counts what is asked for."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.zeros(numel, dtype=dtype))
        return self.made[-1]


PEERS = (1, 2)
SIZES = (0, SMALL, 5000, 8192, 50_000)


@given(
    st.lists(
        st.tuples(st.sampled_from(PEERS), st.sampled_from(SIZES), st.integers(1, 3), st.booleans(), st.integers(-1, 4)),
        max_size=40,
    )
)
def test_a_slot_is_used_again_once_all_parts_of_its_value_have_been_read(turns):
    """Small values, and what is sent once, take no slot. A count that cannot be frees nothing."""
    memory, read, free = Memory(), Counter(), Counter()
    slots = SendBuffers(memory)
    unread = {peer: deque() for peer in PEERS}  # the slot of each part, and whether it is the value's last
    for to, nbytes, parts, again, more in turns:
        made, size = len(memory.made), rounded(nbytes)
        value = slots.lend(to, nbytes, parts, again)
        kept = again and nbytes > SMALL
        assert value.nbytes == nbytes
        assert len(memory.made) - made == (kept and not free[size])
        assert not kept or all(slot is None or slot[0] != value.data_ptr() for u in unread.values() for slot, _ in u)
        free[size] -= kept and len(memory.made) == made
        unread[to] += [((value.data_ptr(), size) if kept else None, part == parts) for part in range(1, parts + 1)]
        possible = 0 <= more <= len(unread[to])
        assert slots.read(to, read[to] + more) == possible
        for _ in range(more if possible else 0):
            read[to] += 1
            slot, last = unread[to].popleft()
            free[slot and slot[1]] += bool(slot) and last


def test_values_of_about_the_same_size_share_slots_and_little_is_wasted():
    assert {rounded(nbytes) for nbytes in range(65_537, 81_920)} == {81_920}
    for nbytes in (4097, 5000, 8191, 8192, 100_000, 1 << 20, (1 << 20) + 1, 48_000_000):
        assert nbytes <= rounded(nbytes) <= nbytes * 1.25 + 1
