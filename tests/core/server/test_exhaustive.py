"""All that can happen in a very small job: the state space is closed, and no state of it is wrong."""

import os

import pytest
from exhaustive_search import Scope, search

pytestmark = pytest.mark.simulated

SCOPES = [
    (Scope(groups=1, pushes=2, crashes=0), 21),
    (Scope(groups=2, pushes=1, crashes=0), 353),
    (Scope(groups=1, pushes=2, crashes=1), 850),
]
"""With the number of states, which says that the search has not become smaller unnoticed."""
if LARGER := os.environ.get("TOPOTRAIN_EXHAUSTIVE"):
    # GROUPS,PUSHES,CRASHES,DUPLICATES of a larger scope: 2,2,1,1 takes hours.
    SCOPES.append((Scope(*map(int, LARGER.split(","))), 0))


@pytest.mark.parametrize(("scope", "states"), SCOPES)
def test_no_order_of_events_is_wrong(scope, states):
    found, ends = search(scope, 10_000_000)
    print(f"{scope}: {found} states, {ends} ends")
    assert found == (states or found) and ends
