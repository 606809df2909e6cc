"""A torch optimizer over segments of flat memory, which it updates as few tensors.

A call of a kernel costs some microseconds, and of a small tensor hardly more than that. So segments that lie side by
side are one tensor for the optimizer, a span, wherever the bits stay those of an update of each by itself
(`kernel_rounds`). State is kept by span, and read and restored by segment.

A span ends where a segment has no gradient and its neighbor has one: torch skips the one and counts a step of the
other. Two segments that were once treated differently stay apart. So a model with parameters that take turns is cut
where it must be within a few steps, and no state is copied later.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.async_momentum import Corrector, momentum_of
from topotrain.config.job import ConfigError
from topotrain.config.sharding import ALIGN
from topotrain.core.optim import kernel_choice
from topotrain.core.optim.fused_lists import FusedLists
from topotrain.core.optim.kernel_choice import OWN_ERRORS, give_gradients
from topotrain.core.optim.kernel_rounds import common_round

Gradients = Mapping[int, torch.Tensor | None]


class Span:
    """Segments side by side in memory, as one tensor.

    Args:
        keys: of the segments, in the order of memory.
        values: the segments, 1-D if there are several.
    """

    def __init__(self, keys: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        self.keys, self.values = tuple(keys), tuple(values)
        self._starts = _distances(values)
        self.tensor = values[0] if len(values) == 1 else _joined(values[0], self._starts[-1] + values[-1].numel())

    def gradient(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradients of all segments, which lie as these do, as one tensor."""
        first = gradients[0]
        return first.view_as(self.tensor) if len(gradients) == 1 else _joined(first, self.tensor.numel())

    def part(self, value: Any, at: int) -> Any:
        """Return the part of a segment in an entry of the span's state."""
        # Anything but the state of each element belongs to all segments alike: a count of steps.
        if len(self.keys) == 1 or not self.has_elements(value):
            return value
        start = self._starts[at]
        return value[start : start + self.values[at].numel()]

    def has_elements(self, value: Any) -> bool:
        """Whether an entry of the state has a number for each element."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.tensor.shape

    def divided(self, ends: Iterable[int]) -> "list[Span]":
        """Return spans of these segments that end behind each of these positions."""
        cuts = [0, *sorted(ends), len(self.keys)]
        return [Span(self.keys[a:b], self.values[a:b]) for a, b in pairwise(cuts) if a < b]


def _distances(values: Sequence[torch.Tensor]) -> list[int]:
    """Return the distance of each tensor from the first, in elements."""
    begin, size = values[0].data_ptr(), values[0].element_size()
    return [(value.data_ptr() - begin) // size for value in values]


def _joined(first: torch.Tensor, count: int) -> torch.Tensor:
    return first.as_strided((count,), (1,), first.storage_offset())


def _follows(before: torch.Tensor, after: torch.Tensor, each: int) -> bool:
    """Whether a kernel with rounds of `each` elements can take two tensors as one."""
    if before.dtype != after.dtype or before.dim() != 1 or after.dim() != 1:
        return False
    if before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
        return False
    distance, count = after.storage_offset() - before.storage_offset(), before.numel()
    # No more than what aligns the next segment may lie between them: other elements must not be updated.
    beside = distance % ALIGN == 0 and 0 <= distance - count < ALIGN
    return beside and count % each == 0 and before.is_contiguous() and after.is_contiguous()


def _has_near(values: Sequence[torch.Tensor]) -> bool:
    """Whether segments can be joined for kernels with small rounds only."""
    return any(_follows(a, b, 1) and not _follows(a, b, ALIGN) for a, b in pairwise(values))


@dataclass(frozen=True, slots=True)
class PartGroup:
    """The segments of one group of a spec.

    Attributes:
        number: of the group in the spec.
        keys: of its segments.
        values: the segments.
    """

    number: int
    keys: tuple[int, ...]
    values: tuple[torch.Tensor, ...]


class OptimizerPart:
    """One torch optimizer over its segments of one owner.

    Args:
        made: the optimizer, made over the segments.
        groups: of each of its groups, the segments, in the order of memory.
        joins: whether the class treats all elements alike, so that segments may be joined.
    """

    def __init__(self, made: Optimizer, groups: Sequence[PartGroup], joins: bool) -> None:
        self.optimizer, self._groups, self._joins = made, tuple(groups), joins
        self._spans = [
            [Span((key,), (value,)) for key, value in zip(each.keys, each.values, strict=True)] for each in groups
        ]
        self._kinds = [kernel_choice.kinds(each.values) for each in groups]
        # Groups in which a trial of the kernel's rounds may show that segments can be joined.
        self._near = [joins and _has_near(each.values) for each in groups]
        self._rounds = [ALIGN] * len(self._groups)
        self._place: dict[int, tuple[Span, int]] = {}  # by key: the span, and the position in it
        self._apart: set[int] = set()  # keys of segments that must begin a span
        self._loose = True  # spans may be joined that are not
        self._lists: FusedLists | None = None
        self._rates: list[float] = []  # the learning rate of each group, before it is corrected
        self._index()

    @property
    def spans(self) -> list[Span]:
        """The spans, each of which is one tensor of the optimizer."""
        return [span for spans in self._spans for span in spans]

    @property
    def has_gradient(self) -> bool:
        """Whether a segment has a gradient."""
        return any(span.tensor.grad is not None for spans in self._spans for span in spans)

    # --- settings ------------------------------------------------------------------------------------------------

    def set(self, groups: Sequence[dict[str, Any]], correct: Corrector) -> None:
        """Use these settings of the spec's groups."""
        # New settings may have another fused kernel, so each change chooses again.
        for group, part, kinds in zip(self.optimizer.param_groups, self._groups, self._kinds, strict=True):
            group.update(groups[part.number])
            group.update(kernel_choice.choose(type(self.optimizer), group, kinds))
            if correct.less_momentum and momentum_of(type(self.optimizer).__name__, (group,)):
                group["momentum"] = correct.momentum(group["momentum"])
        self._rates = [group["lr"] for group in self.optimizer.param_groups] if correct.by_staleness else []
        self._choose_rounds()

    def _choose_rounds(self) -> None:
        for at, group in enumerate(self.optimizer.param_groups):
            if not self._near[at]:
                continue
            rounds = common_round(type(self.optimizer), group, self._kinds[at])
            if rounds != self._rounds[at]:
                self._rounds[at] = rounds
                # The new kernel may have other ends, so that spans of the old one would not have its bits.
                self._divide(at, [range(1, len(span.keys)) for span in self._spans[at]])
                self._loose = True

    def scale_rates(self, scale: float) -> None:
        """Use the learning rates that were set, times this factor."""
        # From the rate that was sent, so that corrections do not multiply.
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=bool(self._rates)):
            group["lr"] = rate * scale

    # --- spans ---------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the gradients that were assigned may serve for another step."""
        return not self._loose

    def assign(self, gradients: Gradients, clip: tuple[float, float] | None = None) -> None:
        """Give the spans these gradients of segments.

        A segment that is not named has none.

        clip: the bounds of every element.
        """
        self._lists = None
        if self._loose and self._joins:
            self._join(gradients)
        self._loose = False
        for at, spans in enumerate(self._spans):
            cuts = [_ends(span, gradients) for span in spans]
            if any(cuts):
                self._apart.update(span.keys[end] for span, ends in zip(spans, cuts, strict=True) for end in ends)
                self._divide(at, cuts)
            for span in self._spans[at]:
                found = [gradient for key in span.keys if (gradient := gradients.get(key)) is not None]
                gradient = span.gradient(found) if found else None
                clipped = gradient if clip is None or gradient is None else gradient.clamp(*clip)
                give_gradients((span.tensor,), (clipped,))

    def _join(self, gradients: Gradients) -> None:
        """Join spans that a kernel may update as one."""
        for at, spans in enumerate(self._spans):
            runs: list[list[Span]] = []
            for span in spans:
                if runs and self._may_join(runs[-1][-1], span, self._rounds[at], gradients):
                    runs[-1].append(span)
                else:
                    runs.append([span])
            if len(runs) < len(spans):
                self._replace(at, [run[0] if len(run) == 1 else self._join_run(run) for run in runs])

    def _may_join(self, before: Span, after: Span, rounds: int, gradients: Gradients) -> bool:
        if after.keys[0] in self._apart or not _follows(before.values[-1], after.values[0], rounds):
            return False
        left, right = self.optimizer.state.get(before.tensor, {}), self.optimizer.state.get(after.tensor, {})
        same = left.keys() == right.keys() and all(_alike(before, left[n], after, right[n]) for n in left)
        return same and not _cut(before, after, gradients)

    def _join_run(self, run: Sequence[Span]) -> Span:
        """Return one span of these, with their state."""
        span = Span([key for each in run for key in each.keys], [value for each in run for value in each.values])
        rows = [(each, self.optimizer.state.pop(each.tensor, {})) for each in run]
        for name, value in rows[0][1].items():
            held = value
            if run[0].has_elements(value):
                held = torch.zeros(span.tensor.shape, dtype=value.dtype, device=value.device)
                parts = (each.part(state[name], i) for each, state in rows for i in range(len(each.keys)))
                for at, part in enumerate(parts):
                    span.part(held, at).copy_(part)
            self.optimizer.state[span.tensor][name] = held
        return span

    def _divide(self, at: int, cuts: Sequence[Iterable[int]]) -> None:
        """Divide the spans of a group behind these positions of each."""
        made: list[Span] = []
        for span, ends in zip(self._spans[at], cuts, strict=True):
            parts = span.divided(ends)
            if len(parts) == 1:
                made.append(span)
                continue
            state, first = self.optimizer.state.pop(span.tensor, {}), 0
            for part in parts:
                last = first + len(part.keys) - 1
                for name, value in state.items():
                    self.optimizer.state[part.tensor][name] = _share(span, value, first, last)
                first = last + 1
            made += parts
        self._replace(at, made)

    def _replace(self, at: int, spans: list[Span]) -> None:
        # A span that is replaced must not keep the memory of its gradient.
        _clear([span.tensor for span in self._spans[at]])
        self._spans[at] = spans
        self._lists = None
        self.optimizer.param_groups[at]["params"] = [span.tensor for span in spans]
        self._index()

    def _index(self) -> None:
        self._place = {key: (span, i) for span in self.spans for i, key in enumerate(span.keys)}

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self, again: bool) -> None:
        """Step in place with the gradients of the segments.

        again: the same segments have one as in the last step.
        """
        # The class may be the user's own: its error ends the group with a message, and not the server.
        try:
            self._step(again)
        except OWN_ERRORS as error:
            raise ConfigError("optimizer", type(self.optimizer).__name__, f"cannot go on: {error!r}") from error

    def _step(self, again: bool) -> None:
        """Step the optimizer, values with a first gradient before the others."""
        if again:
            if self._lists is None:
                self._lists = FusedLists(self.optimizer)
            if self._lists.step():
                return
            if not self._lists.is_empty:
                self._lists = None  # they are those of other settings
        # A parameter that was frozen so far, or that no worker's batch has used. torch's fused SGD fails if only some
        # of its momentum buffers exist.
        late = list(_without_momentum(self.optimizer))
        if not late:
            self.optimizer.step()
            return
        first = {id(value) for value in late}
        others = [span.tensor for span in self.spans if id(span.tensor) not in first]
        gradients, theirs = [value.grad for value in late], [value.grad for value in others]
        _clear(others)
        self.optimizer.step()
        _clear(late)
        give_gradients(others, theirs)
        self.optimizer.step()
        # The next step may be one with the same gradients.
        give_gradients(late, gradients)

    # --- state ---------------------------------------------------------------------------------------------------

    def state_of(self, key: int) -> dict[str, Any]:
        """Return the state of a segment; tensors are the optimizer's own memory."""
        span, at = self._place[key]
        return {name: span.part(value, at) for name, value in self.optimizer.state.get(span.tensor, {}).items()}

    def forget(self, key: int) -> None:
        """Drop the state of a segment."""
        self.optimizer.state.pop(self._alone(key).tensor, None)

    def load(self, key: int, name: str, value: Any) -> None:
        """Restore an entry of a segment's state."""
        # Directly, because `Optimizer.load_state_dict` expects the state of all parameters at once.
        self.optimizer.state[self._alone(key).tensor][name] = value

    def _alone(self, key: int) -> Span:
        """The span of a segment, which has no other one."""
        span, _ = self._place[key]
        if len(span.keys) > 1:
            at = next(at for at, spans in enumerate(self._spans) if span in spans)
            self._divide(at, [range(1, len(each.keys)) if each is span else () for each in self._spans[at]])
            span, _ = self._place[key]
        self._lists, self._loose = None, True
        return span


def _ends(span: Span, gradients: Gradients) -> list[int]:
    """Return where gradients do not lie as the segments of a span do."""
    if len(span.keys) == 1:
        return []
    found = [gradients.get(key) for key in span.keys]
    pairs = zip(pairwise(found), pairwise(span.values), strict=True)
    return [at for at, (grads, values) in enumerate(pairs, 1) if not _lie_alike(*grads, *values)]


def _cut(before: Span, after: Span, gradients: Gradients) -> bool:
    left, right = gradients.get(before.keys[-1]), gradients.get(after.keys[0])
    return not _lie_alike(left, right, before.values[-1], after.values[0])


def _lie_alike(
    left: torch.Tensor | None, right: torch.Tensor | None, before: torch.Tensor, after: torch.Tensor
) -> bool:
    """Whether two gradients are missing, or in memory as the two values are."""
    if left is None or right is None:
        return left is right
    same = left.dtype == right.dtype and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    dense = left.is_contiguous() and right.is_contiguous()
    distance = after.storage_offset() - before.storage_offset()
    return same and dense and right.storage_offset() - left.storage_offset() == distance


def _alike(left: Span, mine: Any, right: Span, theirs: Any) -> bool:
    """Whether an entry of two spans' state may be one."""
    if left.has_elements(mine) or right.has_elements(theirs):
        return left.has_elements(mine) and right.has_elements(theirs) and mine.dtype == theirs.dtype
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and mine.dim() == theirs.dim() == 0 and bool(mine == theirs)
    return type(mine) is type(theirs) and bool(mine == theirs)


def _share(span: Span, value: Any, first: int, last: int) -> Any:
    """Return the state of some of a span's segments."""
    if span.has_elements(value):
        begin, end = span.part(value, first), span.part(value, last)
        return _joined(begin, end.storage_offset() + end.numel() - begin.storage_offset())
    # Each counts its own steps from here on.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _clear(values: Sequence[torch.Tensor]) -> None:
    give_gradients(values, [None] * len(values))


def _without_momentum(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield values of fused SGD with momentum that get a first gradient after others."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            here = [value for value in group["params"] if value.grad is not None]
            new = [value for value in here if optimizer.state[value].get("momentum_buffer") is None]
            if len(new) < len(here):
                yield from new
