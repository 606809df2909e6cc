"""Sentences that explain the messages of a step in the framework's words."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from topotrain.config.topology import Topology
from topotrain.core.events import Traveled


class FrameworkKind(Enum):
    """The kinds of training that have words of their own."""

    SANDBLASTER = "Sandblaster"
    ALLREDUCE = "AllReduce"
    DOWNPOUR = "Downpour"
    HOGWILD = "Hogwild"
    ISLANDS = "islands"

    @staticmethod
    def of(topology: Topology) -> "FrameworkKind":
        """Return the kind of a layout."""
        words = topology.framework
        if topology.cluster.outer is not None:
            return FrameworkKind.ISLANDS
        if "Hogwild" in words:
            return FrameworkKind.HOGWILD
        if "Downpour" in words:
            return FrameworkKind.DOWNPOUR
        return FrameworkKind.ALLREDUCE if "AllReduce" in words else FrameworkKind.SANDBLASTER


_VOTE = "{sender} tells {to}, which decides for all servers of the group, that it has every part of step {step}."
_APPLY = "{sender} decides that step {step} is made, and tells {to}. So all servers of the group make it, or none does."
_EDIT = "{sender} sends {to} its gradient of {part} as the script has changed it after the backward, in step {step}."
_MISSED = (
    "{sender} tells {to} that step {step} was made without it: the others were faster, and there is a backup worker."
)
_GRADIENT = "{sender} gives {to}, on the same host, its gradient of {part}, step {step}. One sum will leave the host."
_SUM = (
    "{sender} sends {to} the sum of its host's gradients of {part}, step {step}: one message instead of one per worker."
)
_GROUP = {"edit": _EDIT, "vote": _VOTE, "apply": _APPLY, "missed": _MISSED, "gradient": _GRADIENT, "sum": _SUM}
"""Sentences about the inside of one synchronous worker group, which all frameworks have in common."""

_SYNCHRONOUS = {
    **_GROUP,
    "commit": "{sender} tells {to} that its script has called optimizer.step(), step {step}. The server waits for "
    "this from every worker.",
    "applied": "{sender} tells {to} that its optimizer has made step {step}. All workers go on with the same values.",
}

_SERVER_GROUPS = {
    "difference": "{sender} sends {to}, the master of {part}, what its group has changed since their last exchange "
    "(exchange {step}). Meanwhile its workers go on.",
    "master": "{sender} answers {to} with its value of {part}, which has the changes of all groups so far "
    "(exchange {step}).",
    "offer": "{sender} offers {to} its value of {part}, to bring the two copies together (exchange {step}). "
    "Neither group waits.",
    "reply": "{sender} answers {to} with the change of {part} that brings the two copies together (exchange {step}). "
    "It has made the opposite change.",
}

SENTENCES: Mapping[FrameworkKind, Mapping[str, str]] = MappingProxyType(
    {
        FrameworkKind.SANDBLASTER: {
            **_SYNCHRONOUS,
            "push": "{sender} pushes its gradient of {part} to {to}, step {step}. The server waits for those of all "
            "workers, and adds them up in a fixed order.",
            "mean": "{sender} returns the mean of all workers' gradients of {part} to {to}, step {step}. It is the "
            "gradient of one large batch.",
            "values": "{sender} sends {to} the values of {part} after step {step}. Every worker begins the next step "
            "with the same ones.",
            "partial": "{sender} passes {to} a partial sum of the gradients of {part}, step {step}.",
        },
        FrameworkKind.ALLREDUCE: {
            **_SYNCHRONOUS,
            "push": "{sender} sends {to} its gradient of {part}, step {step}. That unit adds up this part for all "
            "workers: the first half of the all-reduce (reduce-scatter).",
            "mean": "{sender} returns the mean of all workers' gradients of {part} to {to}, step {step}: the second "
            "half of the all-reduce (all-gather).",
            "partial": "{sender} passes {to} a partial sum of the gradients of {part}, step {step}. After the last "
            "rank the sum is complete.",
            "values": "{sender} sends {to} the values of {part} after step {step}. Every unit keeps one part, and all "
            "workers have the whole.",
        },
        FrameworkKind.DOWNPOUR: {
            **_GROUP,
            "push": "{sender} pushes its gradient of {part} to {to}, step {step} of its group. Other groups may have "
            "changed the values since it read them: the gradient is stale by their updates.",
            "mean": "{sender} returns the mean of the gradients of {part} to {to}, step {step}: that of its group "
            "alone. The other groups have no part in it.",
            "commit": "{sender} tells {to} that its script has called optimizer.step(), step {step} of its group. The "
            "server waits for no other group.",
            "applied": "{sender} tells {to} that step {step} of its group is in the values, together with whatever "
            "other groups have added.",
            "values": "{sender} sends {to} the present values of {part}, after step {step} of its group. They have the "
            "updates of the other groups, too.",
        },
        FrameworkKind.HOGWILD: {
            **_GROUP,
            **_SERVER_GROUPS,
            "push": "{sender} pushes its gradient of {part} to {to}, step {step} of its group. The server waits for no "
            "other group.",
            "mean": "{sender} returns the mean of the gradients of {part} to {to}, step {step}: that of its group "
            "alone.",
            "commit": "{sender} tells {to} that its script has called optimizer.step(), step {step} of its group. "
            "No lock keeps other groups from their updates.",
            "applied": "{sender} tells {to} that step {step} of its group is in the group's copy of the values. Other "
            "groups change theirs at the same time.",
            "values": "{sender} sends {to} the present values of {part}, after step {step} of its group. They may be "
            "in the middle of what other groups do.",
        },
        FrameworkKind.ISLANDS: {
            **_GROUP,
            **_SERVER_GROUPS,
            "gradient": "{sender} sends {to}, which adds up {part} for their group, its gradient (step {step}). Inside "
            "a group the workers stay together.",
            "push": "{sender} sends {to} what its group has learned alone about {part}: how far its values have moved "
            "(exchange {step}). The server takes that for a gradient.",
            "mean": "{sender} returns the mean of their group's gradients of {part} to {to} (step {step}).",
            "commit": "{sender} tells {to} that this was all that its group has learned (exchange {step}).",
            "applied": "{sender} tells {to} that the outer optimizer has stepped with what the groups have learned "
            "(exchange {step}).",
            "values": "{sender} sends {to} the new common values of {part} (exchange {step}). From them the group "
            "trains alone again.",
        },
    }
)
"""By kind and by the word of the message: its sentence."""
_OTHER = "{sender} sends {to} a message of step {step}: {what}."
_SHARED = " The new values are in memory that both share, so they need not travel."


@dataclass(frozen=True, slots=True)
class Explanations:
    """Explains the messages of a job.

    kind: of its framework. in_memory: workers and servers share the memory of values.
    """

    kind: FrameworkKind
    in_memory: bool

    @staticmethod
    def of(topology: Topology) -> "Explanations":
        """Return the explanations for a layout."""
        return Explanations(FrameworkKind.of(topology), topology.sees_memory(0))

    def sentence(self, event: Traveled) -> str:
        """Explain one message."""
        template = SENTENCES[self.kind].get(event.what, _OTHER)
        part = "all its slices" if event.bucket < 0 else f"slice {event.bucket}"
        text = template.format(sender=event.who, to=event.to, step=event.step, part=part, what=event.what)
        return text + _SHARED if event.what == "applied" and self.in_memory else text
