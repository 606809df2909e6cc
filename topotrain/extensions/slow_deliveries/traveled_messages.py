"""Which messages of a step are reported as `Traveled`, and by which word.

| what | the message |
|---|---|
| push | a worker's gradient of a bucket, to the server that adds it up |
| gradient | a worker's gradient of a bucket, to another worker that adds it up |
| sum | the sum of gradients of one host |
| partial | a partial sum of gradients, from server to server |
| mean | the mean of gradients of a bucket; bucket -1: it is in shared memory, and this announces it |
| edit | a gradient that the script has changed after the backward |
| commit | the script has called `optimizer.step()` |
| vote | a server has all parts of a step |
| apply | the decision to make a step |
| applied | a server has made a step |
| missed | a step was made without this worker |
| values | new values of a bucket |
| difference, master | a server group's changes of a bucket, and the value of its master group |
| offer, reply | a server group's value of a bucket, and the change that both take from it |
"""

from collections.abc import Mapping
from types import MappingProxyType

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.events import Traveled

WHATS: Mapping[str, str] = MappingProxyType(
    {
        "Push": "push",
        "GradientOverride": "edit",
        "ReducedGradient": "mean",
        "Commit": "commit",
        "StepVote": "vote",
        "Applied": "applied",
        "Values": "values",
        "Delta": "difference",
        "MasterValue": "master",
        "PairOffer": "offer",
        "PairReply": "reply",
        "HostGradient": "gradient",
        "HostPush": "sum",
        "HostMean": "mean",
        "HostValues": "values",
        "PeerGradient": "gradient",
        "PeerMean": "mean",
        "StepMissed": "missed",
    }
)
"""The word for a message by the name of its class. By name, because the extensions of some messages may be deleted."""


def traveled(sender: Address, to: Address, message: m.Message) -> Traveled | None:
    """Return the event of a message; None: it is not one of a step."""
    what, step = _what(message), _step(message)
    if not what or step < 1:
        return None
    return Traveled(str(sender), str(to), what, step, getattr(message, "bucket", -1))


def _what(message: m.Message) -> str:
    if isinstance(message, m.BackwardReduced):
        # It follows the means, and only where they are in shared memory it is the one message about them.
        return "mean" if message.written else ""
    if isinstance(message, m.StepDecision):
        return "" if message.change else "apply"
    name = type(message).__name__
    if name == "CollectivePart":
        if getattr(message, "up", False):
            return "partial"
        return "values" if getattr(message, "ordinal", 0) < 0 else "mean"
    return WHATS.get(name, "")


def _step(message: m.Message) -> int:
    """Return the number of the step, from 1. Below: the message belongs to no step."""
    # Exchanges of server groups are counted from 1. Values that no step has made have a negative round.
    if hasattr(message, "sync"):
        return int(message.sync)
    number = next((getattr(message, name) for name in ("step", "round", "backward") if hasattr(message, name)), -1)
    return int(number) + 1
