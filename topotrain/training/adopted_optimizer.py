"""The user's optimizer: the same object, but `step()` commits a step of the job.

The object keeps its class, its `param_groups` are read at every step, and hooks and wrappers of the script run. Only
`step` is replaced, on the object, as torch's own schedulers do. Where the servers run the optimizer, its `state` reads
from them, and is written back. All of it is undone when the job ends.
"""

from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import Apply, ConfigError, Grads, Pull
from topotrain.training.parameters.server_state import NEW_GROUP, StateView
from topotrain.training.worker import Worker

Closure = Callable[[], float] | None


def adopt(optimizer: Optimizer, worker: Worker, number: int = 0) -> "AdoptedOptimizer":
    """Let `optimizer`, which has this number in the job, commit steps of `worker`."""
    adopted = AdoptedOptimizer(optimizer)
    adopted.join(worker, number)
    return adopted


class AdoptedOptimizer:
    """One optimizer of the script while it is the job's.

    Args:
        optimizer: the script's.
        begin: called before each use; lets the job begin, which calls `join`.
    """

    def __init__(self, optimizer: Optimizer, begin: Callable[[], object] = lambda: None) -> None:
        self._optimizer, self._begin = optimizer, begin
        self._worker: Worker | None = None
        self._number, self._refusal = 0, ""
        self._over = False
        self._earlier = dict(vars(optimizer))
        earlier = self._earlier.get("step")
        # The wrapper of a scheduler notes a call, as `step` does here. One of the script may do anything.
        noted = earlier is None or getattr(earlier, "__wrapped__", None) is type(optimizer).step
        self._wrapper = None if noted else earlier

        def step(optimizer: Optimizer, closure: Closure = None) -> Any:
            return self._step(closure)

        # A scheduler takes this for its own wrapper.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._mine: dict[str, Any] = {"step": MethodType(step, optimizer)}
        vars(optimizer).update(self._mine)
        # Runs the hooks that the script registered.
        self._hooked = Optimizer.profile_hook_step(lambda optimizer, closure: self._commit(closure))
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._before_state),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def join(self, worker: Worker, number: int = 0, refusal: str = "") -> None:
        """The job has begun. refusal: why the state cannot be read; "": it can."""
        self._worker, self._number, self._refusal = worker, number, refusal
        self._mine["add_param_group"] = _refuse_group
        if not worker.runs_optimizers:
            # GradScaler then calls step() always and leaves it to us to skip: found_inf must be the group's, not a
            # worker's.
            self._mine["_step_supports_amp_scaling"] = True
            # A script may have loaded a state.
            worker.server_state.scatter(number, self._optimizer.state, initial=True)
            self._earlier["state"] = defaultdict(dict)
            self._mine["state"] = StateView(lambda: worker.server_state.gather(number))
        vars(self._optimizer).update({name: it for name, it in self._mine.items() if name != "step"})

    def keep_state(self) -> None:
        """Read the state from the servers, with which the script goes on after `release`."""
        view = self._mine.get("state")
        if view is not None and not self._refusal:
            self._earlier["state"] = defaultdict(dict, {tensor: dict(entry) for tensor, entry in view.items()})

    def release(self) -> None:
        """Give the optimizer back to the script."""
        self._over = True
        for hook in self._hooks:
            hook.remove()
        held = vars(self._optimizer)
        for name, mine in self._mine.items():
            # A wrapper that the script put around `step` later stays.
            if held.get(name) is mine:
                held.pop(name)
                held.update({name: self._earlier[name]} if name in self._earlier else {})

    # --- step ----------------------------------------------------------------------------------------------------

    def _step(self, closure: Closure) -> Any:
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._over:
            step = self._wrapper or MethodType(type(optimizer).step, optimizer)
            return step() if closure is None else step(closure)
        if self._wrapper is None:
            return self._hooked(optimizer, closure)
        # The last of all hooks, so that those of the script see what they would see in its own process.
        hook = optimizer.register_step_pre_hook(self._instead)
        try:
            return self._wrapper() if closure is None else self._wrapper(closure)
        finally:
            hook.remove()

    def _instead(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Commit where a wrapper calls the class's own `step`, and let that step nothing."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = self._commit(closure)
        nothing = object.__new__(type(optimizer))
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        vars(nothing).update(vars(optimizer), param_groups=groups, state={})
        return (nothing,), {} if closure is None else {"closure": lambda: loss}

    def _commit(self, closure: Closure) -> float | None:
        """Commit the step; the new values are in the parameters when this returns."""
        self._begin()
        assert self._worker is not None
        # GradScaler sets both on the optimizer, just for this call.
        scale, found_inf = (getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None:
            _refuse_scaler(self._worker)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                # As in torch, the closure makes the backward, so it comes before anything is sent.
                loss = closure()
        self._carry_out()
        self._worker.step(_inverse(scale), check_finite=found_inf is not None, number=self._number)
        return loss

    # --- state ---------------------------------------------------------------------------------------------------

    def _before_state(self, optimizer: Optimizer) -> None:
        self._begin()
        if self._refusal:
            raise ConfigError("optimizer.state_dict()", None, self._refusal)

    def _loaded(self, optimizer: Optimizer) -> None:
        # Before the job begins it is the state to begin with.
        if self._worker is None:
            return
        if self._refusal:
            raise ConfigError("optimizer.load_state_dict()", None, self._refusal)
        self._carry_out(loaded=True)

    def _carry_out(self, loaded: bool = False) -> None:
        """Send the script's changes of the state. loaded: they are by `load_state_dict`."""
        assert self._worker is not None
        view = self._mine.get("state")
        if view is None:
            return  # the optimizer runs in this process, and has its state here
        held = self._optimizer.state
        changed = view.changes()
        if held is not view:
            own = (tensor for group in self._optimizer.param_groups for tensor in group["params"])
            changed = {tensor: {} for tensor in own} | dict(held)
            self._optimizer.state = view
        if not changed:
            return
        if self._worker.job.apply is Apply.kOnArrival and not loaded:
            accepted = "cannot be changed with apply: kOnArrival, where updates come before step(): use load_state_dict"
            raise ConfigError("optimizer.state", None, accepted)
        self._worker.change_state(self._number, changed)


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise RuntimeError(NEW_GROUP)


def _refuse_scaler(worker: Worker) -> None:
    """Refuse a scaler where overflow of the group's gradients is not known in time."""
    job = worker.job
    if job.pull is Pull.kLazy:
        raise RuntimeError("a GradScaler must know of overflows when step() returns; use pull: kStep")
    if job.apply is Apply.kOnArrival:
        raise RuntimeError("a GradScaler decides at step(), and apply: kOnArrival updates before; use apply: kAtStep")
    if job.grads is Grads.kHidden and job.cluster.nworkers_per_group > 1:
        raise RuntimeError("a GradScaler sees only this worker's gradients with grads: kHidden; use grads: kVisible")


def _inverse(scale: torch.Tensor | None) -> float:
    """1 / scale as GradScaler computes it: in double, rounded to float."""
    return 1.0 if scale is None else float(scale.double().reciprocal().float())
