"""topotrain: one cluster block decides how a PyTorch script is trained.

    import topotrain as tt
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for epoch in tt.epochs(20):
        ...  # the usual loop
    tt.report(accuracy=accuracy)

Nothing heavy is imported until it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topotrain.front.api import clip_grad_norm_, device, epochs, is_main, local, prepare, rank, report, weight
    from topotrain.job import Cluster, ConfigError, Job, Updater

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("prepare", "epochs", "report", "rank", "is_main", "local", "weight"), "topotrain.front.api"),
    **dict.fromkeys(("clip_grad_norm_", "device"), "topotrain.front.api"),
    **dict.fromkeys(("Job", "Cluster", "Updater", "ConfigError"), "topotrain.job"),
}

__all__ = [
    "Cluster",
    "ConfigError",
    "Job",
    "Updater",
    "clip_grad_norm_",
    "device",
    "epochs",
    "is_main",
    "local",
    "prepare",
    "rank",
    "report",
    "weight",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'topotrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
