"""Checks that a script trains what it has prepared.

Each sign that it does not is reported once and by name. A script that only evaluates is no mistake.
"""

import difflib
import sys
import threading
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from topotrain.config.job import ConfigError
from topotrain.core.client.client import StepEnd
from topotrain.core.events import Notice
from topotrain.training.context import Context, TrainingChecks
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension


def name_nearest(error: BaseException, version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Add the nearest public name to the error of a misspelled `tt.` name."""
    # From 3.12 on, the module `traceback` adds it to what it prints, as `python` itself does in every version.
    if version < (3, 12) and isinstance(error, AttributeError) and error.obj is sys.modules["topotrain"]:
        near = difflib.get_close_matches(str(error.name), dir(error.obj), 1)
        if near:
            error.args = (f"{error}. Did you mean: {near[0]!r}?",)


def refuse_wrapped(models: Sequence[nn.Module]) -> None:
    """Raise ConfigError for a model that torch's parallelism has wrapped or divided."""
    # Looked up where the script has imported them: torch imports most of these modules only when they are asked for.
    classes = ("torch.nn.parallel", "DistributedDataParallel"), ("torch.distributed.fsdp", "FullyShardedDataParallel")
    wrappers = tuple(filter(None, (getattr(sys.modules.get(module), name, None) for module, name in classes)))
    divided = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for module in (module for model in models for module in model.modules()):
        several = isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
        if several or isinstance(module, wrappers):
            accepted = "must be the model itself, without this wrapper: topotrain takes its place"
            raise ConfigError("tt.prepare", type(module).__name__, accepted)
    for name, tensor in (named for model in models for named in model.named_parameters()):
        if isinstance(tensor, divided) or isinstance(tensor.data, divided):
            accepted = (
                "must be an ordinary tensor: topotrain cannot train one that fully_shard, parallelize_module or "
                "distribute_tensor has divided, and takes their place; to split a model, see docs/splitting.md"
            )
            raise ConfigError(f"model parameter {name}", "a DTensor", accepted)


def refuse_nested(optimizers: Sequence[Optimizer], imported: str) -> None:
    """Raise ConfigError for an optimizer that steps another one inside, such as SAM.

    imported: the job's `import`, of which the servers make an optimizer as a whole.
    """
    for optimizer in optimizers:
        inside = [(name, each) for name, each in vars(optimizer).items() if isinstance(each, Optimizer)]
        if inside and (not imported or type(optimizer).__module__ != imported):
            name, inner = inside[0]
            accepted = (
                f"has another optimizer inside, {type(inner).__name__}, which makes the steps: give tt.prepare that "
                f"one, optimizer.{name}, and call the methods of {type(optimizer).__name__} as before"
            )
            raise ConfigError("tt.prepare", type(optimizer).__name__, accepted)


def notice_unprepared(here: Context) -> None:
    """Say on the main worker, at an optimizer's first step, if it is in no job."""
    thread, stepped = threading.get_ident(), False

    def first(optimizer: Optimizer, *_: Any) -> None:
        nonlocal stepped
        # Servers of this process have some in other threads.
        if stepped or threading.get_ident() != thread:
            return
        # The hook stays: torch goes through all hooks just now.
        stepped = True
        if not here.given and here.tables is None:
            words = (
                "is called, and nothing was given to tt.prepare so far: every worker trains all of it by itself. "
                "If the loop is a library's, docs/integrations.md has what to import. A job that stays so fails"
            )
            here.emit(Notice(str(here.me), f"{type(optimizer).__name__}.step() {words}"))

    hook = register_optimizer_step_pre_hook(first)
    here.at_close.callback(hook.remove)


class MisuseChecks(WorkerExtension, TrainingChecks):
    """Watches the steps of a script until this worker's part ends."""

    def __init__(self, here: Context, worker: Worker) -> None:
        self._here, self._worker = here, worker
        self._kinds = " and ".join(type(optimizer).__name__ for optimizer in worker.optimizers)
        self._steps = 0
        self._moved = here.split is not None  # a worker of a split model may hold no parameter at all
        self._names = {
            id(tensor): parameter.name
            for tensor, parameter in zip(worker.parts.tensors, worker.parts.parameters, strict=True)
        }
        topology = here.place.topology
        self._several = topology.worker_groups * topology.workers_per_group > 1
        self._held = {*self._names, *map(id, worker.parts.aside)}
        self._outside: dict[int, int] = {}  # parameters of other optimizers, with the step at which they were seen
        self._shared: nn.Parameter | None = None  # one of them with a gradient of this worker's share of a batch
        # torch's hook is for all optimizers of the process, and servers in this process have some, in other threads.
        self._thread = threading.get_ident()
        worker.attach(self)
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Watch no longer."""
        self._hook.remove()

    def before_commit(self, step: int, end: StepEnd) -> None:
        self._steps += 1
        if self._steps == 1 and self._here.is_main:
            self._look_at_loader()
        if not self._moved:
            self._moved = end.backwards > 0 or any(tensor.grad is not None for tensor in self._worker.parts.tensors)

    def _look_at_loader(self) -> None:
        if self._here.loader is not None and not self._worker.tally.samples:
            words = (
                "optimizer.step() was called before any batch of the loader that tt.prepare returned: if the script "
                "reads its own loader, every worker trains on all of the data. Keep what is returned: "
                "model, optimizer, loader = tt.prepare(model, optimizer, loader)"
            )
            self._here.emit(Notice(str(self._here.me), words))

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer of this process has made a step, perhaps on a server's thread."""
        if threading.get_ident() != self._thread or any(optimizer is ours for ours in self._worker.optimizers):
            return
        # Another optimizer may train a model of its own, which is no mistake.
        changed = {id(tensor) for _, tensor in self._worker.buffers.edited()}
        named = [self._names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in changed]
        if named:
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            accepted = (
                f"has changed parameter {named[0]}{more} of the model. The servers hold its value, so only the "
                f"{self._kinds} that tt.prepare was given may change them. Make this {type(optimizer).__name__} before "
                f"the first batch and give it to tt.prepare, too: a parameter may be in several optimizers, of which "
                f"each makes the steps that the script calls, such as those of a second phase"
            )
            raise ConfigError("another optimizer", type(optimizer).__name__, accepted)
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._held):
            if id(p) == id(self._shared):
                accepted = (
                    f"steps a parameter of shape {tuple(p.shape)} that is not in the job, with gradients of this "
                    f"worker's share of each batch: every worker has another value of it. Give tt.prepare its module "
                    f"(or make it a part of the library's model) and this {type(optimizer).__name__}; or make a "
                    f"backward that is meant for this worker alone in `with tt.local():`"
                )
                raise ConfigError("another optimizer", type(optimizer).__name__, accepted)
            if self._several and id(p) not in self._outside and p.is_leaf and p.requires_grad:
                self._outside[id(p)] = self._worker.own_steps
                p.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        worker = self._worker
        # A copy of the model that is trained within one step, as in meta-learning, is a part of that step.
        later = worker.own_steps > self._outside.get(id(parameter), worker.own_steps)
        if later and worker.batches.unused and not worker.path.private:
            self._shared = parameter

    def check(self) -> None:
        tally = self._worker.tally
        if self._here.tables is not None or not any(tensor.requires_grad for tensor in self._worker.parts.tensors):
            return  # tables are pushed by hand, without a step
        # Without a backward the script only evaluates.
        if tally.backwards and not tally.steps:
            accepted = (
                f"went backward {tally.backwards} times and never called step() of the {self._kinds} that tt.prepare "
                f"was given: no step reached a server, nothing was trained. (A backward that is no part of the "
                f"training stands in `with tt.local():`)"
            )
            raise ConfigError("program", None, accepted)
        if self._steps and not self._moved and self._here.is_main:
            accepted = (
                f"called optimizer.step() {self._steps} times, and no parameter of the model that tt.prepare was given "
                f"ever had a gradient: nothing was trained. Is the loss that of another model, made after tt.prepare?"
            )
            raise ConfigError("program", None, accepted)
