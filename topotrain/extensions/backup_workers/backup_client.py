"""Backup workers in the client of a worker: it learns that a step was made without it, and catches up."""

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_extension import ClientAccess, LateSteps
from topotrain.core.client.client_types import StepOutcome
from topotrain.extensions.backup_workers.backup_messages import StepCatchUp, StepCaughtUp, StepMissed
from topotrain.extensions.backup_workers.quorum import values_round


class BackupWorkersClient(LateSteps):
    """One worker's part of the rule in `quorum`."""

    messages = (StepMissed, StepCaughtUp)

    def __init__(self) -> None:
        self._missed = -1  # the last step that was decided without this worker
        self._questions = 0
        self._answers: dict[Address, StepCaughtUp] = {}

    def bind(self, client: ClientAccess) -> None:
        """As `ClientExtension.bind`."""
        self._client = client

    def handle(self, sender: Address, message: m.Message) -> None:
        """A step was made without this worker, or a server answers its last question."""
        if isinstance(message, StepMissed):
            self._missed = max(self._missed, message.step)
        elif isinstance(message, StepCaughtUp) and message.round == self._questions:
            self._answers[sender] = message

    def missed(self, step: int) -> bool:
        """As `LateSteps.missed`."""
        return self._missed >= step

    def catch_up(self, through: int = -1) -> StepOutcome:
        """As `LateSteps.catch_up`."""
        client = self._client
        with client.waiter.update():
            self._questions += 1
            self._answers.clear()
        with client.receive_values(values_round(self._questions)):
            client.tell(client.servers[0], StepCatchUp(self._questions, through))
            with client.spans.span("wait for the others"):
                client.wait_until(lambda: len(self._answers) == len(client.servers))
        replies = [self._answers[server] for server in client.servers]
        taken = max(reply.snapshot for reply in replies)
        return StepOutcome(replies[0].version, (), False, -1.0, taken, late=True, next=replies[0].step)

    def through(self, epoch: int) -> None:
        """As `LateSteps.through`."""
        self._client.mention(self._client.servers[0], StepCatchUp(0, epoch))
