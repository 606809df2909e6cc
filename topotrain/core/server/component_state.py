"""State of a server's components as plain data, for a second copy of the server.

A state holds only None, numbers, texts, bytes, tensors, addresses, messages, and tuples, lists, sets, dictionaries and
queues of these. A state is not a copy: its tensors are the component's own memory, so it is valid only until the
component changes. Values that a new component has from its constructor are not part of the state.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

import torch

State = dict[str, Any]


def field_values(record: Any) -> tuple[Any, ...]:
    """Return the values of a dataclass by field, so that `cls(*values)` equals it."""
    return tuple(getattr(record, field.name) for field in fields(record))


def restore_tensor(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Give a component's tensor the content of the one in a state."""
    # A state transfer fills the buffers themselves, of which both are views.
    if mine.data_ptr() != theirs.data_ptr():
        mine.copy_(theirs)


class Component(Protocol):
    """A part of a server that has state."""

    def state_dict(self) -> State | None:
        """Return the state. None: not possible now, and possible after a later message."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict` of the same component of another copy."""
        ...


def states_of(components: Mapping[str, Component]) -> State | None:
    """Return the states of components by name. None: one of them is not possible now."""
    # All or nothing: components name the same messages and steps, so a state of some of them has no meaning.
    states = {name: component.state_dict() for name, component in components.items()}
    return None if None in states.values() else states


def load_states(components: Mapping[str, Component], states: State) -> None:
    """Restore the result of `states_of`."""
    for name, component in components.items():
        component.load_state_dict(states[name])
