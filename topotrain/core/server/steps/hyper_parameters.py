"""The optimizer's hyper-parameters, as the workers of each group have sent them."""

from collections.abc import Iterable

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address
from topotrain.core.server.component_state import State
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.steps.commit_agreement import StepError


class HyperParameters:
    """The hyper-parameters of each worker group that uses one server.

    Args:
        state: the server's model.
        groups: the worker groups.
    """

    def __init__(self, state: ShardState, groups: Iterable[int]) -> None:
        self._state = state
        self.of_group = dict.fromkeys(groups, b"")
        """Of each worker group: those of its last commit."""
        self._of_worker: dict[Address, bytes] = {}
        self._checked = b""

    def check(self, hyper: bytes) -> None:
        """Raise StepError for hyper-parameters that the optimizer refuses.

        No value has changed yet.
        """
        if not hyper or hyper == self._checked:
            return
        try:
            self._state.known.hyper.check(hyper)
        except ConfigError as error:
            raise StepError(str(error)) from error
        self._checked = hyper

    def receive(self, worker: Address, hyper: bytes) -> None:
        """Use the hyper-parameters of a worker for its group."""
        self._of_worker[worker] = self.of_group[worker.group] = hyper

    def last_of(self, worker: Address) -> bytes:
        """The hyper-parameters that a worker sent last."""
        # Workers send them again only when they have changed.
        return self._of_worker.get(worker, b"")

    def use(self, group: int, hyper: bytes) -> None:
        """Use these hyper-parameters for the step of a group that is decided."""
        self.of_group[group] = hyper

    def forget(self, worker: Address) -> None:
        """Forget a worker after the end of its process."""
        self._of_worker.pop(worker, None)

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"of_group": self.of_group, "of_worker": self._of_worker, "checked": self._checked}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.of_group, self._of_worker = dict(state["of_group"]), dict(state["of_worker"])
        self._checked = state["checked"]
