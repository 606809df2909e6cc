"""Messages between the workers of a group that adds up its gradients itself.

`backward` is the number of a backward since the beginning of the script, which is the same on all workers.
"""

from dataclasses import dataclass

from topotrain.core.protocol.message import MOST, MOST_EPOCHS, MOST_SAMPLES, Message, Receiver, Route, Sender, message
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN

_BETWEEN_WORKERS = Route(Sender.GROUP_WORKERS, Receiver.WORKER)


@message(150, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class PeerHello(Message):
    """Worker -> worker of its group: the first message on a new connection.

    It is sent by the worker that has opened the connection.
    """


@message(151, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class PeerGradient(Message):
    """Worker -> the worker that adds up this bucket: the local gradient, as in `Push`.

    The sender does not write the memory of the body until the mean has come back.
    """

    backward: int
    bucket: int
    weight: float
    present: bytes

    def is_valid(self) -> bool:
        return 0 <= self.backward < MOST and 0 <= self.bucket < MOST and 0 <= self.weight <= MOST_SAMPLES


@message(152, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class PeerBackwardEnd(Message):
    """Worker -> worker: this backward has ended.

    Attributes:
        step: the number of the sender's steps before it.
        pushed: a bit for each bucket of the model of which the sender has a gradient.
        samples: that the sender's script was given since its last step.
        settled: whether the new values of the sender's last push have arrived.
        named: the fragment that the coordinator has named to the sender, or OWN_TURN.
        interval: the steps between two pushes, as the sender has measured them.
        batches: that the sender's script was given since its last push.
        digest: as `Commit.digest`, of the sender's last step.
    """

    backward: int
    step: int
    weight: float
    pushed: bytes
    samples: int
    settled: bool
    named: int
    interval: int
    batches: int = 0
    digest: int = 0

    def is_valid(self) -> bool:
        return (
            0 <= self.backward < MOST
            and 0 <= self.step < MOST
            and 0 <= self.batches < MOST
            and 0 <= self.weight <= MOST_SAMPLES
            and 0 <= self.samples <= MOST_SAMPLES
            and OWN_TURN <= self.named < MOST_EPOCHS
            and 0 < self.interval < MOST
        )


@message(153, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class PeerMean(Message):
    """Worker -> worker: the group's mean of a bucket, as in `ReducedGradient`.

    The sender does not write the memory of the body until the receiver has pushed the bucket again.
    """

    backward: int
    bucket: int
    present: bytes

    def is_valid(self) -> bool:
        return 0 <= self.backward < MOST and 0 <= self.bucket < MOST


@message(154, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class PeerPause(Message):
    """Worker -> worker: the sender stops for a round, or at the end of its script.

    It tells workers that are in another backward that they wait for nothing.

    Attributes:
        backwards, steps: the number of backwards and of steps that the sender has made.
        over: the sender's script has ended.
    """

    backwards: int
    steps: int
    over: bool

    def is_valid(self) -> bool:
        return 0 <= self.backwards < MOST and 0 <= self.steps < MOST
