"""Step policies: which contributions make a step.

They are those of all workers of a group, or as many as an extension asks for.
"""

from collections.abc import Collection

from topotrain.config.job import Job
from topotrain.config.topology import Address
from topotrain.core.protocol import Commit, ProtocolError, StepDecision
from topotrain.core.server.gradients.gradient_source import GradientSource


def makes_partial_steps(job: Job) -> bool:
    """Whether a step may be made of the contributions of some of a group's workers."""
    return job.cluster.backup > 0


class StepPolicy:
    """A step needs the contributions of all workers of its group.

    An extension of the server that is a StepPolicy, too, replaces this rule.
    """

    def accepts_commit(self, sender: Address, message: Commit, step: int) -> bool:
        """Whether the server handles this commit while the group is in `step`."""
        return True

    def enough(self, members: Collection[int]) -> bool:
        """Whether the contributions of these workers, which all shards have, make a step."""
        return True

    def choose(self, staging: GradientSource, decision: StepDecision) -> None:
        """Keep the contributions of which the decided step is made.

        Raises:
            ProtocolError: something of the step is missing here, so it cannot have been decided.
        """
        if not staging.staged:
            step, group = decision.step, decision.group
            raise ProtocolError(f"a decision about step {step} of group {group}, which is not staged here")


ALL_WORKERS = StepPolicy()
