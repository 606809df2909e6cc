"""Why a layout is as fast as it is, in one sentence.

A user can check it with `topotrain predict` and `topotrain run --profile`.
"""

from collections.abc import Sequence

from topotrain.tools.advice.layout_search import Rehearsed

BUSY = 0.7
"""The share of the time from which on a resource is what the others wait for."""
WAITS = 0.2
"""The share of a step from which on waiting for one process is its reason."""
LESS = 0.8
"""Another layout is worth mentioning where the same kind of resource is busy for so much less of the time."""


def reason(one: Rehearsed, others: Sequence[Rehearsed]) -> str:
    """Return the sentence about a layout. others: what it may be compared with."""
    found = one.prediction
    parts, total = found.parts, found.parts.total or found.step_s or 1.0
    if found.busiest and found.busiest[0].share >= BUSY:
        resource = found.busiest[0]
        if resource.name.endswith("cores"):
            busy = f"{resource.name} are busy {resource.share:.0%} of the step"
            return f"{busy}; workers compute {parts.compute / total:.0%} of it"
        return f"{resource.name} is busy {resource.share:.0%} of the step" + _with_less(one, others)
    if found.waits and found.waits[0].seconds / total >= WAITS:
        wait, computes = found.waits[0], f"computing takes {parts.compute / total:.0%}"
        return f"workers wait {wait.seconds / total:.0%} of the step for {wait.process}; {computes}"
    shares = {"push": parts.push, "apply": parts.apply, "pull": parts.pull, "waiting": parts.wait}
    most = max(shares, key=lambda name: shares[name])
    rest = f"; most of the rest is {most}, {shares[most] / total:.0%}" if shares[most] / total >= 0.01 else ""
    return f"workers compute {parts.compute / total:.0%} of the step{rest}"


def _with_less(one: Rehearsed, others: Sequence[Rehearsed]) -> str:
    """Return how busy this kind of resource is with another number of servers.

    "": it is not less busy with any other number.
    """
    resource = one.prediction.busiest[0]
    best, share = None, resource.share * LESS
    for other in others:
        alike = other.candidate.family is one.candidate.family and other.candidate.settings == one.candidate.settings
        apart = other.candidate.job.cluster.server_worker_separate is one.candidate.job.cluster.server_worker_separate
        if other is one or not alike or not apart or other.candidate.server_count == one.candidate.server_count:
            continue
        same = [each.share for each in other.prediction.busiest if _kind(each.name) == _kind(resource.name)]
        if same and max(same) < share:
            best, share = other, max(same)
    if best is None:
        return ""
    servers = best.candidate.server_count
    return f"; with {servers} server{'s' * (servers > 1)} {share:.0%}"


def _kind(name: str) -> str:
    """Return the kind of a resource: its name without numbers."""
    return "".join(character for character in name if not character.isdigit())
