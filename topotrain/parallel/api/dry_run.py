"""Inspect a script's model: run it until it uses what it prepares, no further."""

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topotrain.config.async_momentum import momentum_of
from topotrain.config.job import ConfigError, Updater
from topotrain.config.python_module import module_of
from topotrain.extensions.tables.frontend.sparse_embedding import find_sparse
from topotrain.training import context as process
from topotrain.training.context import PlanRun, plan_only
from topotrain.training.misuse_checks import name_nearest
from topotrain.training.parameters.flat_parameters import ModelParts, describe_model


@dataclass(frozen=True, slots=True)
class PreparedArguments:
    """The arguments that a script passes to `tt.prepare`."""

    model: Any
    optimizers: Sequence[torch.optim.Optimizer]
    loader: Any

    def parts(self) -> ModelParts:
        """Return the model as servers would see it, without tables of sparse rows.

        Raises:
            ConfigError: a parameter cannot be trained on servers.
        """
        # Jobs with several optimizers have no tables.
        sparse = find_sparse(self.model, self.optimizers[0]) if len(self.optimizers) == 1 else []
        aside = [entry.weight for entry in sparse]  # servers hold these as tables of rows
        return describe_model(self.model, aside, self.optimizers)

    def trained(self) -> int | None:
        """Return how many parameters the optimizers have; None: all."""
        if not self.optimizers:
            return None
        held = {id(p) for each in self.optimizers for group in each.param_groups for p in group["params"]}
        return sum(id(p) in held for p in self.model.parameters())

    def momentum(self, updater: Updater | None) -> float:
        """Return the largest momentum of the optimizers, or that of the updater block."""
        if not self.optimizers:
            return 0.0 if updater is None else updater.momentum
        return max(momentum_of(type(each).__name__, each.param_groups) for each in self.optimizers)

    def optimizer_names(self, updater: Updater | None) -> tuple[str, ...]:
        """Return the class names of the optimizers, or the type of the updater block."""
        if not self.optimizers:
            return () if updater is None else (updater.type.name,)
        return tuple(type(each).__name__ for each in self.optimizers)

    def state_factor(self) -> float:
        """Return the elements of optimizer state per element of a parameter, on average."""
        sizes = [sum(p.numel() for g in each.param_groups for p in g["params"]) for each in self.optimizers]
        factors = [state_factor(each) for each in self.optimizers]
        return float(sum(size * factor for size, factor in zip(sizes, factors, strict=True)) / max(1, sum(sizes)))


def look(program: str, args: Sequence[str]) -> PreparedArguments:
    """Run a script until it uses what it prepares; return `tt.prepare`'s arguments.

    Output of the script goes to stderr.

    Raises:
        ConfigError: the script ends without calling `tt.prepare`.
    """
    plan_only()
    module = module_of(program)
    sys.argv[:] = [program if module is None else "-m", *args]
    sys.path[0:1] = [os.getcwd() if module else str(Path(program).resolve().parent)]
    # The script's own prints must not mix with the output of the command.
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if module is None:
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        # Prepared, and used nothing of it.
        process.use()
    except PlanRun as seen:
        return PreparedArguments(seen.request.model, seen.request.optimizers, seen.request.loader)
    except AttributeError as error:
        name_nearest(error)
        raise
    except SystemExit as leaving:
        raise ConfigError("program", program, f"left with code {leaving.code} before tt.prepare") from leaving
    raise ConfigError("program", program, "ended without calling topotrain.prepare: there is no model to plan for")


def state_factor(optimizer: torch.optim.Optimizer | None) -> float:
    """Return the elements of optimizer state per element of a parameter."""
    # Found by one step of the same class on a small matrix, so that any optimizer can be planned for: Muon takes
    # nothing but matrices.
    if optimizer is None or isinstance(optimizer, torch.optim.SparseAdam):
        return 0.0
    probe = torch.nn.Parameter(torch.zeros(8, 8))
    torch.autograd.backward(probe, torch.zeros(8, 8))  # plain zeros as its gradient
    taken = inspect.signature(type(optimizer)).parameters  # a class may set group entries that it does not take
    copy = type(optimizer)(
        [probe], **{k: v for k, v in optimizer.param_groups[0].items() if k in taken and k != "params"}
    )
    copy.step()
    # State of another size, such as a step counter, does not grow with the parameter.
    held = [t for entry in copy.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() for t in held if t.numel() == probe.numel()) / probe.numel()
