"""The state of a worker when a pass begins.

It is saved once all batches of earlier passes count.

A fresh process begins at the pass of the saved state, and reads nothing of earlier passes. Where a worker makes several
steps before a commit, or does not wait for one, the last batches of a pass may count only in a later pass. Until then
the state before it stays, from which they are read again.
"""

import torch

from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE
from topotrain.training.worker_stats import BatchAccounting


class PassStates:
    """Saves the states of one worker in the store.

    Args:
        client: of the store.
        accounting: knows which batches count.
    """

    def __init__(self, client: WorkerStateClient, accounting: BatchAccounting) -> None:
        self._client, self._accounting = client, accounting
        self._saved = -1  # the pass of the state in the store
        self._held: tuple[int, torch.Tensor] | None = None  # the pass of a state that is not saved yet, and the state
        self._changes: torch.Tensor | None = None  # the last ones behind it

    @property
    def holds(self) -> bool:
        """Whether a state is not saved yet. No further one is needed until then."""
        return self._held is not None

    def begin(self, number: int, state: torch.Tensor) -> None:
        """A pass begins with this state, 1-D uint8."""
        self._held, self._changes = (number, state), None
        self.save()

    def change(self, number: int, changes: torch.Tensor) -> None:
        """The state has changed in the middle of a pass."""
        if number == self._saved:
            self._client.save(SINCE, changes)
        elif self._held is not None and number == self._held[0]:
            self._changes = changes

    def save(self) -> None:
        """Save the state that is held, if all batches before it count now."""
        if self._held is None or self._accounting.first_uncounted(self._held[0]) < self._held[0]:
            return
        (self._saved, state), self._held = self._held, None
        self._client.save(EPOCH, state)
        if self._changes is not None:
            self._client.save(SINCE, self._changes)
            self._changes = None
