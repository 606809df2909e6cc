"""Record the steps of a script, in a plain process or as the program of a job.

`python -m topotrain.tools.check.observed_script OBSERVATION PROGRAM ARG…`, with an `Observation` as JSON. The record is
a safetensors file with the gradients before each step, and the values before and after it. Notes are beside it.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from topotrain.launch.runtime.entry_points import run_program
from topotrain.tools.check.compared_records import sample
from topotrain.training import context as process
from topotrain.training.final_parameters import save_tensors
from topotrain.training.parameters.prepared_objects import PreparedObjects, joined
from topotrain.training.rng_state import torch_state

_MOST, _MOST_OF_WHOLE = 1 << 18, 1 << 12
"""Elements that are recorded of a step, and of each step of a whole script."""
_BY_SHARE = {nn.modules.dropout._DropoutNd: "dropout", nn.modules.batchnorm._BatchNorm: "BatchNorm"}


@dataclass(frozen=True)
class Observation:
    """The file for a record, and the conditions of the script's run."""

    record: str
    steps: int = 0  # after which the script ends; 0: at its own end
    rounding: bool = False  # change each gradient by as much as another order of addition may
    still: bool = False  # dropout and batch normalization as in evaluation


# No Exception, which a script may catch around its steps.
class _Enough(BaseException):
    """Leaves the script: all steps are made."""


class _StepObserver(process.PrepareObserver):
    """Records each step of the prepared optimizers."""

    def __init__(self, wanted: Observation) -> None:
        self._wanted, self._noise = wanted, torch.Generator().manual_seed(0)
        self._calls: list[PreparedObjects] = []
        self._stepping: list[Optimizer] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._steps, self._draws, self._random = 0, 0, torch_state()
        self._by_share: set[str] = set()
        self._reported: dict[str, float] = {}
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)
        register_module_forward_pre_hook(self._forward)

    def prepared(self, call: PreparedObjects) -> None:
        self._calls.append(call)

    def reported(self, name: str, value: float) -> None:
        self._reported[name] = value

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The prepared parameters, with their names on the servers."""
        here = process.current()
        if here is None:
            return dict(joined(self._calls).model.named_parameters()) if self._calls else {}
        parts = None if here.worker is None else here.worker.parts
        return {} if parts is None else {p.name: t for p, t in zip(parts.parameters, parts.tensors, strict=True)}

    def _trained(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Those that an optimizer has; none where the job tests its kernels."""
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self._parameters().items() if id(p) in owned}

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch calls the hooks for the step of a subclass, and once more for that of its base class inside it.
        self._stepping.append(optimizer)
        trained = self._trained(optimizer)
        if len(self._stepping) > 1 or not trained:
            return
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        if self._wanted.rounding:
            most = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
            for g in gradients.values():
                chance = torch.rand(g.shape, generator=self._noise).to(g) * 2 - 1
                g += 4 * torch.finfo(g.dtype).eps * (g.abs() + most / 100) * chance
        self._record("gradient", gradients)
        self._record("before", self._parameters())

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.pop()
        if self._stepping or not self._trained(optimizer):
            return
        self._record("after", self._parameters())
        self._steps += 1
        state, before = torch_state(), self._random
        self._draws, self._random = self._draws + (not torch.equal(state, before)), state
        if self._steps == self._wanted.steps:
            raise _Enough

    def _forward(self, module: nn.Module, args: Any) -> None:
        kind = next((name for each, name in _BY_SHARE.items() if isinstance(module, each)), "")
        if kind and self._wanted.still:
            module.training = False
        elif kind and module.training:
            self._by_share.add(kind)

    def _record(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        here = process.current()
        if here is None or here.is_main:
            for name, tensor in tensors.items():
                self._tensors[f"{self._steps} {kind} {name}"] = sample(tensor, self._most())

    def _most(self) -> int:
        """The elements that are recorded of each parameter."""
        elements = _MOST if self._wanted.steps else _MOST_OF_WHOLE
        return max(16, elements // max(1, len(self._parameters())))

    def save(self) -> None:
        """Write the record, with the values after the script's end."""
        found = self._parameters()
        self._record("after", found)
        notes = {
            "steps": self._steps,
            "most": self._most(),
            "draws": self._draws,
            "by_share": sorted(self._by_share),
            "reported": self._reported,
            "eps": max((torch.finfo(p.dtype).eps for p in found.values() if p.is_floating_point()), default=0.0),
        }
        here = process.current()
        if here is None or here.is_main:
            record = Path(self._wanted.record)
            record.with_suffix(".json").write_text(json.dumps(notes), encoding="utf-8")
            save_tensors(self._tensors, record, {})


def observe(wanted: Observation, program: str, args: list[str]) -> None:
    """Run the script, and write the record. The errors are the script's."""
    observer = _StepObserver(wanted)
    process.observe_prepare(observer)
    with open(f"{wanted.record}.out", "a", encoding="utf-8") as out, redirect_stdout(out), suppress(_Enough):
        run_program(program, args)
    observer.save()


def run_plain(spec: dict[str, Any], channel: Any, fds: Any) -> int:
    """Run the script of a specification in a plain process, and answer when it has ended."""
    observe(Observation(**spec["observation"]), spec["program"], spec["args"])
    channel.sendall(b"{}\n")
    return 0


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the script's own folder takes its place
    observe(Observation(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3:])
