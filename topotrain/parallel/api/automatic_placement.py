"""The one way to automatic placement (`placement: kAuto`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from topotrain.config.job import Schedule
from topotrain.parallel.api.example_inputs import inputs_of
from topotrain.parallel.api.split_costs import PlacementRequest, call_of
from topotrain.parallel.estimate.memory_check import MemoryLimits, memory_limits
from topotrain.parallel.placement.assign_modules import Assignment


@dataclass(frozen=True, slots=True)
class AutomaticPlacement:
    """A placement that was chosen.

    Attributes:
        found: all assignments.
        text: the choice and its reasons, for the user.
        blocks: the same placement as partition blocks of a job file.
    """

    found: Mapping[str, Assignment]
    text: str
    blocks: str


def place_modules(asked: PlacementRequest, loader: Any) -> AutomaticPlacement:
    """Place the modules that neither the job file nor the script has placed.

    All workers of a group get the same result.

    Args:
        asked: the model. Its call is taken from the loader.
        loader: the loader of the script, before it is divided among the workers.

    Raises:
        ConfigError: shapes are not known, or no placement fits.
    """
    given = inputs_of(asked.model, loader, asked.job.schedule is Schedule.k1F1B)
    return place_call(replace(asked, call=call_of(asked.job, asked.model, given)), memory_limits())


def place_call(
    asked: PlacementRequest, here: MemoryLimits, real: tuple[tuple[Any, ...], dict[str, Any]] | None = None
) -> AutomaticPlacement:
    """Place modules for a call that is known.

    Args:
        here: the memory limits of this host and its processes.
        real: arguments to measure the modules with; without them times are estimated.

    Raises:
        ConfigError: no placement fits.
    """
    # Nothing else needs `auto_placement`.
    from topotrain.parallel.auto_placement.auto_modules import measure
    from topotrain.parallel.auto_placement.placement_search import placed

    found, chosen = placed(asked, here, None if real is None else measure(asked.model, *real))
    return AutomaticPlacement(found, chosen.explain(), chosen.conf())
