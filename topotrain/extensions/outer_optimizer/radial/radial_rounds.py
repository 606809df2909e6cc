"""Rounds that merge each tensor by a radial-directional average.

`radial_average` has the rule, `radial_products` how servers learn the lengths of a tensor that they divide.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from topotrain.config.job import Job
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.model.schema import torch_dtype
from topotrain.core.protocol import Commit, StepDecision, StepVote
from topotrain.core.server.component_state import State
from topotrain.core.server.gradients.gradient_source import GradientSource, GroupBuffers, StagedGradient
from topotrain.core.server.ordered_sum import OrderedMean, ScratchBuffers
from topotrain.core.server.server import Server
from topotrain.core.server.step_execution import SEVERAL_GROUPS
from topotrain.extensions.outer_optimizer.grace.round_windows import RoundWindows
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds, RoundGradient, is_left_over
from topotrain.extensions.outer_optimizer.radial.radial_average import (
    Products,
    average_factors,
    block_products,
    direction_factors,
    inner_product,
    squared_length,
    wide,
    write_sum,
)
from topotrain.extensions.outer_optimizer.radial.radial_products import (
    NOTHING,
    ProductRow,
    RadialTensors,
    joined_products,
    unpack_rows,
)


class PushedTensors:
    """Tensors of one shard as worker groups have pushed them.

    Args:
        sources: the staged steps, by worker group.
        tensors: where the tensors lie.
    """

    def __init__(self, sources: Mapping[int, GradientSource], tensors: RadialTensors) -> None:
        self._sources, self._tensors = sources, tensors

    def part(self, group: int, bucket: Bucket, at: int) -> torch.Tensor | None:
        """Return piece number `at` of a bucket. None: it is not pushed.

        It is valid until the next call for the group.
        """
        source, piece = self._sources[group], bucket.pieces[at]
        if not source.present(bucket) >> at & 1:
            return None
        return source.gradient(bucket)[bucket.place(piece)]

    def product(self, tensor: int, left: int, right: int) -> float:
        """Return the inner product of two groups' tensors on this shard."""
        found = []
        for bucket, at in self._tensors.places(tensor):
            a = self.part(left, bucket, at)
            b = a if left == right else self.part(right, bucket, at)
            if a is not None and b is not None:
                found.append(block_products(a, b))
        return inner_product(found)


class RadialGradient(RoundGradient):
    """The radial-directional average of each tensor, and the mean of those without.

    Args:
        sources, mean, buffers, buckets: as for `RoundGradient`.
        tensors: those that are not merged by their mean.
        products: of those that lie on several shards.
        scratch: reused memory.
    """

    def __init__(
        self,
        sources: Mapping[int, GradientSource],
        mean: OrderedMean,
        buffers: GroupBuffers,
        buckets: Sequence[Bucket],
        tensors: RadialTensors,
        products: Mapping[int, Products],
        scratch: ScratchBuffers,
    ) -> None:
        super().__init__(sources, mean, buffers, buckets)
        self._tensors, self._scratch = tensors, scratch
        self._pushed = PushedTensors(sources, tensors)
        self._counted = {group: weight for group, weight in self._weights.items() if weight > 0}
        fragment = next(iter(sources.values())).first.optimizer
        found = {tensor: self._factors_of(tensor, products.get(tensor)) for tensor in tensors.here(fragment)}
        self._factors = {tensor: factors for tensor, factors in found.items() if factors is not None}

    def _factors_of(self, tensor: int, products: Products | None) -> dict[int, float] | None:
        """Return the factor of each group's tensor. None: the mean."""
        squares = {
            group: self._pushed.product(tensor, group, group) if products is None else products[group, group]
            for group in self._counted
        }
        lengths = {group: math.sqrt(square) for group, square in squares.items()}
        factors = direction_factors(lengths, self._counted, torch_dtype(self._tensors.dtype(tensor)))
        if len(factors) < 2:
            return None
        squared = squared_length(factors, products) if products else self._measure(tensor, factors)
        return average_factors(factors, lengths, self._counted, squared)

    def _measure(self, tensor: int, factors: Mapping[int, float]) -> float:
        """Return the squared length of the sum of a tensor times these factors."""
        found = []
        for bucket, at in self._tensors.places(tensor):
            parts = list(self._parts_of(factors, bucket, at))
            if parts:
                total = self._scratch.like(3, parts[0][1].to(wide(parts[0][1].dtype)))
                write_sum(parts, total, self._scratch)
                found.append(block_products(total, total))
        return inner_product(found)

    def _parts_of(self, factors: Mapping[int, float], bucket: Bucket, at: int) -> Iterator[tuple[float, torch.Tensor]]:
        for group in sorted(factors):
            part = self._pushed.part(group, bucket, at)
            if part is not None:
                yield factors[group], part

    def sum_all(self) -> None:
        for bucket in self._buckets:
            if self.present(bucket):
                self._buffers.view("mean", bucket).copy_(self.gradient(bucket))

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        found = [(at, self._factors[t]) for t, at in self._tensors.inside(bucket) if t in self._factors]
        if len(found) < len(bucket.pieces):
            # Of several groups the mean is in memory of its own, so it may be changed.
            out = super().gradient(bucket)
        else:
            like = next(source.gradient(bucket) for source in self._sources.values() if source.present(bucket))
            # Zeros between the pieces, where the update of several as one finds a gradient, too.
            out = self._scratch.like(2, like).zero_()
        for at, factors in found:
            piece = bucket.pieces[at]
            part = out[bucket.place(piece)]
            write_sum(self._parts_of(factors, bucket, at), part, self._scratch)
        return out


class RadialRounds(OuterRounds):
    """Merges what all live worker groups have learned by radial-directional averages.

    Args:
        server, job, windows, before: as for `OuterRounds`.
    """

    def __init__(
        self, server: Server, job: Job, windows: RoundWindows | None = None, before: Sequence[int] = ()
    ) -> None:
        super().__init__(server, job, windows, before)
        self._shard, self._groups = server.me.index, tuple(server.groups)
        self._tensors: RadialTensors | None = None
        self._scratch = ScratchBuffers()
        self._resets = dict.fromkeys(server.groups, 0)
        self._rows: dict[int, dict[int, ProductRow]] = {}  # by group: of the step that is about to be carried out

    def _of_model(self) -> RadialTensors:
        if self._tensors is None:
            self._tensors = RadialTensors(self._server.state.known, len(self._groups))
        return self._tensors

    # --- a vote --------------------------------------------------------------------------------------------------

    def amend_vote(self, vote: StepVote, commits: Mapping[int, Commit]) -> StepVote:
        """As `ServerExtension.amend_vote`: adds inner products of divided tensors."""
        staging, tensors = self._server.state.known.staging, self._of_model()
        fragment = staging[vote.group].first.optimizer
        divided = tensors.divided(fragment).get(self._shard, ())
        if not divided:
            return vote
        staged = {
            group: source for group, source in staging.items() if source.staged and source.first.optimizer == fragment
        }
        pushed = PushedTensors(staged, tensors)
        row = ProductRow(
            tuple((self._resets[g], staged[g].step) if g in staged else NOTHING for g in self._groups),
            tuple(
                tuple(pushed.product(tensor, *sorted((vote.group, g))) if g in staged else 0.0 for g in self._groups)
                for tensor in divided
            ),
        )
        return replace(vote, measured=row.pack())

    def reset_group(self, group: int, ended: bool) -> None:
        """As `ServerExtension.reset_group`: steps of this number will be others."""
        super().reset_group(group, ended)
        self._forget(group)

    def reset_worker(self, worker: Address) -> None:
        super().reset_worker(worker)
        self._forget(worker.group)

    def _forget(self, group: int) -> None:
        if group in self._resets:
            self._resets[group] += 1

    # --- an update -----------------------------------------------------------------------------------------------

    def choose(self, staging: GradientSource, decision: StepDecision) -> None:
        """As `StepPolicy.choose`: keeps what all shards have measured of the step."""
        super().choose(staging, decision)
        divided = self._of_model().divided(staging.first.optimizer)
        self._rows[decision.group] = unpack_rows(decision.measured, len(self._groups), divided)

    def joint_gradient(self, sources: Mapping[int, GradientSource]) -> StagedGradient:
        if is_left_over(sources.values()):
            return super().joint_gradient(sources)
        model, tensors = self._server.state.known, self._of_model()
        divided = tensors.divided(next(iter(sources.values())).first.optimizer)
        products = joined_products({group: self._rows[group] for group in sources}, self._groups, divided)
        buffers = GroupBuffers(model.flats, SEVERAL_GROUPS)
        return RadialGradient(sources, self._mean, buffers, model.buckets, tensors, products, self._scratch)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {**super().state_dict(), "resets": self._resets}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._resets = dict(state["resets"])
