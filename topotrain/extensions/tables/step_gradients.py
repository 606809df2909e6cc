"""Gradients of table rows in a step: means, and their part of the vote."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from topotrain.config.job import ConfigError, Job, NonFinite, Reduce
from topotrain.config.topology import Topology
from topotrain.core import protocol as m
from topotrain.core.server.nonfinite import NO_WORKER, NonfiniteLimit, all_finite
from topotrain.core.server.parameter_shard import norm_of, to_power
from topotrain.extensions.tables.push_modes import StepTable, TableShard
from topotrain.extensions.tables.table_spec import Ids

Means = dict[str, tuple[Ids, torch.Tensor]]
"""The gradients of a step, by table."""


def nonfinite_limit(job: Job) -> int:
    """Return how many consecutive non-finite changes are an error (0: not checked)."""
    return 0 if job.nonfinite is NonFinite.kAllow else NonfiniteLimit(job.nonfinite).most


class StepGradients:
    """The gradients of the rows of one server, with its tables by name."""

    def __init__(self, job: Job, topology: Topology, tables: Mapping[str, TableShard]) -> None:
        self._topology = topology
        self._divide = job.reduce is Reduce.kMean
        self._checks = nonfinite_limit(job) > 0
        self._tables = tables
        self._means: dict[tuple[int, int], Means] = {}  # of steps that are not over

    def _step_tables(self) -> Iterator[StepTable]:
        return (table for table in self._tables.values() if isinstance(table, StepTable))

    def _mean(self, group: int, step: int, commits: Mapping[int, m.Commit]) -> Means:
        known = self._means.get((group, step))
        if known is None:
            # A mean is computed once: to compute it consumes the pushes.
            known = self._means[group, step] = {}
            tree = self._topology.sum_tree(group)
            for table in self._step_tables():
                mean = table.mean(group, step, commits, tree, self._divide)
                if mean is not None:
                    known[table.spec.name] = mean
        return known

    def amend_vote(self, vote: m.StepVote, commits: Mapping[int, m.Commit]) -> m.StepVote:
        """Return the shard's vote with the rows of the step taken into account."""
        # Only a job without tables makes steps without worker 0.
        if not self._tables:
            return vote
        commit, checked = commits[0], self._checks or commits[0].check_finite
        # Without checks and clipping the mean is computed when the step is applied.
        if not (checked or commit.clip_norm > 0):
            return vote
        grads = [rows for _, rows in self._mean(vote.group, vote.step, commits).values()]
        if checked and not all(all_finite(g.reshape(-1)) for g in grads):
            # With a GradScaler overflow is normal. Otherwise it counts against the group: no worker is known.
            refused = vote.refused if commit.check_finite else (*vote.refused, NO_WORKER, -1)
            return replace(vote, finite=False, power=0.0, refused=refused)
        # The rows of refused workers are in the means already, so the whole step is skipped.
        if vote.refused:
            return replace(vote, finite=False, power=0.0)
        finite, power = vote.finite, vote.power
        if commit.clip_norm > 0:
            # The global norm is over parameters and rows, as if both were parameters.
            norms = [norm_of(g, commit.clip_type) * commit.inv_scale for g in grads if len(g)]
            if vote.infinity:
                power = max([power, *norms])
            else:
                power += sum(to_power(norm, commit.clip_type) for norm in norms)
        return replace(vote, finite=finite, power=power)

    def apply(self, group: int, step: int, commits: Mapping[int, m.Commit], factor: float) -> Iterator[str]:
        """Apply a step to its rows, and yield the errors in words.

        factor: of every gradient, for loss scaling and clipping.
        """
        for name, found in self._mean(group, step, commits).items() if self._tables else ():
            table = self._tables[name]
            assert isinstance(table, StepTable)
            try:
                table.apply_step(group, step, found, factor)
            # Errors of a script. The other tables still take the step, and the job ends with all texts.
            except (ConfigError, LookupError) as error:
                yield str(error)

    def drop(self, group: int, step: int) -> None:
        self._means.pop((group, step), None)
        for table in self._step_tables():
            table.drop(group, step)
