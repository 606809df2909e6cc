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

from topotrain.torchurl import announce as _announce

if TYPE_CHECKING:
    from topotrain.front import caffe2 as data_parallel
    from topotrain.front import kvstore
    from topotrain.front import tf as train
    from topotrain.front.api import (
        clip_grad_norm_,
        device,
        epochs,
        is_main,
        keep,
        local,
        place,
        prepare,
        rank,
        report,
        weight,
    )
    from topotrain.front.embedding import Embedding
    from topotrain.front.joining import leave
    from topotrain.front.paddle import init
    from topotrain.front.session import Session
    from topotrain.front.state import state_dict
    from topotrain.front.trainer import Trainer
    from topotrain.job import Cluster, ConfigError, Job, Updater

__version__ = "0.1.0"

_announce()  # so that torch knows redis:// as an init_method, without importing torch here

_HOMES = {
    **dict.fromkeys(("prepare", "epochs", "report", "rank", "is_main", "local", "weight"), "topotrain.front.api"),
    **dict.fromkeys(("clip_grad_norm_", "device", "keep", "place"), "topotrain.front.api"),
    **dict.fromkeys(("Job", "Cluster", "Updater", "ConfigError"), "topotrain.job"),
    "Embedding": "topotrain.front.embedding",
    "init": "topotrain.front.paddle",
    "leave": "topotrain.front.joining",
    "Session": "topotrain.front.session",
    "Trainer": "topotrain.front.trainer",
    "state_dict": "topotrain.front.state",
}
_MODULES = {
    "data_parallel": "topotrain.front.caffe2",
    "kvstore": "topotrain.front.kvstore",
    "train": "topotrain.front.tf",
}

__all__ = [
    "Cluster",
    "ConfigError",
    "Embedding",
    "Job",
    "Session",
    "Trainer",
    "Updater",
    "clip_grad_norm_",
    "data_parallel",
    "device",
    "epochs",
    "init",
    "is_main",
    "keep",
    "kvstore",
    "leave",
    "local",
    "place",
    "prepare",
    "rank",
    "report",
    "state_dict",
    "train",
    "weight",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'topotrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
