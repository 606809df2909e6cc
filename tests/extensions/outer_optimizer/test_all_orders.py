"""All orders of events of two workers, two shards and two fragments, over two rounds of each."""

import pytest
from exhaustive_rounds import RoundScope, RoundsState
from exhaustive_search import search_from
from seeds import SOAK

pytestmark = pytest.mark.simulated

SCOPES = [(RoundScope(), 553), (RoundScope(interval=2, overlap=1), 913)]
"""Two rounds of each fragment. The number of states says that the search has not become smaller unnoticed."""
LARGER = [(RoundScope(steps=6), 775), (RoundScope(fragments=1, interval=2, overlap=1), 805)]


@pytest.mark.parametrize(("scope", "states"), SCOPES + LARGER * SOAK, ids=str)
def test_no_order_of_events_breaks_a_round(scope: RoundScope, states: int) -> None:
    found, ends = search_from(RoundsState(scope), 60_000)
    assert found == states and ends
