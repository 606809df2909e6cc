"""The learning rate of the outer optimizer, by the number of the round."""

import json

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

    def settings(self, hyper: bytes, spec: str, fragment: int, number: int, share: float | None = None) -> bytes:
        """Return hyper-parameters with the rate of a round.

        hyper: those of round 0, as messages have them; empty: those of the description. spec: of the servers'
        optimizers. number: of the round. share: the rate is multiplied by it. None: by 1.
        """
        if not self._changes and share is None:
            return hyper
        described, rate = OptimizerSpec.from_text(spec), lr_schedules.lr(self._outer, number)
        groups = json.loads(hyper) if hyper else [dict(group) for group in described.groups]
        for index in described.optimizers[fragment][1]:
            # As `updater_block.set_lr`, so that the rate has the same bits.
            groups[index]["lr"] = rate * groups[index].get("lr_scale", 1.0) * (1.0 if share is None else share)
        return json.dumps(groups).encode()
