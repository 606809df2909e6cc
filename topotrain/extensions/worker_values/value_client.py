"""A worker's part in calls over the workers of its group, or of the job."""

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import torch

from topotrain.config.job import Cluster
from topotrain.config.topology import Address
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.protocol import Message
from topotrain.extensions.worker_values.value_messages import PART, AwaitedCall, PassedCall, WorkerValue


class CallPlace(NamedTuple):
    """The place of a worker in its script.

    Attributes:
        steps: the number of `step()` calls that were begun.
        backwards: the number of backwards since the last step that have come to their end.
        passes: the number of passes over the loader that were begun.
        commits: the number of the group's steps on the servers, with one that is not settled.
    """

    steps: int = 0
    backwards: int = 0
    passes: int = 0
    commits: int = 0


class ValueClient(ClientExtension):
    """The calls of one worker.

    Args:
        cluster: the job's layout.
    """

    messages = (WorkerValue, AwaitedCall)

    def __init__(self, cluster: Cluster) -> None:
        self.at: Callable[[], CallPlace] = CallPlace
        self.commits = False
        """Whether the worker is in a commit, which may wait for other groups."""
        self._made = {False: 0, True: 0}  # calls so far, by whether they are over the job
        self._awaited: dict[tuple[bool, int], AwaitedCall] = {}  # by that, and the group of the other worker
        self._values: dict[tuple[int, int], WorkerValue] = {}
        # So many steps may a group be ahead of another one that makes none. None: any number.
        self._lead = cluster.max_staleness
        # With overlap a group waits when it settles a round, which is one of its commits by then.
        self._overlaps = cluster.outer is not None and cluster.overlap > 0
        if cluster.outer is not None and not cluster.quorum:
            self._lead = int(self._overlaps)

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel, self._pull = channel, values
        channel.before_wait = self._look

    def call(self, job: bool, workers: int, what: str, data: torch.Tensor) -> list[torch.Tensor]:
        """Send this worker's value, and return those of all workers, in their order.

        Args:
            job: over all workers of the job, and not of the group.
            workers: the number of them.
            what: the call, for errors.
            data: 1-D uint8.

        Raises:
            JobError: another worker makes another call, or none any more.
        """
        rows: dict[tuple[int, int], list[torch.Tensor]] = {}
        part, parts = 0, 1
        while part < parts:
            body = data[part * PART : (part + 1) * PART]
            found = self._round(job, workers, what, part, data.numel(), body)
            for worker, value in sorted(found.items()):
                rows.setdefault(worker, []).append(
                    torch.empty(0, dtype=torch.uint8) if value.body is None else value.body
                )
                parts = max(parts, -(-value.nbytes // PART))
            part += 1
        return [row[0] if len(row) == 1 else torch.cat(row) for row in rows.values()]

    def _round(
        self, job: bool, workers: int, what: str, part: int, nbytes: int, body: torch.Tensor
    ) -> dict[tuple[int, int], WorkerValue]:
        me, number = self._channel.me, self._made[job]
        with self._channel.waiter.update():
            self._made[job] += 1
            self._values = {}
        place, sent = tuple(self.at()), body if body.numel() else None
        value = WorkerValue(me.group, me.index, job, number, part, nbytes, what, place, body=sent)
        self._channel.send(self._channel.first_server, value)
        self._channel.wait_until(lambda: len(self._values) == workers)
        return self._values

    @property
    def unsettled(self) -> bool:
        """Whether the worker's last step is committed, and not settled."""
        return self._pull.unsettled

    def end(self, metrics: str) -> None:
        """The script has ended, and makes no call any more; `metrics` as in `PassedCall`."""
        message = PassedCall(False, 0, self.at().steps, True, metrics)
        self._channel.send(self._channel.first_server, message)

    # --- the first buffers -------------------------------------------------------------------------------------------

    def share_first(self, data: torch.Tensor, main: bool) -> bool:
        """Bring the first values of the main worker to all workers.

        data: of the buffers, 1-D uint8; overwritten with the main worker's. main: whether these are them.

        Returns whether something is new.
        """
        new = False
        for part in range(-(-data.numel() // PART)):
            piece = data[part * PART : (part + 1) * PART]
            digest, me = blake2b(piece.numpy().data, digest_size=16).hexdigest(), self._channel.me
            with self._channel.waiter.update():
                self._values = {}
            sent = piece if main else None
            message = WorkerValue(me.group, me.index, True, -1 - part, part, data.numel(), digest, (), body=sent)
            self._channel.send(self._channel.first_server, message)
            if not main:
                self._channel.wait_until(lambda: bool(self._values))
                (there,) = self._values.values()
                new = new or there.body is not None
                piece.copy_(piece if there.body is None else there.body)
        return new

    # --- messages, under exclusive access ----------------------------------------------------------------------------

    def place(self, sender: Address, message: Message) -> torch.Tensor | None:
        return torch.empty(message.room, dtype=torch.uint8) if isinstance(message, WorkerValue) else None

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, WorkerValue):
            self._values[message.group, message.index] = message
        elif isinstance(message, AwaitedCall):
            self._awaited[message.job, message.group] = message
            self._look()

    def _look(self) -> None:
        """Tell the server if this worker has passed a call that another one waits in."""
        for key, awaited in list(self._awaited.items()):
            # The place first: a worker that makes the call meanwhile goes on only after it.
            past, made = self._is_past(awaited), self._made[awaited.job] > awaited.number
            if past or made:
                self._awaited.pop(key, None)
            if past and not made:
                passed = PassedCall(awaited.job, awaited.number, self.at().steps, False)
                # Perhaps on a transport's thread, which must send nothing else that waits.
                self._channel.try_send(self._channel.first_server, passed)

    def _is_past(self, awaited: AwaitedCall) -> bool:
        here, there = self.at(), CallPlace(*awaited.place)
        if awaited.group != self._channel.me.group:
            # Each group counts its own steps. But this one may be in a step that waits for the other group.
            waits = self._pull.settling if self._overlaps else self.commits
            return waits and self._lead is not None and here.commits - there.commits >= self._lead
        within = here.backwards > there.backwards or here.passes > there.passes
        return here.steps > there.steps or (here.steps == there.steps and within)
