"""State of a server's components as plain data, for a second copy of the server.

A state holds only None, numbers, texts, bytes, tensors, addresses, messages, and tuples, lists, sets, dictionaries and
queues of these. A state is not a copy: its tensors are the component's own memory, so it is valid only until the
component changes. Values that a new component has from its constructor are not part of the state.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, runtime_checkable

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


@runtime_checkable
class Component(Protocol):
    """A part of a server that has state."""

    def state_dict(self) -> State | None:
        """Return the state. None: not possible now, and possible after a later message."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict` of the same component of another copy."""
        ...


class DeclaredState:
    """A component of which the state is that of some attributes.

    A component among them has a state of its own.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    """The names of these attributes."""

    def state_dict(self) -> State | None:
        """As `Component` has it."""
        held = {name: getattr(self, name) for name in self.STATE}
        return {name: value.state_dict() if isinstance(value, Component) else value for name, value in held.items()}

    def load_state_dict(self, state: State) -> None:
        """As `Component` has it."""
        for name in self.STATE:
            mine = getattr(self, name)
            if isinstance(mine, Component):
                mine.load_state_dict(state[name])
            else:
                setattr(self, name, _copied(state[name]))


def _copied(value: Any) -> Any:
    """Copy containers, with those in them."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_copied, value))
    return set(value) if isinstance(value, set) else value


def states_of(components: Mapping[str, Component]) -> State | None:
    """Return the states of components by name. None: one of them is not possible now."""
    # All or nothing: components name the same messages and steps, so a state of some of them has no meaning.
    states = {name: component.state_dict() for name, component in components.items()}
    return None if None in states.values() else states


def load_states(components: Mapping[str, Component], states: State) -> None:
    """Restore the result of `states_of`."""
    for name, component in components.items():
        component.load_state_dict(states[name])
