"""The state at the begin of a pass waits until the batches before it count."""

from typing import Any

import torch

from topotrain.extensions.resume.pass_states import PassStates
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE


class Store:
    """Keeps what is saved, as (number, first byte)."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []

    def save(self, number: int, data: torch.Tensor) -> None:
        self.saved.append((number, int(data[0])))


class Counted:
    """Batches of all epochs before this one count."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def first_uncounted(self, epoch: int) -> int:
        return min(epoch, self.epoch)


def made(counted: int) -> tuple[Any, Any, Any]:
    store: Any = Store()
    accounting: Any = Counted(counted)
    return PassStates(store, accounting), store, accounting


def state(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.uint8)


def test_a_state_is_saved_at_once_where_all_batches_before_it_count() -> None:
    states, store, _ = made(counted=9)
    states.begin(0, state(1))
    states.change(0, state(2))
    states.begin(1, state(3))
    assert store.saved == [(EPOCH, 1), (SINCE, 2), (EPOCH, 3)] and not states.holds


def test_a_state_waits_for_batches_of_earlier_passes() -> None:
    states, store, counted = made(counted=3)
    states.begin(4, state(1))
    assert states.holds and store.saved == []
    states.save()
    assert store.saved == []
    counted.epoch = 4
    states.save()
    states.save()
    assert store.saved == [(EPOCH, 1)] and not states.holds


def test_changes_are_saved_behind_the_state_of_their_own_pass_only() -> None:
    states, store, counted = made(counted=3)
    states.begin(3, state(1))
    states.begin(4, state(2))
    # In the store is the state of pass 3: rates of pass 4 would be one epoch ahead of it.
    states.change(4, state(5))
    states.change(4, state(6))
    assert store.saved == [(EPOCH, 1)]
    counted.epoch = 5
    states.save()
    assert store.saved[1:] == [(EPOCH, 2), (SINCE, 6)]
    states.change(5, state(7))
    assert store.saved[3:] == []
    states.change(4, state(8))
    assert store.saved[3:] == [(SINCE, 8)]
