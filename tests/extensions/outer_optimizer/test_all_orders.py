"""All orders of events of two workers, two shards and two fragments, over two rounds of each; and of one group."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
from exhaustive_rounds import RoundScope, RoundsState, RoundWorker
from exhaustive_search import search_from

from topotrain.extensions.outer_optimizer.local_values import TakeRule
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds

pytestmark = pytest.mark.simulated

SCOPES = [
    (RoundScope(), 553),
    (RoundScope(interval=2, overlap=1), 913),
    (RoundScope(groups=1, workers=2, quorum=1, steps=2), 867),
    (RoundScope(groups=1, workers=2, quorum=1, fragments=1, steps=3), 1507),
]
"""Two rounds of each fragment, and a group of two workers that take new values behind the same step.

Larger scopes have so many states that they take minutes: see LARGER.
"""
LARGER = "TOPOTRAIN_EXHAUSTIVE_ROUNDS"
"""Set to GROUPS,FRAGMENTS,STEPS,INTERVAL,OVERLAP,QUORUM,WORKERS for another scope."""


@pytest.mark.parametrize(("scope", "states"), SCOPES, ids=str)
def test_no_order_of_events_breaks_a_round(scope: RoundScope, states: int) -> None:
    """The count says that the search has not become smaller unnoticed."""
    found, ends = search_from(RoundsState(scope), 60_000)
    print(f"{scope}: {found} states, {ends} ends")
    assert found == states and ends


@pytest.mark.skipif(LARGER not in os.environ, reason=f"{LARGER} asks for it")
def test_no_order_of_events_breaks_a_round_in_a_larger_scope() -> None:
    scope = RoundScope(*map(int, os.environ[LARGER].split(",")))
    found, ends = search_from(RoundsState(scope), 10_000_000)
    print(f"{scope}: {found} states, {ends} ends")


def nobody_awaited(patch: pytest.MonkeyPatch) -> None:
    """A round is over with the first push."""
    patch.setattr(OuterRounds, "updates", lambda self, steps: [(step,) for step in steps])


def meanwhile_lost(patch: pytest.MonkeyPatch) -> None:
    """Steps during an exchange are dropped."""

    def take(self: TakeRule, own: Sequence[Any], sent: Sequence[Any], received: Sequence[Any]) -> None:
        own[0].copy_(received[0])

    patch.setattr(TakeRule, "take", take)


def taken_by_each_worker_when_it_has_them(patch: pytest.MonkeyPatch) -> None:
    """A worker of a group does not ask whether the others have the new values, too."""
    make = RoundWorker._make_step
    patch.setattr(RoundWorker, "_make_step", lambda self, settled: make(self, True))


def base_kept(patch: pytest.MonkeyPatch) -> None:
    """A worker pushes the difference to the values that it had at first."""
    settle = RoundWorker._settle

    def forgetting(self: RoundWorker) -> None:
        before = {place: list(cells.numbers) for place, cells in self.received.items()}
        settle(self)
        for place, numbers in before.items():
            self.received[place].numbers = numbers

    patch.setattr(RoundWorker, "_settle", forgetting)


@pytest.mark.parametrize(
    ("mutant", "scope"),
    [
        (nobody_awaited, RoundScope()),
        (meanwhile_lost, RoundScope(interval=2, overlap=1)),
        (base_kept, RoundScope()),
        (taken_by_each_worker_when_it_has_them, RoundScope(groups=1, workers=2, quorum=1, fragments=1, steps=3)),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_the_search_finds_a_rule_of_rounds_left_out(
    mutant: Any, scope: RoundScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    words = r"is in round|its own steps as|has counted|is not at its base|other updates|are in other exchanges"
    with pytest.raises(AssertionError, match=words):
        search_from(RoundsState(scope), 60_000)
