"""All orders of events of two workers, two shards and two fragments, over two rounds of each; and of one group."""

import pytest
from exhaustive_rounds import RoundScope, RoundsState
from exhaustive_search import search_from
from seeds import SOAK

pytestmark = pytest.mark.simulated

SCOPES = [
    (RoundScope(), 553),
    (RoundScope(interval=2, overlap=1), 913),
    (RoundScope(groups=1, workers=2, quorum=1, steps=2), 867),
]
"""Two rounds of each fragment, and a group of two workers that take new values behind the same step."""
LARGER = [(RoundScope(groups=1, workers=2, quorum=1, fragments=1, steps=3), 1507)]


@pytest.mark.parametrize(("scope", "states"), SCOPES + LARGER * SOAK, ids=str)
def test_no_order_of_events_breaks_a_round(scope: RoundScope, states: int) -> None:
    """The count says that the search has not become smaller unnoticed."""
    found, ends = search_from(RoundsState(scope), 60_000)
    assert found == states and ends
