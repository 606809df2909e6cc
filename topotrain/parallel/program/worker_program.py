"""One worker's share of a program: its steps in order, and their moves."""

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from topotrain.parallel.program.split_program import LayoutEdge, Program, ProgramStep, ResultRef, SizeArgument, StepKind


@dataclass(frozen=True, slots=True)
class LocalStep:
    """One step of a worker. `step` is None at the end, with the last arrivals.
    Attributes:
        arrivals: edges with a value that this step is the first to need.
        leaves: edges that move its result.
        frees: values that no later step here needs.
    """

    step: ProgramStep | None
    arrivals: tuple[int, ...]
    leaves: tuple[int, ...]
    frees: tuple[ResultRef, ...]


def share(program: Program, me: int) -> tuple[LocalStep, ...]:
    """Return the steps that worker `me` runs, in the program's order, and the end."""
    steps = [step for step in program.steps if step.layout.on(me)]
    arriving = {edge.number: edge for edge in program.edges if edge.target.on(me)}
    out = frozenset(references(program.output))
    last: dict[ResultRef, int] = {}
    first: dict[int, int] = {}
    for place, step in enumerate(steps):
        last[ResultRef(step.number)] = place
        for ref in references((step.args, step.kwargs)):
            last[ref] = place
            if ref.edge is not None:
                first.setdefault(ref.edge, place)
    stops = []
    for place, step in enumerate(steps):
        arrivals = tuple(edge for edge, at in sorted(first.items()) if at == place)
        leaves = tuple(edge.number for edge in program.edges if edge.value == step.number)
        frees = tuple(ref for ref, at in last.items() if at == place and ref not in out)
        stops.append(LocalStep(step, arrivals, leaves, frees))
    # The other arrivals: the output, and values that this worker only has to have received.
    return *stops, LocalStep(None, tuple(sorted(arriving.keys() - first.keys())), (), ())


def references(nested: Any, kinds: tuple[type, ...] = (ResultRef,)) -> Iterator[Any]:
    """Yield all leaves of these kinds in nested data, in order."""
    if isinstance(nested, kinds):
        yield nested
        return
    if isinstance(nested, slice):
        nested = nested.start, nested.stop, nested.step
    # pytree would skip slices, and mappings that are not registered with it.
    items = nested.values() if isinstance(nested, Mapping) else nested if isinstance(nested, tuple | list) else ()
    for item in items:
        yield from references(item, kinds)


def replaced(nested: Any, leaf: Callable[[Any], Any], kinds: tuple[type, ...] = (ResultRef, SizeArgument)) -> Any:
    """Return the same nested data with every leaf of these kinds replaced."""
    if isinstance(nested, kinds):
        return leaf(nested)
    again = partial(replaced, leaf=leaf, kinds=kinds)
    if isinstance(nested, Mapping):
        items = {key: again(item) for key, item in nested.items()}
        return items if type(nested) in (dict, MappingProxyType) else rebuilt(nested, items)
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*map(again, nested))
    if isinstance(nested, tuple | list):
        return type(nested)(map(again, nested))
    if isinstance(nested, slice):
        return slice(again(nested.start), again(nested.stop), again(nested.step))
    return nested


def rebuilt(like: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `items` as a mapping of the same type, or as a dict where that fails."""
    # Such types are OrderedDict and the output classes of models.
    try:
        return type(like)(**items) if is_dataclass(like) else type(like)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def taken_out(program: Program) -> Iterator[ProgramStep]:
    """Yield steps that only take an item out of an argument: a tuple, dict or object."""
    nested = {step.number for step in program.steps if step.kind is StepKind.INPUT and step.shape is None}
    for step in program.steps:
        if (
            step.target in (operator.getitem, getattr)
            and isinstance(step.args[0], ResultRef)
            and step.args[0].number in nested
        ):
            yield step
            if step.shape is None:
                nested.add(step.number)


def given_of(program: Program, given: Mapping[str, Any]) -> Iterator[tuple[ProgramStep, Any]]:
    """Yield each argument, and each item taken out of one: step and value."""
    values = {step.number: given.get(step.target) for step in program.steps if step.kind is StepKind.INPUT}
    for step in taken_out(program):
        values[step.number] = step.target(values[step.args[0].number], *step.args[1:])
    steps = {step.number: step for step in program.steps}
    yield from ((steps[number], value) for number, value in values.items())


def edges_of(program: Program) -> Mapping[int, LayoutEdge]:
    """Return the edges of a program by number."""
    return {edge.number: edge for edge in program.edges}


def digest(*things: object) -> int:
    """Return a number that is the same for equal programs, in every process."""
    return hash_number("\n".join(_words(things)).encode())


def hash_number(data: bytes, order: Literal["little", "big"] = "little") -> int:
    """Return a number below 2**56 that is the same for equal data everywhere."""
    # 7 bytes, because they fit into the int64 of a hello.
    return int.from_bytes(hashlib.sha256(data).digest()[:7], order)


def _words(thing: Any) -> Iterator[str]:
    if isinstance(thing, Enum):
        yield str(thing)
    elif is_dataclass(thing) and not isinstance(thing, type):
        yield type(thing).__name__
        for field in fields(thing):
            if field.name != "line":  # the path of a checkout may differ between machines
                yield from _words(getattr(thing, field.name))
    elif isinstance(thing, Mapping):
        yield "{"
        for key, item in thing.items():
            yield str(key)
            yield from _words(item)
    elif isinstance(thing, tuple | list):
        yield "["
        for item in thing:
            yield from _words(item)
    elif callable(thing):
        yield f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"
    else:
        yield f"{type(thing).__name__} {thing}"
