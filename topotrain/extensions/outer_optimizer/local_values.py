"""A worker's own values, apart from those that it has received.

Invariant of each parameter: own value = received value + what the worker has learned and the received value does not
contain. Rebasing keeps it: a received value replaces the one before, and what it does not contain stays, once.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from topotrain.config.job import Keep
from topotrain.config.sharding import SliceMap
from topotrain.core.client.value_pull import ValueObserver
from topotrain.core.model.tensor_bits import same_bits
from topotrain.training.parameters.device_parameters import LOCAL, CopiedParameters
from topotrain.training.parameters.flat_parameters import ModelBuffers

SENT = "sent"
"""The flat buffer of own values at the time of their push."""


@dataclass(frozen=True, slots=True)
class TakeRule:
    """The rule for steps that were made between a push and the new values.

    blend: with `kBlend`, the share of the own values.
    """

    keep: Keep = Keep.kAdd
    blend: float = 0.5

    @property
    def kept(self) -> float:
        """The share of these steps that stays."""
        return {Keep.kAdd: 1.0, Keep.kBlend: self.blend, Keep.kDrop: 0.0}[self.keep]

    @property
    def needs_sent(self) -> bool:
        """Whether the values at the time of the push are needed."""
        return self.keep is Keep.kAdd

    def take(self, own: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Change own values in place. sent: those at the time of the push."""
        for index, mine in enumerate(own):
            new = received[index]
            if self.keep is Keep.kAdd:
                mine.sub_(sent[index]).add_(new)
            elif self.keep is Keep.kBlend:
                mine.mul_(self.blend).add_(new, alpha=1 - self.blend)
            else:
                mine.copy_(new)


class LocalValues(ValueObserver):
    """The own values of one worker, by fragment.

    Args:
        tensors: the parameters.
        buffers: the worker's flat buffers. Received values are in "params".
        slice_map: the map. Its optimizers are the fragments.
        rule: for steps during an exchange. None: there are none.
        trained: the numbers of the parameters that the optimizer changes. None: of all.
        difference: the name of the flat buffer for what was learned.
    """

    def __init__(
        self,
        tensors: Sequence[nn.Parameter],
        buffers: ModelBuffers,
        slice_map: SliceMap,
        rule: TakeRule | None,
        trained: Collection[int] | None = None,
        difference: str = "local",
    ) -> None:
        self._tensors, self._buffers, self._rule = tensors, buffers, rule
        self._holder, self._difference = buffers.mirror, difference
        self._spaces = slice_map.spaces
        self._members: dict[int, list[int]] = {}
        for index, parameter in enumerate(slice_map.parameters):
            self._members.setdefault(parameter.optimizer, []).append(index)
        self._untold: set[int] = set()  # fragments of which something was learned since their last push
        self._pushed: int | None = None  # the fragment that is being pushed
        self._awaited: int | None = None  # the fragment of which the next received values are. None: of all
        self._kept: set[int] = set()
        self._untrained = {index for index, tensor in enumerate(tensors) if not tensor.is_meta}
        self._trained = self._untrained if trained is None else set(trained)
        self._own: set[int] = set()  # those of them that the script has written: they are neither sent nor received

    @property
    def awaited(self) -> int | None:
        """The fragment of which new values are awaited behind a push."""
        return self._awaited

    @property
    def is_pushing(self) -> bool:
        """Whether new values of a push are awaited."""
        return self._awaited is not None

    def learn(self) -> None:
        """The values have changed here, and no server knows."""
        self._holder.stepped()
        # A parameter that no optimizer has may have a gradient, too.
        self._untrained = {i for i in self._untrained if self._tensors[i].grad is None or i not in self._trained}
        self._untold.update(self._members)

    def push(self, fragment: int) -> None:
        """Write what was learned of a fragment into the buffer of differences.

        Values that are asked for until `end_push` are of this fragment, and contain it.
        """
        self._write_difference({fragment})
        self._untold.discard(fragment)
        self._pushed = fragment
        if self._rule is not None and self._rule.needs_sent:
            for index in self._members[fragment]:
                self._holder.room(SENT, index).copy_(self._holder.value(index))

    def end_push(self) -> None:
        """The fragment is pushed."""
        self._pushed = None

    def _write_difference(self, fragments: Collection[int]) -> None:
        """Write the received values minus the own ones into its buffer."""
        flats, mine = self._buffers.flats, LOCAL
        view, holder = self._buffers.view, self._holder
        self._own = {i for i in self._untrained if not same_bits(holder.value(i).cpu(), view("params", i))}
        if not isinstance(self._holder, CopiedParameters):
            mine = self._difference
            # From the device into the buffer itself, which the subtraction then overwrites.
            indices = [index for fragment in sorted(fragments) for index in self._members[fragment]]
            self._holder.bring(mine, {index: self._tensors[index].data for index in indices})
        # A whole buffer at a time, whatever the number of parameters.
        for space in self._spaces:
            if space.optimizer in fragments:
                received, own = flats.flat("params", space.index), flats.flat(mine, space.index)
                torch.sub(received, own, out=flats.flat(self._difference, space.index))
        for index in self._own:
            view(self._difference, index).zero_()

    # --- new values in "params" ------------------------------------------------------------------------------------

    def before_values(self) -> None:
        self._holder.before_values()
        self._awaited = self._pushed
        # Values that are asked for between two rounds do not contain what was learned since.
        self._kept = set() if self._pushed is not None else set(self._untold)
        if self._kept:
            self._write_difference(self._kept)

    def after_values(self) -> None:
        fragment, self._awaited = self._awaited, None
        self._holder.own = self._own
        if fragment is not None and (self._rule is not None or len(self._members) > 1):
            self._take(self._members[fragment])
            self._holder.stepped()
        else:
            self._holder.after_values()
        kept = (index for fragment in sorted(self._kept) for index in self._members[fragment])
        for index in kept:
            own = self._holder.value(index)
            own.sub_(self._buffers.view(self._difference, index).to(own.device))
            self._holder.stepped()
        self._kept = set()

    def _take(self, indices: Iterable[int]) -> None:
        holder, rule = self._holder, self._rule or TakeRule(Keep.kDrop)
        for index in indices:
            if index in self._own:
                continue
            own = holder.value(index)
            received = self._buffers.view("params", index).to(own.device)
            rule.take([own], [holder.room(SENT, index)] if rule.needs_sent else [], [received])
