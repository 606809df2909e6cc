"""The model of one server as far as it is known, and its version."""

from collections.abc import Mapping

from topotrain.config.job import Job
from topotrain.config.topology import Address, Topology
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import ApplyOrder
from topotrain.core.server.parameter_shard import ParameterShard


class StartPoint:
    """The start of a job: with the values of worker (0,0).

    A subclass starts with those of an earlier run.
    """

    first_epoch = 0
    """All epochs before this one are read."""
    samples: Mapping[Address, int] = {}
    """Of each worker of the earlier run: how many of its samples are in the values."""
    clocks: Mapping[int, int] | None = None
    """Those of the worker groups of the earlier run; None: there was none."""
    version = 0

    @property
    def resumed(self) -> bool:
        """Whether there was an earlier run."""
        return self.clocks is not None

    def restore(self, model: ParameterShard, shard: int) -> None:
        """Fill a shard that was just made with its values and optimizer state.

        Raises:
            ConfigError: the earlier run had another model or optimizer.
        """


class ShardState:
    """The common state of a server's parts: the model, and the job's start.

    Args:
        me, job, topology: the server.
        start: where the job starts.
    """

    def __init__(self, me: Address, job: Job, topology: Topology, start: StartPoint) -> None:
        self.me, self.job, self.topology, self.start = me, job, topology, start
        self.order = ApplyOrder()
        """The decisions that are carried out here."""
        self.model: ParameterShard | None = None
        self.version = 0
        """Updates of the values, those of a resumed snapshot included."""
        self.common = False
        """Whether all server groups have the same start."""
        self._initialised: set[int] = set()

    @property
    def known(self) -> ParameterShard:
        """The model, where a message has been held until it is there."""
        assert self.model is not None
        return self.model

    @property
    def complete(self) -> bool:
        """Whether the first values of all buckets are here."""
        return self.model is not None and len(self._initialised) == len(self.model.buckets)

    def open(self, model: ParameterShard) -> None:
        """The model is known, and has the values of an earlier run if there was one."""
        self.model, self.version = model, self.start.version
        if self.start.resumed and self.me.group == 0:
            # The other groups wait for the values of group 0, as at any start: those come when all groups are there.
            self._initialised = {bucket.id for bucket in model.buckets}

    def has_values(self, bucket: int) -> bool:
        """Whether the first values of a bucket are here."""
        return bucket in self._initialised

    def add_values(self, bucket: int) -> None:
        """The first values of a bucket have come."""
        self._initialised.add(bucket)

    def start_together(self) -> None:
        """All server groups have the same start."""
        self.common = True

    def count_update(self) -> None:
        """The values have changed by one step."""
        self.version += 1

    def state_dict(self) -> State:
        """Return the state without the model, see `component_state`."""
        own = {"version": self.version, "common": self.common, "initialised": self._initialised}
        return {**own, "order": self.order.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.version, self.common, self._initialised = state["version"], state["common"], set(state["initialised"])
        self.order.load_state_dict(state["order"])
