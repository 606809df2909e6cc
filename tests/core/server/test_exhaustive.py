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
MORE = "TOPOTRAIN_EXHAUSTIVE"
"""Set to GROUPS,PUSHES,CRASHES,DUPLICATES for a larger scope: 2,2,1,1 takes hours."""


@pytest.mark.parametrize(("scope", "states"), SCOPES)
def test_no_order_of_events_is_wrong(scope, states):
    """The count says that the search has not become smaller unnoticed."""
    found, ends = search(scope, 10_000)
    print(f"{scope}: {found} states, {ends} ends")
    assert found == states and ends


@pytest.mark.skipif(MORE not in os.environ, reason=f"{MORE} asks for it")
def test_no_order_of_events_is_wrong_in_a_larger_scope():
    scope = Scope(*map(int, os.environ[MORE].split(",")))
    found, ends = search(scope, 10_000_000)
    print(f"{scope}: {found} states, {ends} ends")
