"""The context that all parts of a server use: model, groups, messages, extensions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Message
from topotrain.core.server.component_state import DeclaredState
from topotrain.core.server.consistency import ApplyOrder, Clocks
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.transport_contract import MessageSender


class StartPoint:
    """The start of a job: values of worker (0,0), or in a subclass of an earlier run."""

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
        """Fill a new shard from an earlier run. Raises ConfigError if its model differs."""


class ShardState(DeclaredState):
    """The common state of a server's parts: the model, and the job's start.

    Args:
        me, job, topology: the server.
        start: where the job starts.
    """

    STATE = ("version", "common", "_initialised", "order")

    def __init__(self, me: Address, job: Job, topology: Topology, start: StartPoint) -> None:
        self.me, self.job, self.topology, self.start = me, job, topology, start
        self.order = ApplyOrder()
        """The decisions that are carried out here."""
        self.model: ParameterShard | None = None
        self.known: ParameterShard
        """The same, where a message has been held until the model is there. A step reads it many times."""
        self.version = 0
        """Updates of the values, those of a resumed snapshot included."""
        self.common = False
        """Whether all server groups have the same start."""
        self._initialised: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether the first values of all buckets are here."""
        return self.model is not None and len(self._initialised) == len(self.model.buckets)

    def open(self, model: ParameterShard) -> None:
        """The model is known, and has the values of an earlier run if there was one."""
        self.model = self.known = model
        self.version = self.start.version
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


class WorkerGroups(DeclaredState):
    """The state of each worker group of a server group.

    A group is *away* after its workers have left the job, and *paused* while no other group waits for it.

    Args:
        job, topology: the job.
        server_group: the server group.
    """

    STATE = ("clocks", "_finished", "_away", "_paused", "_returned")

    def __init__(self, job: Job, topology: Topology, server_group: int) -> None:
        self.groups = topology.worker_groups_of(server_group)
        self.workers = {group: topology.workers(group) for group in self.groups}
        self.clocks = Clocks(self.groups, job.cluster.max_staleness)
        self._finished: dict[int, dict[int, int]] = {group: {} for group in self.groups}
        self._away: set[int] = set()
        self._paused: set[int] = set()
        self._returned: set[int] = set()  # groups that came back before all had the same start
        for group in self.groups:
            # Only group 0 trains during the warm-up, and it must not wait for the others.
            if group != 0 and job.warmup_steps:
                self.clocks.leave(group)

    def finish(self, worker: Address, steps: int) -> None:
        """A worker's script has ended after so many steps."""
        self._finished[worker.group][worker.index] = steps

    def finished(self, group: int) -> Mapping[int, int]:
        """The workers of a group with ended scripts, and the steps of each."""
        return self._finished[group]

    def has_finished(self, worker: Address) -> bool:
        """Whether a worker's script has ended."""
        return worker.index in self._finished[worker.group]

    def ended(self, group: int) -> bool:
        """Whether all scripts of the group have ended."""
        return len(self._finished[group]) >= len(self.workers[group])

    def runs(self, group: int) -> bool:
        """Whether the group trains."""
        return group not in self._away and not self.ended(group)

    @property
    def any_runs(self) -> bool:
        """Whether some group trains."""
        return any(map(self.runs, self.groups))

    def is_away(self, worker: Address) -> bool:
        """Whether the worker's group has left the job."""
        return worker.role is Role.WORKER and worker.group in self._away

    def leave(self, group: int) -> None:
        """The group has left the job."""
        self._away.add(group)
        self.clocks.leave(group)

    def come_back(self, group: int) -> bool:
        """The group has workers again; whether it had left the job."""
        was_away = group in self._away
        self._away.discard(group)
        return was_away

    def pause(self, group: int) -> None:
        """No other group waits for this one until `resume`."""
        self._paused.add(group)
        self._returned.discard(group)
        self.clocks.leave(group)

    def resume(self, group: int, clock: int) -> None:
        """Other groups wait for this one again, which is at `clock`."""
        self._paused.discard(group)
        # Its scripts may have ended since the decision was made, and then no group may wait for it.
        if self.runs(group):
            self.clocks.join(group, clock)

    def join_at_start(self, group: int) -> None:
        """The group came back before all groups had the same start: it joins then."""
        self._returned.add(group)

    def restore_clocks(self, clocks: Mapping[int, int]) -> None:
        """Continue the clocks of an earlier start of the job."""
        ours = {group: clock for group, clock in clocks.items() if group in self.groups}
        # Where a group is new here, all start at the slowest clock of the whole earlier run.
        self.clocks.go_on(ours if ours.keys() == set(self.groups) else clocks)

    def start_together(self, clock: int, earlier: Mapping[int, int] | None) -> list[int]:
        """Start all groups at one clock. Returns those that came back before, and join."""
        self.clocks.set_all(clock)
        if earlier is not None:  # a resumed job: each group starts where the earlier run has left it
            self.restore_clocks(earlier)
        for group in self.groups:
            # Shards come to this between different decisions, so a pause has to outlast it.
            if self.runs(group) and group not in self._paused:
                self.clocks.join(group)
        return sorted(self._returned)

    def reset(self, group: int, ended: bool) -> None:
        """The workers of the group are gone; ended: all their scripts had ended."""
        # New processes of ended scripts run to the same end, so the group does not train again.
        if not ended:
            self._finished[group] = {}


Out = list[tuple[Address, Message]]


class MessageQueue:
    """Sends the messages of one server, in order.

    Args:
        me: the server.
        hooks: its extensions.
        sender: sends each message at once; None: `out` collects them.
    """

    def __init__(self, me: Address, hooks: ExtensionHooks, sender: MessageSender | None) -> None:
        self._me, self._hooks, self._sender = me, hooks, sender
        self.out: Out = []
        self.pending: Out = []
        """The (sender, message) that the server is to handle itself. Only the queue changes it."""

    def begin(self) -> None:
        """Collect what is sent from here on: the answers to one message."""
        self.out = []

    def send(self, to: Address, message: Message) -> None:
        """Send a message; one to this server itself is handled after the present one."""
        for extension in self._hooks.may_send:
            if not extension.may_send(to, message):
                return
        for extension in self._hooks.on_sent.get(type(message), ()):
            extension.on_sent(to, message)
        # Handled later, and not here: the part that sends is in the middle of its own change of state.
        if to == self._me:
            self.pending.append((to, message))
        elif self._sender is not None:
            self._sender.send(to, message)
        else:
            self.out.append((to, message))

    def send_all(self, messages: Iterable[tuple[Address, Message]]) -> None:
        """Send these messages, in their order."""
        for to, message in messages:
            self.send(to, message)

    def send_each(self, receivers: Iterable[Address], message: Message) -> None:
        """Send a message to several receivers."""
        for to in receivers:
            self.send(to, message)

    def handle_later(self, messages: Iterable[tuple[Address, Message]]) -> None:
        """Handle these (sender, message) later: they came too early."""
        self.pending += messages

    def take(self) -> tuple[Address, Message]:
        """Return the first of `pending`, which is handled now."""
        return self.pending.pop(0)


class TimerHost(ABC):
    """The time of a process, for the servers in it."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds of a clock that never goes back."""

    @abstractmethod
    def wake(self, seconds: float, message: Message) -> None:
        """Let the server handle a message of its own after so many seconds."""


class ServerTimer:
    """The time of one server, for extensions that ask for a message later.

    A server is a function of its messages, also where it has a second copy. So a clock may decide when such a message
    comes, and nothing else. Without a host no time passes, and each message comes at once.

    Args:
        me: the server.
        queue: takes the messages where there is no host.
        hooks: the extensions.
    """

    def __init__(self, me: Address, queue: MessageQueue, hooks: ExtensionHooks) -> None:
        self._me, self._queue, self._hooks = me, queue, hooks
        self._host: TimerHost | None = None

    def attach(self, host: TimerHost) -> None:
        """Use the time of this host, in the place of another one with its messages."""
        self._host = host
        for extension in self._hooks.on_timer:
            extension.on_timer()

    def now(self) -> float:
        """Return seconds of the host's clock."""
        return 0.0 if self._host is None else self._host.now()

    def wake(self, seconds: float, message: Message) -> None:
        if self._host is None:
            self._queue.send(self._me, message)
        else:
            self._host.wake(seconds, message)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of a server that all its other parts use."""

    state: ShardState
    groups: WorkerGroups
    queue: MessageQueue
    hooks: ExtensionHooks
