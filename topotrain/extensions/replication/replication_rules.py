"""Combinations of job fields that second copies of servers exclude."""

from collections.abc import Callable

from topotrain.config.combinations import Combination
from topotrain.config.job import FOREIGN, Algorithm, Cluster, OnFailure, TransportChoice


def _refused_with_copies(refused: Callable[[Cluster], object], accepted: str) -> Combination:
    """Refuse second copies with a cluster that cannot keep them."""
    return Combination("cluster.replicas", lambda c: c.replicas > 1 and refused(c), accepted)


COMBINATIONS = (
    Combination(
        "cluster.replicas",
        lambda j: j.cluster.replicas > 1 and j.on_failure is not OnFailure.kContinue,
        "needs on_failure: kContinue, since otherwise a death ends the job",
        "",
    ),
    _refused_with_copies(
        lambda c: c.transport is not TransportChoice.kTcp,
        "needs transport: kTcp, since values in shared memory have no second copy",
    ),
    _refused_with_copies(lambda c: c.nserver_groups != 1, "needs nserver_groups: 1"),
    _refused_with_copies(
        lambda c: c.nservers_per_group < 2,
        "needs nservers_per_group of at least 2: second copies are in processes of other servers",
    ),
    _refused_with_copies(
        lambda c: c.nservers_per_procs != 1, "needs nservers_per_procs: 1, so that each server has its own process"
    ),
    _refused_with_copies(
        lambda c: c.nworkers_per_group > 1 and (c.engine in FOREIGN or c.algorithm is not Algorithm.kAuto),
        "needs servers that add up the gradients: algorithm kAuto, no engine",
    ),
    _refused_with_copies(lambda c: c.link is not None, "needs a cluster without link"),
    _refused_with_copies(lambda c: c.backup, "needs backup: 0"),
)
