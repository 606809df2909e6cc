"""Spans of messages that a server handles or sends: name, step and bucket."""

from contextlib import AbstractContextManager

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.profiling.spans import Recorder


def handling(spans: Recorder, sender: Address, message: m.Message) -> AbstractContextManager[object]:
    """Return the span in which a server handles a message."""
    return spans.span(message.HANDLED, **_numbers(sender, message))


def sending(spans: Recorder, to: Address, message: m.Message) -> AbstractContextManager[object]:
    """Return the span in which a server sends a message."""
    return spans.span(message.SENT, **_numbers(to, message))


def _numbers(peer: Address, message: m.Message) -> dict[str, int]:
    """Return the numbers of a span."""
    numbers = {name: getattr(message, name) for name in ("ordinal", "round", "bucket") if hasattr(message, name)}
    if hasattr(message, "step"):  # from 1, as users count steps
        numbers["step"] = message.step + 1
    # These belong to a worker group, and come from a server.
    if isinstance(message, m.StepDecision | m.StepVote):
        numbers["group"] = message.group
    elif peer.role is Role.WORKER:
        numbers |= {"group": peer.group, "index": peer.index}
    return numbers
