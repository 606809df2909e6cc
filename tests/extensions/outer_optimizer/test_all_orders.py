"""All orders of events of two workers, two shards and two fragments, over two rounds of each; and of one group."""

import os

import pytest
from exhaustive_rounds import RoundScope, RoundsState
from exhaustive_search import search_from

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
