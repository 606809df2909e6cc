"""`tt.assign`: a block in which a script changes parameters."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.extensions.assignment.assignment_scope import AssignmentScope
from topotrain.extensions.assignment.script_place import ScriptPlace
from topotrain.training import context as process
from topotrain.training.context import Context, PrepareExtension
from topotrain.training.worker import Worker


class AssignmentExtension(PrepareExtension):
    """Makes the scope of a worker."""

    def __init__(self) -> None:
        self.scope: AssignmentScope | None = None
        """Once the script has prepared."""

    def attach(self, here: Context, worker: Worker) -> None:
        place = ScriptPlace(here, worker)
        self.scope = AssignmentScope(worker, place, here.place.topology.worker_groups > 1)
        worker.attach(self.scope)
        # The name cannot collide with those of `tt.keep`, which are Python names without a space.
        here.kept["tt.assign places"] = place

    def stop_pushing(self, here: Context) -> None:
        # From here on the parameters are the script's alone.
        self.scope = None


@contextmanager
def assign(*what: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> Iterator[None]:
    """Let the block change parameters: clamp them, load them, initialise them anew.

        with tt.assign(critic):
            for p in critic.parameters():
                p.data.clamp_(-0.01, 0.01)

    At the end of the block the servers and all workers of the group have the values of the group's first worker, as
    after a broadcast from rank 0. All workers of a group enter the block between the same two steps. In an ordinary
    process the block is an ordinary one.

    Args:
        what: modules or parameters of the prepared model. Nothing: all of its parameters.

    Raises:
        ConfigError: an argument is none of these, or the job cannot do this.
        RuntimeError: a step is under way, or another parameter was changed.
        JobError: the workers of the group are at different places of the script.
    """
    parameters = _parameters(what)
    here = process.current()
    scope = None if here is None else _scope(here)
    if scope is None:
        yield
        return
    if process.is_outside_step():
        raise RuntimeError("tt.assign in an evaluation: the values are those of the training, which goes on meanwhile")
    if here is not None and here.tables is not None:
        accepted = "is not there in a job with tables or sparse weights: their rows travel by themselves"
        raise ConfigError("tt.assign", None, accepted)
    with scope.change(parameters):
        yield


def _scope(here: Context) -> AssignmentScope | None:
    return next((each.scope for each in here.extensions if isinstance(each, AssignmentExtension)), None)


def _parameters(what: Sequence[object]) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for one in what:
        if isinstance(one, nn.Module):
            inside: Iterable[object] = one.parameters()
        elif isinstance(one, torch.Tensor) or not isinstance(one, Iterable):
            inside = (one,)
        else:
            inside = one
        for parameter in inside:
            if not isinstance(parameter, nn.Parameter):
                accepted = "must be modules, parameters, or lists of parameters"
                raise ConfigError("tt.assign", type(parameter).__name__, accepted)
            found.append(parameter)
    return found
