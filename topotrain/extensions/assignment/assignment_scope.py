"""One worker's assignments: from the begin of the scope to the new values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from topotrain.config.job import Apply, ConfigError
from topotrain.extensions.assignment.assignment_client import decided_by, send_assignment
from topotrain.extensions.assignment.changed_parameters import ChangedParameters
from topotrain.extensions.assignment.script_place import ScriptPlace
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension


class AssignmentScope(WorkerExtension):
    """The assignments of one worker.

    Args:
        worker: the worker.
        place: where its script is.
        apart: several worker groups change the values.
    """

    def __init__(self, worker: Worker, place: ScriptPlace, apart: bool) -> None:
        self._worker, self._place, self._apart = worker, place, apart
        self._open = False

    # --- the worker's hooks ----------------------------------------------------------------------------------------

    def before_step(self) -> None:
        if self._open:
            raise RuntimeError("optimizer.step() inside tt.assign: the block may only change parameters")

    def repeats_change(self) -> bool:
        return self._place.next().repeated

    # --- the scope -------------------------------------------------------------------------------------------------

    @contextmanager
    def change(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, the script may change these parameters.

        At the end all workers of the group have the new values.

        Raises:
            ConfigError: the job cannot do this, or a parameter is none of the model.
            RuntimeError: a step is under way.
            JobError: the workers of the group are at different places of the script.
        """
        worker = self._worker
        self._check_job()
        indices = self._indices(parameters)
        # First: with local steps (`n_push`) this pushes the backwards since the last push.
        worker.refresh()
        self._check_moment("after backward() and before step()")
        # A change that was made before the block would be lost, or count without a warning.
        worker.buffers.check()
        changes = ChangedParameters(worker, indices, self._apart)
        self._open = True
        try:
            yield
            self._check_moment("with a backward inside")
            name = changes.outside()
            if name:
                raise RuntimeError(f"parameter {name} was changed inside tt.assign, which was not given it")
            changes.collect()
            self._send(changes)
            worker.commit_change()
            changes.take()
        finally:
            self._open = False
            changes.give_back()

    def _check_job(self) -> None:
        job = self._worker.job
        if self._open:
            raise RuntimeError("tt.assign inside tt.assign: one block may be given several modules or parameters")
        if job.cluster.backup:
            accepted = "must be 0 where tt.assign is used: a late worker would miss the change"
            raise ConfigError("cluster.backup", job.cluster.backup, accepted)
        if job.apply is Apply.kOnArrival:
            accepted = "must be kAtStep where tt.assign is used: with kOnArrival there is no moment between two steps"
            raise ConfigError("apply", job.apply, accepted)

    def _check_moment(self, when: str) -> None:
        if self._worker.path.begun:
            raise RuntimeError(
                f"tt.assign {when}: gradients of the step were sent already; change parameters before the backward, "
                f"or after step(); values for a backward only (SAM) need no tt.assign: put copies back before step()"
            )

    def _indices(self, parameters: Sequence[torch.nn.Parameter]) -> list[int]:
        known = {id(tensor): index for index, tensor in enumerate(self._worker.parts.tensors)}
        for number, parameter in enumerate(parameters):
            if id(parameter) not in known:
                what = f"parameter {number} of {len(parameters)}, of shape {tuple(parameter.shape)}"
                accepted = (
                    "is none of the model that tt.prepare was given, or a sparse weight: those are not assigned; "
                    "name modules or parameters without it"
                )
                raise ConfigError("tt.assign", what, accepted)
        return sorted({known[id(parameter)] for parameter in parameters}) or list(range(len(known)))

    def _send(self, changes: ChangedParameters) -> None:
        worker = self._worker
        changed = changes.changed(decided_by(worker.client))
        send_assignment(worker.client, worker.committed, self._place.next(), changed, not worker.batches.marks)
