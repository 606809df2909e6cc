"""The sums of hosts on a server; the rules are in `host_reduction`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.model.body_codec import present_body
from topotrain.core.model.schema import typed
from topotrain.core.protocol import check_bits
from topotrain.core.server.gradients.committed_pushes import CommittedPushes
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import GradientExtension, Outbox, StepResult
from topotrain.extensions.host_sums.host_sum_messages import (
    HostPush,
    HostReady,
    HostStepEnd,
    HostSumStart,
    HostValues,
    SeparateGradients,
)
from topotrain.extensions.host_sums.host_units import HostUnit


@dataclass(slots=True)
class _UnitState:
    """The state of a unit of another host on a server."""

    unit: HostUnit
    lead: Address
    others: tuple[Address, ...]
    ready: set[int] = field(default_factory=set)
    first: int | None = None  # the step with which the sums have begun
    numbers: dict[int, int] = field(default_factory=dict)  # of the present step: bucket -> number of its last sum
    end: HostStepEnd | None = None
    shown: dict[int, m.Values] = field(default_factory=dict)  # the last values that went to the lead alone

    def begin(self, step: int) -> None:
        """Sums begin with this step."""
        self.first = step

    def receive_end(self, message: HostStepEnd) -> None:
        """The lead has sent its last sums of a step."""
        self.end = message

    def next_step(self) -> None:
        """The step is over."""
        self.numbers.clear()
        self.end = None

    def stop(self) -> None:
        """The sums are over."""
        self.first = None
        self.shown.clear()
        self.next_step()

    def forget(self) -> None:
        """All workers of the unit have new processes."""
        self.ready.clear()
        self.stop()


class HostSumServer(GradientExtension):
    """Takes sums of units of other hosts, and sends means and values to their leads.

    Args:
        server: the server.
        units: the units of other hosts that use it.
        replaces: a later push replaces an earlier one, and the commit says which counts.
    """

    messages = (HostReady, HostPush, HostStepEnd)

    def __init__(self, server: Server, units: Iterable[HostUnit], replaces: bool) -> None:
        self._server, self._replaces = server, replaces
        self._units: list[_UnitState] = []
        self._of: dict[Address, _UnitState] = {}
        for unit in units:
            workers = dict(zip(unit.workers, unit.addresses(), strict=True))
            lead = workers.pop(unit.lead(server.me.index))
            state = _UnitState(unit, lead, tuple(workers.values()))
            self._units.append(state)
            self._of.update(dict.fromkeys(unit.addresses(), state))

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        model = self._server.state.model
        if not isinstance(message, HostPush):
            return super().place(sender, message, viewable)
        if model is None or viewable:
            return None
        self._check(sender, message)
        # The sum needs no more than the buffer of one worker, and the others of the unit need none.
        first = (*message.workers, *message.idle)[0]
        return model.flats.view(f"push {sender.group}/{first}", model.bucket(message.bucket))

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        state = self._of.get(sender)
        if state is None:
            raise m.ProtocolError(f"{sender} sends {type(message).__name__}, and is in no unit that is added up")
        if isinstance(message, HostReady):
            state.ready.add(sender.index)
        elif isinstance(message, HostPush):
            self._check(sender, message)
            self._push(state, message)
        elif isinstance(message, HostStepEnd):
            self._receive_end(state, sender, message)
        return tuple(self._requests(sender.group))

    def _check(self, sender: Address, message: HostPush) -> None:
        """Raise ProtocolError for a sum that no correct worker sends here."""
        state, named = self._of.get(sender), {*message.workers, *message.idle}
        if state is None or sender != state.lead or not named.issubset(state.unit.workers):
            raise m.ProtocolError(f"{sender} sends a sum of the workers {sorted(named)}")

    def _push(self, state: _UnitState, message: HostPush) -> None:
        contributions, model = self._server.contributions, self._server.state.known
        source = contributions.current_source(state.lead, message.step)
        # The sum is of a step that is over, or a later one of the same bucket is here.
        if source is None or message.number < state.numbers.get(message.bucket, -1):
            return
        bucket = model.bucket(message.bucket)
        check_bits(message.present, len(bucket.pieces), state.lead, f"the pieces of bucket {bucket.id}")
        body = typed(present_body(message), model.values(bucket.id))
        if message.number > state.numbers.get(message.bucket, -1):
            state.numbers[message.bucket] = message.number
            if isinstance(source, CommittedPushes):
                source.renew(bucket.id, state.unit.workers)
        group = self._server.worker_groups.workers[state.unit.group]
        for at, index in enumerate((*message.workers, *message.idle)):
            ordinal = message.revisions[at] if message.revisions else message.ordinal
            weight = message.weight if at < len(message.workers) else 0.0
            push = m.Push(message.step, ordinal, bucket.id, weight, message.present)
            contributions.add(group[index], push, None if at else body)

    def _receive_end(self, state: _UnitState, sender: Address, message: HostStepEnd) -> None:
        if sender != state.lead or len(message.sums) != len(self._server.state.known.buckets):
            raise m.ProtocolError(f"{sender} ends step {message.step} with sums of {len(message.sums)} buckets")
        if self._server.contributions.current_source(sender, message.step) is not None:
            state.receive_end(message)

    def _requests(self, group: int) -> Iterator[tuple[Address, m.Message]]:
        """Ask for the gradients of sums that cannot be used."""
        model = self._server.state.model
        for push, worker in () if model is None else model.staging[group].sums.take_unusable():
            state = self._of[self._server.worker_groups.workers[group][worker]]
            yield state.lead, SeparateGradients(push.step, 0 if self._replaces else push.ordinal, push.bucket)

    def backward_ended(self, sender: Address, message: m.BackwardEnd) -> Outbox:
        return tuple(self._requests(sender.group))

    # --- a step --------------------------------------------------------------------------------------------------

    def may_stage(self, group: int, step: int) -> bool:
        """As `ServerExtension.may_stage`: the leads say which pushes are in their sums."""
        if not self._replaces:
            return True
        if not all(self._has_ended(state, step) for state in self._states(group)):
            return False
        source = self._server.state.known.staging[group]
        if not isinstance(source, CommittedPushes) or not source.withdraw_sums():
            return True
        # Here, and not where a message has come: whatever completes the step, this is asked.
        self._server.queue.send_all(self._requests(group))
        return False

    def _has_ended(self, state: _UnitState, step: int) -> bool:
        if state.first is None or step < state.first or not self._counts(state.unit.group):
            return True
        if state.end is None:
            return False
        buckets = self._server.state.known.buckets
        # On a transport that reorders, the end may overtake the sums.
        return all(
            state.numbers.get(bucket.id, -1) + 1 >= last for bucket, last in zip(buckets, state.end.sums, strict=True)
        )

    def _counts(self, group: int) -> bool:
        """Whether the commits are of a step with gradients, and not of a change of values."""
        return self._server.state.known.staging[group].first.counts

    def step_over(self, result: StepResult) -> Outbox:
        return tuple(self._begin(result))

    def _begin(self, result: StepResult) -> Iterator[tuple[Address, m.Message]]:
        everyone = len(self._server.state.known.staging[result.group].participants)
        for state in self._states(result.group):
            state.next_step()
            there = len(state.ready) == len(state.unit.workers)
            if state.first is None and there and everyone == len(self._server.worker_groups.workers[result.group]):
                state.begin(result.step + 1)
                for worker in state.unit.addresses():
                    yield worker, HostSumStart(result.step + 1)

    def _states(self, group: int) -> Iterator[_UnitState]:
        return (state for state in self._units if state.unit.group == group)

    # --- means and values ----------------------------------------------------------------------------------------

    def may_send(self, to: Address, message: m.Message) -> bool:
        """As `ServerExtension.may_send`: the lead shows means to the others."""
        if not isinstance(message, m.ReducedGradient):
            return True
        state = self._of.get(to)
        return state is None or state.first is None or message.step < state.first or to == state.lead

    def route_values(self, worker: Address, values: m.Values) -> Outbox:
        """As `GradientExtension.route_values`: a step's values go to the lead."""
        state = self._of.get(worker)
        # Workers ask for other values by themselves, and not all at the same moment.
        if state is None or state.first is None or values.round < 0 or values.body is None:
            return ((worker, values),)
        if worker != state.lead:
            return ()
        state.shown[values.bucket] = values
        shown = HostValues(self._server.me.index, values.round, values.bucket, values.version, body=values.body)
        return ((worker, shown),)

    # --- new processes -------------------------------------------------------------------------------------------

    def reset_worker(self, worker: Address) -> None:
        """As `ServerExtension.reset_worker`: the others of its unit go on by themselves."""
        state = self._of.get(worker)
        if state is None:
            return
        shown, began = tuple(state.shown.values()), state.first is not None
        state.forget()
        for other in (state.lead, *state.others):
            if other == worker or not began:
                continue
            # First: workers begin the next step when they know that the present one is dropped.
            self._server.queue.send(other, HostSumStart())
            if worker == state.lead:  # it may not have passed them on
                for values in shown:
                    self._server.queue.send(other, values)

    def reset_group(self, group: int, ended: bool) -> None:
        for state in self._states(group):
            state.forget()

    def state_dict(self) -> None:
        """Return None: a job with second copies has no sums of hosts."""
