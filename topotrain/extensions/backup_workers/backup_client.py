"""Backup workers in the client of a worker; the rule is in `quorum`."""

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel, StepOutcome
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.extensions.backup_workers.backup_messages import StepCatchUp, StepCaughtUp, StepMissed


class BackupWorkersClient(ClientExtension):
    """One worker's part of the rule of backup workers."""

    messages = (StepMissed, StepCaughtUp)

    def __init__(self) -> None:
        self._missed = -1  # the last step that was decided without this worker
        self._questions = 0
        self._answers: dict[Address, StepCaughtUp] = {}

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel, self._values = channel, values

    def handle(self, sender: Address, message: m.Message) -> None:
        if isinstance(message, StepMissed):
            self._missed = max(self._missed, message.step)
        elif isinstance(message, StepCaughtUp) and message.round == self._questions:
            self._answers[sender] = message

    def missed(self, step: int) -> bool:
        return self._missed >= step

    def catch_up(self, through: int = -1) -> StepOutcome:
        """Wait for the present values of the group, and return the step that it is in.

        through: wait until all workers have used the batches of this epoch, as this worker has. -1: do not.
        """
        channel = self._channel
        # Answers arrive on a thread of the transport, which compares them with the number of the question.
        with channel.waiter.update():
            self._questions += 1
            self._answers.clear()
        with self._values.receive_round(m.extra_round(self._questions)):
            # Only the coordinator is asked: by its decree all shards send the values of the same moment.
            channel.send(channel.servers[0], StepCatchUp(self._questions, through))
            with channel.spans.span("wait for the others"):
                channel.wait_until(lambda: len(self._answers) == len(channel.servers))
        replies = [self._answers[server] for server in channel.servers]
        taken = max(reply.snapshot for reply in replies)
        return StepOutcome(replies[0].version, (), False, -1.0, taken, late=True, next=replies[0].step)

    def through(self, epoch: int) -> None:
        """Report that this worker needs no more batches of an epoch, without waiting."""
        self._channel.try_send(self._channel.servers[0], StepCatchUp(0, epoch))
