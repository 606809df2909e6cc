"""All that can happen in a very small job: the state space is closed, and no state of it is wrong."""

import os

import pytest
from exhaustive_search import Scope, search

from topotrain.core.server.consistency import DecisionLog
from topotrain.extensions.elastic.membership import Members

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


def everybody_heard(patch):
    """The words of the dead count."""
    patch.setattr(Members, "is_current", lambda self, worker: True)


def half_a_vote(patch):
    """One shard is enough for a decision."""
    patch.setattr(DecisionLog, "ready", lambda self, *_: sorted(self._votes))


@pytest.mark.parametrize("mutant", [everybody_heard, half_a_vote])
def test_the_search_finds_a_rule_left_out(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(Exception, match=r"is not staged|is ahead|wait for ever|more than once|has \\{|do not continue"):
        search(Scope(groups=1, pushes=2, crashes=1), 10_000)
