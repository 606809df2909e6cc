"""The learning rate of the outer optimizer, by the number of the round."""

import json
from collections.abc import Sequence

from topotrain.config.job import ChangeMethod, Updater
from topotrain.core.optim import lr_schedules
from topotrain.core.optim.adapter import OptimizerSpec


class OuterSchedule:
    """SINGA's schedule of an `outer` block, by the round of the fragment, from 0.

    Args:
        outer: the block.
    """

    def __init__(self, outer: Updater) -> None:
        self._outer = outer
        schedule = outer.learning_rate
        self._changes = schedule is not None and schedule.type is not ChangeMethod.kFixed

    def settings(self, hyper: bytes, spec: str, fragment: int, number: int, share: float = 1.0) -> bytes:
        """Return hyper-parameters with the rate of a round.

        hyper: those of round 0, as messages have them. spec: of the servers' optimizers. number: of the round. share:
        the rate is multiplied by it.
        """
        if not self._changes and share == 1.0:
            return hyper
        groups, rate = json.loads(hyper), lr_schedules.lr(self._outer, number)
        for index in self._groups_of(spec, fragment):
            # As `updater_block.set_lr`, so that the rate has the same bits.
            groups[index]["lr"] = rate * groups[index]["lr_scale"] * share
        return json.dumps(groups).encode()

    def _groups_of(self, spec: str, fragment: int) -> Sequence[int]:
        """The numbers of the parameter groups that a fragment's optimizer has."""
        return OptimizerSpec.from_text(spec).optimizers[fragment][1]
