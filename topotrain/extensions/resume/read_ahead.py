"""Random number generators of a loop that draws batches before it uses them.

A loop of another library reads some batches ahead. Its dataset may draw random numbers for them before the model draws
those of an earlier batch. So a state that is saved when a batch is used has the generators before each of these reads.
"""

from collections import deque
from collections.abc import Mapping

import torch

from topotrain.training.rng_state import Stand


class ReadAhead:
    """Notes generators for batches that are drawn and not used.

    It replays those of an earlier process.

    notes: whether states will be saved. Otherwise all generators are given as {}, for reading them takes time.
    """

    def __init__(self, notes: bool) -> None:
        self.notes = notes
        # For each batch that is drawn and not used, the generators before it was drawn.
        self._drawn: deque[Stand] = deque()
        # Those of the earlier process that are not reached yet. The last is that of the use of its batch.
        self._earlier: deque[Stand] = deque()
        self.unused = True
        """Whether no batch of this pass was used yet."""

    def begin(self) -> None:
        """A pass begins; what was drawn of the one before will not be used."""
        self._drawn.clear()
        self._earlier.clear()
        self.unused = True

    def replay(self, now: Stand, ahead: Mapping[str, torch.Tensor]) -> None:
        """Go on as the earlier process, which has saved these (`WorkerState`)."""
        found: dict[int, Stand] = {}
        for name, tensor in ahead.items():
            number, _, rest = name.partition(" ")
            found.setdefault(int(number), {})[rest] = tensor
        if found:
            self._earlier = deque([now, *(found[number] for number in sorted(found))])

    def asked(self, present: Stand) -> Stand:
        """The loop draws a batch, with these generators.

        Returns:
            those to restore before, if any.
        """
        # The first batch is drawn from `now`, which the pass restores itself (`ScriptResume.opened`).
        if len(self._earlier) < 2:
            self._drawn.append(present)
            return {}
        first = not self._drawn
        noted = self._earlier.popleft()
        self._drawn.append(noted)
        return {} if first else noted

    def ended(self) -> None:
        """There was no batch to draw."""
        self._drawn.pop()

    def reached(self) -> Stand:
        """The oldest batch is used. Returns the generators to restore before, if any."""
        noted = self._earlier[-1] if self._earlier else {}
        self._earlier.clear()
        self.unused = False
        return noted

    def states(self, present: Stand) -> tuple[Stand, Stand]:
        """Return `now` and `ahead` of a state that is saved at this use."""
        now, *later = self._drawn
        return now, {
            f"{number} {name}": tensor
            for number, noted in enumerate((*later, present))
            for name, tensor in noted.items()
        }

    def used(self) -> None:
        """The oldest batch is used, and its state is saved if it had to be."""
        self._drawn.popleft()
