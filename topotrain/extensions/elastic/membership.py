"""Restarts of worker groups on a server. Each restart makes a new incarnation.

A group starts and ends as a whole. Its incarnation is 0 at first and rises when its workers are started again. A shard
that learns of a newer incarnation drops the messages of the group until the coordinator has decreed the change in its
log of decisions (`consistency`). Every shard carries the change out between the same two steps, so a step of the former
workers was applied by all shards or by none. From there on the messages of a worker count once it has sent its
incarnation. Applied batches count for ever, by data stream. Everything else that the group had sent is forgotten.

Where a step needs only some of its workers (`eligibility.singly`), each worker restarts by itself. A group that may
recover in place (`eligibility.in_place_refusal`) restarts as a whole, or one worker of it does. The launcher decides
which, because the launcher knows whether the scripts of the survivors can repeat a step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Commit, Fail, Message, ProtocolError, StepDecision, StepVote, WorkerRejoined
from topotrain.core.server.component_state import DeclaredState, State, field_values
from topotrain.core.server.consistency import REPLACED, RESTARTS, AppliedBatches
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, RegroupExtension, makes_partial_steps
from topotrain.extensions.elastic.eligibility import in_place_refusal, refusal, singly
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams, RestartRequest

STREAMS = 2000
"""Data streams in one `AppliedBatchesOfStreams`."""


Key = int | Address
"""A worker group, or one worker that starts and ends by itself."""


@dataclass(slots=True)
class _Group:
    """One worker group, or one worker."""

    incarnation: int = 0  # its messages count on this server
    newest: int = 0  # the newest that this server knows
    here: set[Address] = field(default_factory=set)  # workers of incarnation `newest` that have sent it

    def expect(self, incarnation: int) -> bool:
        new = incarnation > self.newest
        if new:
            self.newest, self.here = incarnation, set()
        return new

    def restart(self, incarnation: int) -> list[Address]:
        """As `Members.restart`, after `expect`."""
        self.incarnation = max(self.incarnation, incarnation)
        # Workers of a still newer incarnation wait for their own decree.
        return sorted(self.here) if self.newest == self.incarnation else []


class Members:
    """The incarnations of the worker groups that one server knows.

    Args:
        keys: worker groups, or (singly) workers that start and end by themselves.
    """

    def __init__(self, keys: Iterable[Key], singly: bool = False) -> None:
        self._singly = singly
        self._groups = {key: _Group() for key in keys}
        self._alone: dict[Address, _Group] = {}  # workers that were replaced since the last restart of their group
        self.changed = False
        """Whether a group has been restarted. Until then all messages count."""

    def key(self, worker: Address) -> Key:
        """The group that restarts together with a worker, or the worker itself."""
        return worker if self._singly else worker.group

    def is_current(self, worker: Address) -> bool:
        """Whether messages from and to a worker count."""
        group = self._alone.get(worker) or self._groups.get(self.key(worker))
        # Unknown: a group of other servers, of which this server keeps no incarnation. Its messages count.
        return group is None or (group.newest == group.incarnation and self.is_newest(worker))

    def is_newest(self, worker: Address) -> bool:
        """Whether a worker belongs to the newest incarnation that this server knows."""
        group = self._entry_of(worker)
        return not group.newest or worker in group.here

    def _entry_of(self, worker: Address) -> _Group:
        return self._alone.get(worker) or self._groups[self.key(worker)]

    def incarnation(self, key: Key) -> int:
        """The incarnation that counts on this server. 0 for a key that it does not know."""
        # A group of workers that restart one by one is no key. Its votes carry no incarnation.
        return self._groups[key].incarnation if key in self._groups else 0

    def incarnation_of(self, worker: Address) -> int:
        """The incarnation of a worker that counts on this server."""
        return self._entry_of(worker).incarnation

    def newest(self, key: Key) -> int:
        """The newest incarnation that this server knows."""
        return self._groups[key].newest

    def join(self, worker: Address, incarnation: int) -> None:
        """Note the incarnation of a worker. Workers of older incarnations are ignored."""
        group = self._entry_of(worker)
        if incarnation == group.newest:
            group.here.add(worker)

    def expect(self, key: Key, incarnation: int) -> bool:
        """Drop messages of earlier incarnations from here on. Returns whether that is new."""
        if isinstance(key, Address) and not self._singly:
            new = self._alone.setdefault(key, _Group()).expect(incarnation)
        else:
            new = self._groups[key].expect(incarnation)
            if new:  # the whole group restarts, so no worker of it is one that was replaced alone
                self._alone = {worker: one for worker, one in self._alone.items() if self.key(worker) != key}
        self.changed |= new
        return new

    def restart(self, key: Key, incarnation: int) -> list[Address]:
        """Make an incarnation count here. Returns the workers that wait for that."""
        # The decree may arrive before any worker of the incarnation, and before the request of another shard.
        self.expect(key, incarnation)
        found = self._groups.get(key) or self._alone[key] if isinstance(key, Address) else self._groups[key]
        return found.restart(incarnation)

    def is_empty(self, group: int, incarnation: int) -> bool:
        """Whether no worker of this incarnation, or of a later one, has connected."""
        known = self._groups[group]
        return known.newest < incarnation or (known.newest == incarnation and not known.here)

    def pending(self) -> list[tuple[Key, int]]:
        """(key, incarnation) of restarts that are known and not carried out."""
        known: list[tuple[Key, _Group]] = [*self._groups.items(), *self._alone.items()]
        return [(key, each.newest) for key, each in known if each.newest > each.incarnation]

    def state_dict(self) -> State:
        # A job with a second copy has no worker that is replaced alone (`eligibility.in_place_refusal`).
        return {"groups": {key: field_values(group) for key, group in self._groups.items()}, "changed": self.changed}

    def load_state_dict(self, state: State) -> None:
        for key, (incarnation, newest, here) in state["groups"].items():
            self._groups[key] = _Group(incarnation, newest, set(here))
        self.changed = state["changed"]


# --- the progress of a group of other servers --------------------------------------------------------------------


def count_requests(group: int, incarnation: int, streams: Sequence[int]) -> list[AppliedBatchesOfStreams]:
    """The requests of server (0,0) to the coordinator of a worker group."""
    # Also for a group without a stream: the reply means that its incarnation is carried out.
    runs = [streams[at : at + STREAMS] for at in range(0, len(streams), STREAMS)] or [()]
    pairs = [tuple(number for stream in run for number in (stream, 0)) for run in runs]
    return [AppliedBatchesOfStreams(group, incarnation, part, len(runs), counts) for part, counts in enumerate(pairs)]


def count_reply(request: AppliedBatchesOfStreams, batches: AppliedBatches, ended: bool) -> AppliedBatchesOfStreams:
    """The coordinator's reply. batches: those that its server has applied."""
    counts = tuple(n for stream in request.counts[::2] for n in (stream, batches.count(stream, request.group)))
    return replace(request, counts=counts, ended=ended)


class CoordinatorAnswers(DeclaredState):
    """The replies of coordinators, by worker group, until all parts have arrived."""

    STATE = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, AppliedBatchesOfStreams]] = {}

    def add(self, part: AppliedBatchesOfStreams) -> Mapping[int, int] | None:
        """Keep a part. Returns (stream -> applied batches) with the last part."""
        known = self._parts.setdefault(part.group, {})
        # The group was restarted again before all parts of the last reply were here.
        if any(other.incarnation != part.incarnation for other in known.values()):
            known.clear()
        known[part.part] = part
        if len(known) < part.parts:
            return None
        del self._parts[part.group]
        return {s: n for each in known.values() for s, n in zip(each.counts[::2], each.counts[1::2], strict=True)}


# --- the restart -------------------------------------------------------------------------------------------------


class GroupRestarts(RegroupExtension):
    """The restarts of worker groups, or of single workers, on one server."""

    STATE = ("members", "_answers", "_requests")

    messages = (WorkerRejoined, RestartRequest, AppliedBatchesOfStreams)
    # Workers may rejoin, and groups restart, before a script has prepared the model.
    before_model = messages
    decrees = (RESTARTS, REPLACED)

    def __init__(self, server: Server, job: Job, topology: Topology) -> None:
        # Votes of partial steps are not amended, so they have no incarnation of a group.
        assert singly(job) or not makes_partial_steps(job)
        self._server, self._me, self._job, self._topology = server, server.me, job, topology
        self._leases = server.me == (Role.SERVER, 0, 0)  # it leases the batches of all groups
        self._ours = server.groups
        # Server (0,0) leases the batches that a group of other servers leaves, so it follows their restarts, too.
        known = range(topology.worker_groups) if self._leases else self._ours
        workers = (worker for group in known for worker in topology.workers(group))
        self.members = Members(workers, True) if singly(job) else Members(known)
        self._answers = CoordinatorAnswers()
        self._requests: list[tuple[Address, AppliedBatchesOfStreams]] = []
        self._in_place = {group for group in self._ours if not in_place_refusal(job, topology, group)}
        self._announced: dict[Address, int] = {}  # workers of these groups -> the incarnation that they have sent

    # --- hooks of the server -------------------------------------------------------------------------------------

    def accepts(self, sender: Address, message: Message) -> bool:
        """Drop messages of processes before the last restart."""
        # WorkerRejoined contains the incarnation of a new process, so this message always counts.
        if not self.members.changed or sender.role is Role.SERVER or isinstance(message, WorkerRejoined):
            return True
        return self.members.is_current(sender)

    def may_send(self, to: Address, message: Message) -> bool:
        return not self.members.changed or to.role is not Role.WORKER or self.members.is_current(to)

    def amend_vote(self, vote: StepVote, commits: Mapping[int, Commit]) -> StepVote:
        incarnation = self.members.incarnation(vote.group)
        return replace(vote, incarnation=incarnation) if incarnation else vote

    def handle(self, sender: Address, message: Message) -> Outbox:
        if isinstance(message, WorkerRejoined):
            self._receive_rejoin(sender, message.incarnation)
        elif isinstance(message, RestartRequest):
            self.request_restart(message)
        elif isinstance(message, AppliedBatchesOfStreams):
            self._receive_counts(sender, message)
        return ()

    def on_decree(self, decision: StepDecision) -> Outbox:
        """As `ServerExtension.on_decree`. All decisions before this one are carried out."""
        group, incarnation = decision.group, decision.step
        if decision.change == RESTARTS:
            self._change(group, incarnation, None, self._server.worker_groups.ended(group))
            self._admit(group)
            # Other servers have asked for the counts while this restart was not carried out. Now they are final.
            self._reply_counts()
        else:
            self._replace(decision)
        return ()

    def on_lost(self, worker: Address) -> None:
        """Restart the group, so that others do not wait until it comes back."""
        group, server = worker.group, self._server
        # Only the coordinator reacts. The other shards learn of the restart by its decree.
        if server.decisions.log is None or group not in self._ours:
            return
        # The launcher decides whether the group, or only this worker, is to restart.
        if group in self._in_place:
            return
        if server.worker_groups.ended(group) or server.has_finished(worker):
            return
        # A worker of an older incarnation ends because its group is restarted already.
        if self.members.is_newest(worker) and not self._refusal(group):
            key = self.members.key(worker)
            self._expect(key, self.members.newest(key) + 1)

    def on_reconnect(self) -> None:
        """As `ServerExtension.on_reconnect`: send again what is not carried out."""
        # Requests on the former connection may be lost. The coordinator decrees each restart once.
        for key, incarnation in self.members.pending():
            self._ask(key, incarnation)

    # --- a restart -----------------------------------------------------------------------------------------------

    def _receive_rejoin(self, worker: Address, incarnation: int) -> None:
        group, key = worker.group, self.members.key(worker)
        if incarnation > self.members.newest(key) and group in self._ours:
            why = self._refusal(group)
            # The group cannot restart alone and has trained: the job ends with the reason instead of waiting for ever.
            if why and self._has_begun(group):
                for each in self._topology.workers(group):
                    self._server.queue.send(each, Fail(f"worker group {group} was started again, but {why}"))
                return
            if why:
                # The whole job was restarted. These are its first workers here, so there is nothing to forget.
                if self._server.decisions.log is not None:
                    self._server.decisions.log.adopt(group, incarnation)
                self._change(group, incarnation, None, False)
        if group in self._in_place:
            # The process is accepted when the launcher's decision about the group is carried out.
            self._announced[worker] = max(incarnation, self._announced.get(worker, 0))
            self._admit(group)
            return
        self._expect(key, incarnation)
        self.members.join(worker, incarnation)
        if self.members.is_current(worker):
            self._accept(worker)

    def _admit(self, group: int) -> None:
        """Accept the new processes of a group of which the restart is carried out here."""
        for worker in self._server.worker_groups.workers[group] if group in self._in_place else ():
            incarnation = self.members.incarnation_of(worker)
            if self._announced.get(worker) == incarnation > 0:
                del self._announced[worker]
                self.members.join(worker, incarnation)
                self._accept(worker)

    def _has_begun(self, group: int) -> bool:
        """Whether workers of the group have used this server."""
        server = self._server
        return group in server.replies.asked or any(each.has_begun() for each in server.hooks.has_begun)

    def _streams(self, group: int) -> list[int]:
        return [stream for each in self._server.hooks.streams for stream in each.streams(group)]

    def _refusal(self, group: int) -> str:
        return refusal(self._job, self._topology, group) or regroup_refusal(self._server)

    def _expect(self, key: Key, incarnation: int) -> None:
        if self.members.expect(key, incarnation):
            self._ask(key, incarnation)

    def _ask(self, key: Key, incarnation: int) -> None:
        """Request a restart, or the progress of a group of other servers."""
        group, index = (key.group, key.index) if isinstance(key, Address) else (key, -1)
        coordinator = Address(Role.SERVER, self._topology.server_group_of(group), 0)
        if group in self._ours:
            self._server.queue.send(coordinator, RestartRequest(group, incarnation, index))
        elif self._leases:
            for request in count_requests(group, incarnation, self._streams(group)):
                self._server.queue.send(coordinator, request)

    def request_restart(self, message: RestartRequest) -> None:
        """Decree a restart, on the coordinator."""
        group, incarnation = message.group, message.incarnation
        # This is server (0,0), and the coordinator of another server group reports the restart of one of its groups.
        if group not in self._ours:
            self._expect(group, incarnation)
            return
        log = self._server.decisions.log
        assert log is not None
        if message.index < 0:
            decision = log.restart(group, incarnation)
        else:
            decision = log.replace(group, message.index, incarnation)
        # Every shard that notices the restart requests it, and requests are repeated: the log records it once.
        if decision is None:
            return
        if message.index >= 0:
            self._server.hooks.policy.on_replace(group, message.index)
        self._server.decisions.send(decision)
        if self._me.group:
            self._server.queue.send(Address(Role.SERVER, 0, 0), message)

    def _change(self, group: int, incarnation: int, applied: Mapping[int, int] | None, ended: bool) -> None:
        """Carry out the restart of a group.

        applied: as for `RegroupExtension.group_restarted`; None: this server knows it.
        """
        server = self._server
        # The state of the former workers is forgotten before any message of the new ones counts.
        server.reset_group(group, ended)
        waiting = self.members.restart(group, incarnation)
        if applied is None:
            applied = {stream: server.steps.batches.count(stream, group) for stream in self._streams(group)}
        for extension in server.hooks.group_restarted:
            server.queue.send_all(extension.group_restarted(group, applied, ended))
        for worker in waiting:
            self._accept(worker)

    def _replace(self, decision: StepDecision) -> None:
        """Accept the new process of one worker."""
        if len(decision.members) != 1 or not 0 <= decision.members[0] < self._topology.workers_per_group:
            raise ProtocolError(f"another process for workers {decision.members}")
        worker = Address(Role.WORKER, decision.group, decision.members[0])
        self._server.reset_worker(worker)
        for each in self.members.restart(worker, decision.step):
            self._accept(each)
        self._admit(worker.group)

    def _accept(self, worker: Address) -> None:
        """Reply to a rejoined worker: its messages count from here on."""
        server, incarnation = self._server, self.members.incarnation_of(worker)
        server.queue.send(worker, WorkerRejoined(incarnation, server.state.complete))
        if worker.group in self._ours:
            if server.worker_groups.come_back(worker.group):
                server.shutdown.back(worker.group)
                for extension in server.hooks.group_returns:
                    extension.group_returns(worker.group)
            server.decisions.rejoin(worker.group)

    # --- the progress of a group of other servers ----------------------------------------------------------------

    def _receive_counts(self, sender: Address, message: AppliedBatchesOfStreams) -> None:
        group, incarnation = message.group, message.incarnation
        if group in self._ours:
            self._requests.append((sender, message))
            self._reply_counts()
        elif incarnation == self.members.newest(group) > self.members.incarnation(group):
            counts = self._answers.add(message)
            if counts is not None:
                self._change(group, incarnation, counts, message.ended)

    def _reply_counts(self) -> None:
        waiting, self._requests = self._requests, []
        for sender, request in waiting:
            group = request.group
            if self.members.incarnation(group) < request.incarnation:
                self._requests.append((sender, request))
            else:
                ended = self._server.worker_groups.ended(group)
                self._server.queue.send(sender, count_reply(request, self._server.steps.batches, ended))


def regroup_refusal(server: Server) -> str:
    """Why the extensions of a server let no worker group restart, leave or join.

    Empty: they do.
    """
    return first_text(extension.refuses_regroup() for extension in server.hooks.refuses_regroup)


def first_text(texts: Iterable[str]) -> str:
    """The first text that is not empty. Empty: there is none."""
    return next(filter(None, texts), "")
