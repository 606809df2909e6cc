"""Rounds of an outer optimizer: the steps of several groups are one update.

A worker group pushes what it has learned since the last round: the values that it received minus its own values now.
The servers take the weighted mean of all groups for a gradient, and their optimizer makes one step with it. This is
local SGD with an outer optimizer (FedOpt: Reddi et al., 2021; DiLoCo: Douillard et al., 2023).

Rule: a round is decided when every live group has pushed, or (with `quorum`) so many groups have. The coordinator
decides all its steps in one run of decisions, so all shards make the update of the same groups. A group that dies
before has no part in the round, and with a quorum one that is late has a part in a later one (Decoupled DiLoCo).

A round of groups with only ended scripts is the mean of what they have left: no round follows that would bring back
what a step with momentum overshoots.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from topotrain.config.job import Job, Reduce, UpdaterType
from topotrain.config.sharding import Bucket, Segment, SliceMap
from topotrain.core.events import Event, Rounds
from topotrain.core.protocol import Commit, StepDecision
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import IS_BACK, RESTARTS
from topotrain.core.server.gradients.gradient_source import (
    GradientSource,
    GroupBuffers,
    SourceSettings,
    StagedGradient,
)
from topotrain.core.server.ordered_sum import OrderedMean, Part
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import GradientExtension, Outbox, ReportingExtension, StepPolicy
from topotrain.core.server.step_execution import SEVERAL_GROUPS
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotParticipant
from topotrain.extensions.outer_optimizer.grace.round_windows import RoundWindows
from topotrain.extensions.outer_optimizer.groups.shared_pushes import SharedPushes
from topotrain.extensions.outer_optimizer.outer_schedule import OuterSchedule
from topotrain.extensions.outer_optimizer.round_history import RoundHistory
from topotrain.extensions.outer_optimizer.rounds import rearmost


def is_left_over(sources: Iterable[GradientSource]) -> bool:
    """Whether all these steps are of ended scripts, which get no values any more."""
    return not any(source.first.fetch for source in sources)


class RoundGradient(StagedGradient):
    """The mean of what several worker groups have pushed.

    Args:
        sources: the staged steps, by worker group.
        mean: sums in the order of the groups.
        buffers: for optimizers of whole tensors.
        buckets: of the shard.
    """

    def __init__(
        self,
        sources: Mapping[int, GradientSource],
        mean: OrderedMean,
        buffers: GroupBuffers,
        buckets: Sequence[Bucket],
    ) -> None:
        self._sources, self._mean, self._buffers, self._buckets = sources, mean, buffers, buckets
        # In the order of the workers, and not of arrival: the last bit of a sum depends on it.
        self._weights = {
            group: sum(source.commits[worker].weight for worker in sorted(source.commits))
            for group, source in sources.items()
        }

    def sum_all(self) -> None:
        for bucket in self._buckets:
            if self.present(bucket):
                self._mean.write(self._parts(bucket), self._buffers.view("mean", bucket))

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        return self._mean.passing(self._parts(bucket))

    def segment(self, segment: Segment) -> torch.Tensor:
        return self._buffers.segment("mean", segment)

    def present(self, bucket: Bucket) -> int:
        found = 0
        for source in self._sources.values():
            found |= source.present(bucket)
        return found

    def _parts(self, bucket: Bucket) -> dict[int, Part]:
        # A group without a part in the bucket has learned nothing there, and its weight counts in the divisor.
        return {
            group: (self._weights[group], source.gradient(bucket) if source.present(bucket) else None)
            for group, source in self._sources.items()
        }


class OuterRounds(ReportingExtension, GradientExtension, SnapshotParticipant, StepPolicy):
    """Makes one update of the steps of all live worker groups.

    Args:
        server, job: of the server.
        windows: keeps rounds with a quorum open. None: they are over then.
        before: of each fragment, the number of its rounds in the run that this job continues. Empty: there were none.
    """

    decrees = (RESTARTS, IS_BACK)

    def __init__(
        self, server: Server, job: Job, windows: RoundWindows | None = None, before: Sequence[int] = ()
    ) -> None:
        assert job.cluster.outer is not None
        self._server, self._windows = server, windows
        self.replies_in_part = job.cluster.fragments > 1
        self._quorum, self._fragments = job.cluster.quorum, job.cluster.fragments
        self._mean = OrderedMean((tuple(server.groups),), job.reduce is Reduce.kMean)
        self._schedule = OuterSchedule(job.cluster.outer)
        # What each worker has learned counts as much as in a round of all, whichever others are in the round. Delayed
        # momentum divides by its own number of updates.
        self._means, delayed = job.reduce is Reduce.kMean, job.cluster.outer.type is UpdaterType.kDelayedNesterov
        self._by_share = self._means and not delayed and self._quorum > 0
        fragments = job.cluster.fragments
        # A run with other fragments has counted the rounds of other parts of the model.
        self.history = RoundHistory(server.groups, before if len(before) == fragments else [0] * fragments)

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource | None:
        """As `GradientExtension.gradient_source`: each worker of a group pushes a share."""
        return SharedPushes(replace(settings, visible=False)) if settings.workers > 1 else None

    def updates(self, steps: Sequence[tuple[int, int]]) -> Sequence[Sequence[tuple[int, int]]]:
        """As `StepPolicy.updates`: one for each fragment of which the round is over."""
        here = {group for group, _ in steps}
        # Without another group that could push, no round waits for more.
        last = here.issuperset(self._server.worker_groups.clocks.live())
        by_fragment: dict[int, list[tuple[int, int]]] = {}
        for group, step in steps:
            fragment = self._server.state.known.staging[group].first.optimizer
            by_fragment.setdefault(fragment, []).append((group, step))
        over: Mapping[int, Sequence[tuple[int, int]]] = {
            fragment: by_fragment[fragment]
            for fragment in sorted(by_fragment)
            if 0 < self._quorum <= len(by_fragment[fragment])
        }
        if self._windows is not None:
            over = self._windows.over(steps, over, last)
        if over or not last or not by_fragment:
            return list(over.values())
        # All wait, and for different fragments. Those that are behind come to the others.
        return [by_fragment[rearmost(by_fragment, self._fragments)]]

    def before_update(self, groups: Sequence[int], first: Commit, hyper: bytes) -> bytes | float:
        """As `StepPolicy.before_update`: a round begins."""
        made = self.history.add(first.optimizer, groups)
        staging = self._server.state.known.staging
        if self._means and is_left_over(staging[group] for group in groups):
            return made.share if self._quorum else 1.0
        spec = self._server.state.known.schema.optimizer
        share = made.share if self._by_share else None
        return self._schedule.settings(hyper, spec, made.fragment, made.number, share)

    def joint_gradient(self, sources: Mapping[int, GradientSource]) -> StagedGradient:
        model = self._server.state.known
        return RoundGradient(sources, self._mean, GroupBuffers(model.flats, SEVERAL_GROUPS), model.buckets)

    # --- what is known of the rounds -----------------------------------------------------------------------------

    def reset_group(self, group: int, ended: bool) -> None:
        self.history.forget(group)

    def on_decree(self, decision: StepDecision) -> Outbox:
        """As `ServerExtension.on_decree`: a group is gone, or is there again."""
        self.history.change(decision.group, decision.change == IS_BACK)
        return ()

    def facts(self) -> Mapping[str, Any]:
        return {"rounds": list(self.history.made)}

    def events(self) -> Sequence[Event]:
        listed = self.history.last
        last = tuple(f"{each.fragment} {each.number} {' '.join(map(str, each.groups))}" for each in listed)
        return (replace(self._counted(), last=last),)

    def interim_events(self) -> Sequence[Event]:
        """As `ReportingExtension.interim_events`: the counts, without the last rounds."""
        return (self._counted(),)

    def _counted(self) -> Rounds:
        # A copy: the thread of the messages may count another round meanwhile.
        history, members = self.history, dict(self.history.members)
        mean = history.age_sum / history.ages if history.ages else 0.0
        counts = {str(count): members[count] for count in sorted(members)}
        return Rounds(str(self._server.me), counts, mean, history.age_max, ())

    def state_dict(self) -> State:
        return self.history.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.history.load_state_dict(state)
