"""In-place recovery in the client of a worker; the rule is in `group_members`."""

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel, StepOutcome
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.extensions.in_place_recovery.in_place_messages import (
    GroupEpoch,
    GroupEpochRequest,
    Joined,
    JoinRequest,
    StepAborted,
)


class InPlaceClient(ClientExtension):
    """One worker's part of in-place recovery."""

    messages = (StepAborted, GroupEpoch, Joined)

    def __init__(self) -> None:
        self._aborted: dict[int, dict[Address, StepAborted]] = {}  # dropped step -> shards that have dropped it
        self._missed = -1
        self._questions = 0
        self._epoch: GroupEpoch | None = None
        self._joined: dict[Address, Joined] = {}
        self.members: tuple[int, ...] = ()
        """The workers among which the batch of the present step is divided. Empty: all of the group."""

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel, self._values = channel, values

    def handle(self, sender: Address, message: m.Message) -> None:
        if isinstance(message, StepAborted):
            self._aborted.setdefault(message.step, {})[sender] = message
        elif isinstance(message, GroupEpoch) and message.number == self._questions:
            self._epoch = message
        elif isinstance(message, Joined) and message.number == self._questions:
            self._joined[sender] = message

    # --- a survivor ------------------------------------------------------------------------------------------------

    def missed(self, step: int) -> bool:
        """As `ClientExtension.missed`: all shards have dropped this step."""
        # All: a shard that has not dropped it may still read and write the memory that it shares with this worker.
        if len(self._aborted.get(step, ())) < len(self._channel.servers):
            return False
        self._missed = step
        return True

    def catch_up(self) -> StepOutcome:
        """As `ClientExtension.catch_up`: the group repeats the batch in its next step."""
        with self._channel.waiter.update():
            step = self._missed
            found = self._aborted[step]
            self.members = next(iter(found.values())).members
            # Steps are dropped in their order.
            self._aborted = {later: by for later, by in self._aborted.items() if later > step}
        return StepOutcome(-1, (), False, -1.0, late=True, next=step + 1, repeats=True)

    def dropped(self, step: int) -> bool:
        """Whether a step that this worker has not begun is dropped."""
        # Without a lock: most steps are not, and a message that is missed here is found when the step is committed.
        if step not in self._aborted:
            return False
        self._channel.wait_until(lambda: self.missed(step))
        return True

    # --- a new process ---------------------------------------------------------------------------------------------

    def group_epoch(self) -> GroupEpoch:
        """Ask for the epoch that the group is in, and whether this worker is a member."""
        self._ask()
        self._channel.send(self._channel.servers[0], GroupEpochRequest(self._questions))
        self._channel.wait_until(lambda: self._epoch is not None)
        assert self._epoch is not None
        return self._epoch

    def join(self) -> Joined:
        """Become a member of the group. Its present values are in "params" then."""
        self._ask()
        with self._values.receive_round(m.extra_round(self._questions)):
            # Only the coordinator is asked: by its decision all shards send the values of the same moment.
            self._channel.send(self._channel.servers[0], JoinRequest(self._questions))
            self._channel.wait_until(lambda: len(self._joined) == len(self._channel.servers))
        found = self._joined[self._channel.servers[0]]
        self.members = found.members
        return found

    def _ask(self) -> None:
        # Answers arrive on a thread of the transport, which compares them with the number of the question.
        with self._channel.waiter.update():
            self._questions += 1
            self._epoch = None
            self._joined.clear()
