"""Memory for what workers send each other: used again when it has been read, and never before."""

import pytest
import torch

from topotrain.parallel.runtime.send_buffers import SMALL, SendBuffers, rounded


class Memory:
    """Counts what is asked for."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.zeros(numel, dtype=dtype))
        return self.made[-1]


def test_a_slot_is_used_again_once_it_has_been_read_and_not_before():
    memory = Memory()
    slots = SendBuffers(memory)
    first, second = (slots.lend(1, 10_000, 1, again=True) for _ in range(2))
    assert first.nbytes == 10_000 and first.data_ptr() != second.data_ptr()
    assert slots.read(1, 1)
    third = slots.lend(1, 10_000, 1, again=True)
    assert third.data_ptr() == first.data_ptr() and len(memory.made) == 2
    assert slots.read(1, 1), "it has not read anything new"
    assert slots.lend(1, 10_000, 1, again=True).data_ptr() not in (second.data_ptr(), third.data_ptr())


def test_a_value_in_parts_is_read_when_its_last_part_is():
    slots = SendBuffers(Memory())
    large = slots.lend(1, 50_000, 3, again=True)
    for parts in (1, 2):
        assert slots.read(1, parts)
        assert slots.lend(2, 50_000, 1, again=True).data_ptr() != large.data_ptr()
    assert slots.read(1, 3)
    assert slots.lend(2, 50_000, 1, again=True).data_ptr() == large.data_ptr()


def test_what_one_peer_has_read_says_nothing_of_another():
    slots = SendBuffers(Memory())
    lent = [slots.lend(peer, 8192, 1, again=True) for peer in (1, 2)]
    assert slots.read(2, 1)
    assert slots.lend(3, 8192, 1, again=True).data_ptr() == lent[1].data_ptr()
    assert slots.lend(3, 8192, 1, again=True).data_ptr() != lent[0].data_ptr()


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_a_count_that_cannot_be_frees_nothing(count):
    slots = SendBuffers(Memory())
    for _ in range(3):
        slots.lend(1, 8192, 1, again=True)
    assert slots.read(1, 1)
    assert not slots.read(1, count)
    assert slots.read(1, 3), "the true count is taken as before"


def test_small_values_and_what_is_sent_once_take_no_slots():
    memory = Memory()
    slots = SendBuffers(memory)
    for nbytes, again in ((SMALL, True), (0, True), (1 << 20, False)):
        assert slots.lend(1, nbytes, 1, again).nbytes == nbytes
    assert slots.read(1, 3) and not memory.made


def test_values_of_about_the_same_size_share_slots_and_little_is_wasted():
    assert {rounded(nbytes) for nbytes in range(65_537, 81_920)} == {81_920}
    for nbytes in (4097, 5000, 8191, 8192, 100_000, 1 << 20, (1 << 20) + 1, 48_000_000):
        assert nbytes <= rounded(nbytes) <= nbytes * 1.25 + 1
