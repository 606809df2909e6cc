"""The model of a script, seen without training it: the script is run up to `tt.prepare`, and no further."""

import contextlib
import inspect
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from topotrain.buffers import describe_model
from topotrain.front.context import Planning, plan_only
from topotrain.front.sparse import find_sparse
from topotrain.job import ConfigError
from topotrain.slices import Parameter


def schema_of(program: str, args: Sequence[str]) -> tuple[tuple[Parameter, ...], float]:
    """The parameters a script would train, and its optimizer's state per element, in elements.

    What the script prints goes to stderr. Raises ConfigError if it ends without calling `tt.prepare`.
    """
    plan_only()
    sys.argv = [program, *args]
    sys.path[0:1] = [str(Path(program).resolve().parent)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(program, run_name="__main__")
    except Planning as seen:
        sparse = find_sparse(seen.model, seen.optimizer) if isinstance(seen.optimizer, torch.optim.Optimizer) else []
        aside = [entry.weight for entry in sparse]  # servers hold these row by row
        return describe_model(seen.model, aside).parameters, _state_factor(seen.optimizer)
    except SystemExit as leaving:
        raise ConfigError("program", program, f"left with code {leaving.code} before tt.prepare") from leaving
    raise ConfigError("program", program, "ended without calling topotrain.prepare: there is no model to plan for")


def _state_factor(optimizer: torch.optim.Optimizer | None) -> float:
    """Elements of optimizer state per parameter element, found by one step of the same class on a small tensor."""
    if optimizer is None or isinstance(optimizer, torch.optim.SparseAdam):
        return 0.0
    probe = torch.nn.Parameter(torch.zeros(64))
    probe.grad = torch.zeros(64)
    taken = inspect.signature(type(optimizer)).parameters  # a class may set group entries that it does not take
    copy = type(optimizer)(
        [probe], **{k: v for k, v in optimizer.param_groups[0].items() if k in taken and k != "params"}
    )
    copy.step()
    held = [t for entry in copy.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() for t in held if t.numel() == probe.numel()) / probe.numel()
