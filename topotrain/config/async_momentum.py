"""Momentum of asynchronous groups, and optimizers that no groups should add.

This module has arithmetic and messages only.

With M worker groups that do not wait for each other the values move, in expectation, as if the optimizer had a momentum
of 1 - 1/M, without it having any (Mitliagkas et al., Asynchrony begets Momentum, 2016). The momentum of the optimizer
comes on top: the change of a step is (1 - 1/M) + m times the change before it, to first order. Tuning
momentum on one process tunes that sum, so the optimizer gets m - (1 - 1/M) of it (Hadjis et al., Omnivore, 2016).
And since no total momentum may reach 1, nothing above 1/M can be right.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from topotrain.config.job import Agreement, Correction, Job
from topotrain.config.topology import Topology

PAGE = "docs/topologies.md#momentum-and-groups-that-do-not-wait"
ADDING_PAGE = "docs/topologies.md#adaptive-optimizers-and-groups-that-add"

_ADAPTIVE = frozenset(
    ("adadelta", "adafactor", "adagrad", "adam", "adamax", "adammax", "adamw", "muon", "nadam", "radam", "rmsprop")
    # Rprop has steps of its own length, too.
) | {"rprop"}
"""Optimizers with steps about as long as the learning rate, by the names of torch and of SINGA's updaters."""
_BOUNDED = ("Muon",)  # its momentum is turned into a step of a fixed length


def groups_apart(topology: Topology) -> int:
    """Return how many worker groups change the same values without waiting."""
    # An outer optimizer makes one update of what all groups have learned.
    return 1 if topology.implicit or topology.cluster.outer is not None else topology.worker_groups


def implicit_momentum(groups: int) -> float:
    """Return the momentum that so many groups have without any in the optimizer."""
    return 1.0 - 1.0 / groups


def most_momentum(groups: int) -> float:
    """Return the largest momentum of an optimizer that keeps the sum below 1."""
    return 1.0 / groups


def momentum_of(name: str, groups: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest momentum of an optimizer's groups, 0 if it has none."""
    # Adam and its variants have none either, but betas: however large their averages are, a step is about as long as
    # the learning rate.
    if name.rpartition(".")[2] in _BOUNDED:
        return 0.0
    # The learning rate schedule of a script may change the momentum of one group only.
    found = [group["momentum"] for group in groups if isinstance(group.get("momentum"), int | float)]
    return float(max(found, default=0.0))


def is_adaptive(name: str) -> bool:
    """Whether an optimizer is adaptive.

    name: of a class, such as "torch.optim.Adam", or of an updater, such as "kAdam".
    """
    return name.rpartition(".")[2].removeprefix("k").lower() in _ADAPTIVE


def warning(job: Job, topology: Topology, momentum: float, optimizers: Iterable[str] = ()) -> str:
    """Return the warning to show before such a job starts, or ""."""
    return _momentum_warning(job, topology, momentum) or _adding_warning(topology, optimizers)


def _adding_warning(topology: Topology, optimizers: Iterable[str]) -> str:
    adaptive = next((name.rpartition(".")[2] for name in optimizers if is_adaptive(name)), "")
    if not (adaptive and topology.synced and topology.cluster.agreement is Agreement.kMaster):
        return ""
    groups = topology.server_groups
    return (
        f"{groups} server groups add what they have learned (agreement: kMaster), and a step of {adaptive} is about as "
        f"long as the learning rate, whatever the gradient is: together they may move {groups} times too far, and a "
        f"smaller rate hardly helps. Use agreement: kRingAverage; see {ADDING_PAGE}"
    )


def _momentum_warning(job: Job, topology: Topology, momentum: float) -> str:
    groups = groups_apart(topology)
    if groups == 1 or not momentum:
        return ""
    implicit = implicit_momentum(groups)
    if job.correction is Correction.kAuto:
        return (
            f"momentum {momentum:g} counts as {corrector(job, groups).momentum(momentum):.3g}: {groups} worker groups "
            f"that do not wait for each other act like a momentum of {implicit:.2f} (Mitliagkas et al., 2016), and "
            f"that is taken from it. correction: kNone leaves it as it is; see {PAGE}"
        )
    if job.correction is not Correction.kNone or momentum <= most_momentum(groups):
        return ""
    return (
        f"momentum {momentum:g} may be too much for {groups} worker groups that do not wait for each other: these "
        f"alone act like a momentum of {implicit:.2f} (Mitliagkas et al., 2016), together {implicit + momentum:.2f}. "
        f"Use a momentum of at most {most_momentum(groups):.2f}, {_remedies(topology)}; see {PAGE}"
    )


def explanation(job: Job, topology: Topology, momentum: float) -> str:
    """Return a hint for a job that has diverged, or "" if its groups wait."""
    groups = groups_apart(topology)
    if groups == 1:
        return ""
    if momentum and job.correction is not Correction.kNone:
        return (
            f"{groups} worker groups train without waiting for each other: use a smaller learning rate, or fewer "
            f"groups; see {PAGE}"
        )
    having = f" with momentum {momentum:g}" if momentum else ""
    return (
        f"{groups} worker groups train without waiting for each other{having}: use a smaller learning rate, "
        f"{f'a momentum of at most {most_momentum(groups):.2f}, ' if momentum > most_momentum(groups) else ''}"
        f"{_remedies(topology)}; see {PAGE}"
    )


def _remedies(topology: Topology) -> str:
    return "correction: kMomentum" + ("" if topology.synced else " or kRate") + ", or fewer groups"


@dataclass(frozen=True, slots=True)
class Corrector:
    """The effect of the job's `correction` on an update; here: none.

    less_momentum: subtracted from the optimizer's momentum. by_staleness: the learning rate is divided by the number of
    updates that the values had since the group read them (Zhang et al., Staleness-aware Async-SGD, 2016).
    """

    less_momentum: float = 0.0
    by_staleness: bool = False

    def momentum(self, momentum: float) -> float:
        """Return the corrected momentum."""
        # A negative momentum would be possible, and no optimizer of torch accepts it.
        return max(0.0, momentum - self.less_momentum)

    def rate(self, staleness: int) -> float:
        """Return the factor of the learning rate of a step."""
        # A fresh gradient has staleness 0, and counts as one of staleness 1.
        return 1.0 / max(1, staleness) if self.by_staleness else 1.0


def corrector(job: Job, groups: int) -> Corrector:
    """Return the job's corrector, for so many groups."""
    # Of one group nothing is taken. An optimizer without momentum has nothing to take it from.
    if job.correction in (Correction.kMomentum, Correction.kAuto):
        return Corrector(less_momentum=implicit_momentum(groups))
    return Corrector(by_staleness=job.correction is Correction.kRate)
