"""The next fragment and the pace of the fastest worker, on the coordinator.

The workers go over the fragments in turn, each by itself. Those that push the same fragment have a round together, and
push the next one after it. So only a worker that comes back, or that has rested, must be told which fragment is next.
The coordinator does so as soon as the others wait for this worker. Without a quorum no round is decided without it from
then on, so all push the same fragment. With a quorum it tells again behind each round, until the worker has pushed.

To name a fragment behind every round was tried in a model of workers and messages, and was worse: where rounds follow
one another as fast as messages travel, the words come too late, and scatter the workers over the fragments.
"""

from topotrain.config.job import Job
from topotrain.config.topology import Address
from topotrain.core.protocol import Message, StepDecision
from topotrain.core.server.consistency import IS_BACK
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, ServerExtension, StepResult
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN, NextRound, StepTime


class RoundTurns(ServerExtension):
    """Tells workers which fragment is next, and how fast the fastest of them is."""

    STATE = ("_last", "_pushes", "_seconds", "_back")

    messages = (StepTime,)
    decrees = (IS_BACK,)

    def __init__(self, server: Server, job: Job) -> None:
        self._server = server
        self._fragments, self._times = job.cluster.fragments, job.cluster.paces_by_time
        self._last = self._fragments - 1  # the fragment of the last round
        self._pushes = 0  # those that are over
        self._seconds: dict[int, float] = {}  # by worker group, of a step
        self._back: set[int] = set()  # worker groups that are back, and have had no part in a round since

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Keep the time of a worker's step."""
        assert isinstance(message, StepTime)
        self._seconds[sender.group] = message.seconds
        return ()

    def before_decision(self, group: int) -> None:
        """The push of a group is in the next round."""
        # Here, and not behind the round: a worker may come back between the two, and has no part in it.
        self._last = self._server.state.known.staging[group].first.optimizer
        self._back.discard(group)

    def step_over(self, result: StepResult) -> Outbox:
        """Tell a worker of the round how fast the fastest worker is."""
        self._pushes += 1
        told = [self._tell(group, self._following) for group in sorted(self._back)]
        if self._times:
            told.append(self._tell(result.group, OWN_TURN))
        return [each for part in told for each in part]

    def on_decree(self, decision: StepDecision) -> Outbox:
        """A worker is back: tell it which fragment the others push next."""
        self._back.add(decision.group)
        return self._tell(decision.group, self._following, back=True)

    def reset_group(self, group: int, ended: bool) -> None:
        """The worker is gone, and a new process may be of another speed."""
        self._seconds.pop(group, None)
        self._back.discard(group)

    @property
    def _following(self) -> int:
        return (self._last + 1) % self._fragments

    def _tell(self, group: int, fragment: int, back: bool = False) -> Outbox:
        groups = self._server.worker_groups
        # Without times there is nothing to look for among what may be thousands of groups.
        live = groups.clocks.live() if self._seconds else ()
        seconds = min((self._seconds[each] for each in live if each in self._seconds), default=0.0)
        return [(worker, NextRound(self._pushes, fragment, seconds, back)) for worker in groups.workers[group]]
