"""The members of a worker group, while one of its processes is replaced.

The death of a worker is a decision in the log (`consistency.REPLACED`). With it every shard drops the group's undecided
step. The step's number is skipped, so whatever is still sent for it counts nowhere. The survivors are told, divide the
batch of that step among themselves, and repeat it under the next number. The new process of the dead worker asks to
join when its script is about to read a batch. This is a decision, too (`JOINS`): another step is dropped, and repeated
with all of them.

So each step has one set of members on all shards. A mean is over exactly these, weighted by their samples. This is a
view change as in virtual synchrony (Birman and Joseph, 1987), with the log of decisions as the order of the views.
"""

from collections.abc import Collection, Iterator

from topotrain.config.topology import Address, Topology
from topotrain.core.model.shared_windows import buffers_of
from topotrain.core.protocol import Commit, Fetch, Message, ProtocolError, StepDecision, Values, extra_round
from topotrain.core.server.consistency import JOINS
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, RegroupExtension, StepPolicy, StepResult
from topotrain.extensions.in_place_recovery.in_place_messages import (
    GroupEpoch,
    GroupEpochRequest,
    Joined,
    JoinRequest,
    StepAborted,
)


class GroupMembers(RegroupExtension, StepPolicy):
    """The members of the worker groups of one server that recover in place.

    Args:
        server: the server.
        topology: the layout of the job.
        groups: the worker groups that may go on without a dead worker.
        shared: workers and servers of a host share memory.
    """

    messages = (Fetch, GroupEpochRequest, JoinRequest)
    decrees = (JOINS,)

    def __init__(self, server: Server, topology: Topology, groups: Collection[int], shared: bool) -> None:
        self._server, self._workers = server, topology.workers_per_group
        self._windowed = buffers_of(topology, server.me.group).keys() if shared else frozenset[int]()
        # In the order in which they have joined: the hyper-parameters of the first one count.
        self._members = dict.fromkeys(groups, self._all)
        # On the coordinator: the same after all decisions that are made, also those that are not carried out yet.
        self._decided = {group: set(self._all) for group in groups}
        self._asked: dict[Address, int] = {}
        self._aborted: dict[int, set[int]] = {group: set() for group in groups}  # dropped since the last step

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self._workers))

    def members(self, group: int) -> tuple[int, ...]:
        """The workers that make the present step of a group."""
        return self._members[group]

    def lacks_workers(self) -> bool:
        return any(len(members) < self._workers for members in self._members.values())

    # --- on the coordinator ----------------------------------------------------------------------------------------

    def on_replace(self, group: int, worker: int) -> None:
        self._asked.pop(self._server.worker_groups.workers[group][worker], None)
        # A process that dies before it has joined again has no part in the present step.
        if worker in self._decided.get(group, ()):
            self._decided[group].discard(worker)
            self._abort(group)

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Handle a request of a worker."""
        if isinstance(message, Fetch):
            return self._fetch(sender, message)
        if isinstance(message, GroupEpochRequest):
            joined = sender.index in self._decided.get(sender.group, self._all)
            epoch = self._server.steps.batches.reads(sender.group)
            return [(sender, GroupEpoch(message.number, epoch, joined))]
        if isinstance(message, JoinRequest):
            self._join(sender, message.number)
        return ()

    def _join(self, worker: Address, number: int) -> None:
        group = worker.group
        # A transport may deliver a request twice.
        if group not in self._decided or number <= self._asked.get(worker, 0):
            return
        self._asked[worker] = number
        if worker.index not in self._decided[group]:
            self._decided[group].add(worker.index)
            self._abort(group)
            self._server.decisions.decree(group, 0, JOINS, (worker.index, number))

    def _abort(self, group: int) -> None:
        # Now, and not when the decision is carried out: no vote for the dropped step may count after it.
        if self._server.decisions.log is not None:
            self._server.decisions.log.abort(group)

    # --- on every shard --------------------------------------------------------------------------------------------

    def accepts_commit(self, sender: Address, message: Commit, step: int) -> bool:
        """As `StepPolicy.accepts_commit`: a commit of a dropped step gets no reply."""
        return message.step not in self._aborted.get(sender.group, ())

    def step_over(self, result: StepResult) -> Outbox:
        if result.group in self._aborted:
            self._aborted[result.group].clear()
        return ()

    def reset_worker(self, worker: Address) -> None:
        """As `ServerExtension.reset_worker`: the group goes on without the worker."""
        group = worker.group
        if worker.index in self._members.get(group, ()):
            rest = tuple(index for index in self._members[group] if index != worker.index)
            self._server.queue.send_all(self._change(group, rest, rest))

    def on_decree(self, decision: StepDecision) -> Outbox:
        """A worker is a member again.

        Raises:
            ProtocolError: the group has no such worker, or the worker is a member.
        """
        group, members = decision.group, self._members.get(decision.group, ())
        if len(decision.members) != 2 or decision.members[0] in members or group not in self._members:
            raise ProtocolError(f"a member for group {group} of {members}: {decision.members}")
        index, number = decision.members
        if index not in self._all:
            raise ProtocolError(f"group {group} has no worker {index}")
        told = self._change(group, (*members, index), members)
        return [*told, *self._welcome(self._server.worker_groups.workers[group][index], number)]

    def _change(self, group: int, members: tuple[int, ...], told: tuple[int, ...]) -> list[tuple[Address, Message]]:
        """Drop the group's step. The next one needs these members.

        Returns the messages to the workers in `told`.
        """
        model = self._server.model
        if model is None:
            raise ProtocolError(f"other members for group {group} before there is a model")
        step = model.staging[group].step
        self._members[group] = members
        self._aborted[group].add(step)
        model.staging[group].next_step(members)
        workers, message = self._server.worker_groups.workers[group], StepAborted(step, tuple(sorted(members)))
        return [(workers[index], message) for index in told]

    def _welcome(self, worker: Address, number: int) -> Iterator[tuple[Address, Message]]:
        """Yield the values and the step of its group for a new member."""
        server, members = self._server, tuple(sorted(self._members[worker.group]))
        yield from self._values(worker, extra_round(number))
        # After the values, because the client reads its buffers once it has Joined of all shards.
        assert server.model is not None
        step = server.model.staging[worker.group].step
        yield worker, Joined(number, step, server.state.version, members)

    def _fetch(self, sender: Address, message: Fetch) -> Outbox:
        """Send values to a worker, which may not be a member."""
        if sender.index in self._members.get(sender.group, self._all):
            self._server.replies.fetch(sender, message)
            return ()
        # The others of its group do not ask, and must not be waited for.
        return list(self._values(sender, -1 - message.round))

    def _values(self, worker: Address, number: int) -> Iterator[tuple[Address, Message]]:
        """Yield the present values for one worker. number: their round."""
        server = self._server
        assert server.model is not None
        if worker.group in self._windowed:
            # They are in the memory that the group shares, and change only when all members wait.
            yield worker, Values(number, -1, server.state.version)
            return
        for bucket in server.model.buckets:
            # A copy: the values, and the buffers for the other members, change while this one is being sent.
            body = server.model.values(bucket.id).clone()
            yield worker, Values(number, bucket.id, server.state.version, body=body)

    def reset_group(self, group: int, ended: bool) -> None:
        """As `ServerExtension.reset_group`: all processes of the group are new."""
        if group in self._members:
            self._members[group], self._decided[group] = self._all, set(self._all)
            self._aborted[group].clear()
            self._asked = {worker: asked for worker, asked in self._asked.items() if worker.group != group}

    def state_dict(self) -> None:
        """Return None: a job with second copies has no group that recovers in place."""
