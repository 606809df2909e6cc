"""Combinations of fields that averaging groups exclude, and the moving rate."""

from topotrain.config.combinations import Combination
from topotrain.config.job import Agreement, Cluster

_HERE = (Agreement.kElastic, Agreement.kGossip)
_MOVING = 0.9
"""The moving rate of all groups together, as in the experiments of Zhang, Choromanska and LeCun, 2015."""

COMBINATIONS = (
    Combination(
        "cluster.agreement",
        lambda c: c.agreement in _HERE and c.nserver_groups < 2,
        "must be left out with nserver_groups below 2: only several server groups agree",
    ),
    Combination(
        "cluster.moving_rate",
        lambda c: c.moving_rate and c.agreement is not Agreement.kElastic,
        "must be 0 without agreement: kElastic",
    ),
)


def moving_rate(cluster: Cluster) -> float:
    """The share of its distance to the center by which a group moves in an exchange."""
    return cluster.moving_rate or _MOVING / cluster.nserver_groups
