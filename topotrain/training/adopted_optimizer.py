"""The user's optimizer: the same object, but `step()` commits a step of the job.

The object stays the script's own, so schedulers built before or after `tt.prepare` hold the right one, its
`param_groups` are read at every step, and hooks registered on it run. Only its class is replaced, by one that inherits
from it. `state_dict()` gathers from the servers, `load_state_dict()` scatters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import Apply, Grads, Pull
from topotrain.training.parameters.server_state import NEW_GROUP
from topotrain.training.worker import Worker


def adopt(optimizer: Optimizer, worker: Worker, number: int = 0) -> None:
    """Let `optimizer`, which has this number in the job, commit steps of `worker`.

    Its identity and its groups stay.
    """
    # An earlier scheduler has wrapped `step` on the object itself, where it would hide the method of the new class.
    had_step = optimizer.__dict__.pop("step", None)
    cls = type(optimizer)
    # The names stay those of the user's class: error messages and pickled states show them.
    names = {"__module__": cls.__module__, "_topotrain": worker, "_topotrain_number": number}
    optimizer.__class__ = type(cls.__name__, (_AdoptedLocal if worker.runs_optimizers else _Adopted, cls), names)
    if hasattr(had_step, "_wrapped_by_lr_sched"):
        optimizer.step = _tracked(optimizer)  # type: ignore[method-assign]


def _tracked(optimizer: Optimizer) -> Callable[..., Any]:
    """Wrap `step` as a scheduler that was built earlier had wrapped it."""
    step = optimizer.step

    # The scheduler warns if `_opt_called` is not set, or if `step` has lost the mark below.
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return tracked


class _Adopted(Optimizer):
    _topotrain: Worker
    _topotrain_number: int
    # GradScaler then calls step() always and leaves it to us to skip: found_inf must be the group's, not a worker's.
    _step_supports_amp_scaling = True

    @Optimizer.profile_hook_step  # runs the hooks that the script registered
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Commit the step; the new values are in the parameters when this returns."""
        # GradScaler sets both on the optimizer, just for this call.
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None:
            self._refuse_scaler()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                # As in torch, the closure makes the backward, so it comes before anything is sent.
                loss = closure()
        self._topotrain.step(_inverse(scale), check_finite=found_inf is not None, number=self._topotrain_number)
        return loss

    def _refuse_scaler(self) -> None:
        """Refuse a scaler where overflow of the group's gradients is not known in time."""
        job = self._topotrain.job
        if job.pull is Pull.kLazy:
            raise RuntimeError("a GradScaler must know of overflows when step() returns; use pull: kStep")
        if job.apply is Apply.kOnArrival:
            raise RuntimeError(
                "a GradScaler decides at step(), and apply: kOnArrival updates before; use apply: kAtStep"
            )
        if job.grads is Grads.kHidden and job.cluster.nworkers_per_group > 1:
            raise RuntimeError(
                "a GradScaler sees only this worker's gradients with grads: kHidden; use grads: kVisible"
            )

    def state_dict(self) -> dict[str, Any]:
        """As in torch; the state is gathered from the servers."""
        self._topotrain.server_state.gather(self._topotrain_number)
        try:
            return super().state_dict()
        finally:
            # The servers hold the state; a second copy here would soon be old.
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; the state is handed to the servers."""
        super().load_state_dict(state_dict)
        self._topotrain.server_state.scatter(self._topotrain_number)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the servers own what the optimizer had at `tt.prepare`."""
        raise RuntimeError(NEW_GROUP)


class _AdoptedLocal(_Adopted):
    """An optimizer that runs in this process, and has its state here."""

    # A GradScaler unscales and skips as in torch. The object of a fused optimizer has an attribute of its own.
    _step_supports_amp_scaling = False

    def state_dict(self) -> dict[str, Any]:
        """As in torch."""
        return Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch."""
        Optimizer.load_state_dict(self, state_dict)


# torch looks for this mark, and else wraps `step` again when a state is loaded: the hooks would run twice.
_Adopted.step.hooked = True  # type: ignore[attr-defined]


def _inverse(scale: torch.Tensor | None) -> float:
    """1 / scale as GradScaler computes it: in double, rounded to float."""
    return 1.0 if scale is None else float(scale.double().reciprocal().float())
