"""topotrain: one cluster block decides how a PyTorch script is trained.

    import topotrain as tt
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for epoch in tt.epochs(20):
        ...  # the usual loop
    tt.report(accuracy=accuracy)

Nothing heavy is imported until it is used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from topotrain.comm.torch_store.init_method import announce as _announce
from topotrain.config.combinations import contribute as _contribute

if TYPE_CHECKING:
    from topotrain.compat.caffe2 import parallelize as data_parallel
    from topotrain.compat.mxnet import kvstore
    from topotrain.compat.paddle.init import init
    from topotrain.compat.tensorflow import train_api as train
    from topotrain.compat.tensorflow.session.session_client import Session
    from topotrain.config.job import Cluster, ConfigError, Job, Updater
    from topotrain.extensions.assignment.parameter_assignment import assign
    from topotrain.extensions.tables.frontend.embedding import Embedding
    from topotrain.extensions.worker_values.worker_values import broadcast, gather, global_step, max, mean, min, sum
    from topotrain.launch.by_hand.manual_worker import leave
    from topotrain.parallel.api.device_placement import device, place
    from topotrain.tools.exporters.curve_exports import Tracker
    from topotrain.tools.notebook import notebook_launch
    from topotrain.training.api import (
        as_is,
        clip_grad_norm_,
        enumerate,
        epochs,
        is_main,
        keep,
        local,
        log,
        prepare,
        progress,
        rank,
        report,
        split,
        weight,
    )
    from topotrain.training.model_state import save, state_dict
    from topotrain.training.trainer.trainer import Trainer

__version__ = "0.1.0"

# So that torch knows redis:// as an init_method. It does not import torch.
_announce()

# Modules with the combinations of job fields that a package refuses, in the order in which they are checked. The outer
# optimizer comes first: it refuses most other fields, whatever else these need.
_contribute(
    "topotrain.extensions.outer_optimizer.outer_rules",
    "topotrain.extensions.collectives.collective_rules",
    "topotrain.extensions.compression.compression_rules",
    "topotrain.extensions.backup_workers.backup_rules",
    "topotrain.extensions.group_averaging.averaging_rules",
    "topotrain.parallel.split_rules",
    "topotrain.tools.advice.auto_rules",
    "topotrain.extensions.replication.replication_rules",
)

# Imported at the first use: the command line must start without torch, which takes seconds to import.
_HOMES = {
    **dict.fromkeys(("prepare", "epochs", "report", "rank", "is_main", "local", "weight"), "topotrain.training.api"),
    **dict.fromkeys(
        ("clip_grad_norm_", "enumerate", "keep", "log", "progress", "as_is", "split"), "topotrain.training.api"
    ),
    **dict.fromkeys(
        ("broadcast", "gather", "global_step", "max", "mean", "min", "sum"),
        "topotrain.extensions.worker_values.worker_values",
    ),
    **dict.fromkeys(("device", "place"), "topotrain.parallel.api.device_placement"),
    **dict.fromkeys(("Job", "Cluster", "Updater", "ConfigError"), "topotrain.config.job"),
    "Embedding": "topotrain.extensions.tables.frontend.embedding",
    "assign": "topotrain.extensions.assignment.parameter_assignment",
    "init": "topotrain.compat.paddle.init",
    "leave": "topotrain.launch.by_hand.manual_worker",
    "notebook_launch": "topotrain.tools.notebook",
    "Session": "topotrain.compat.tensorflow.session.session_client",
    "Trainer": "topotrain.training.trainer.trainer",
    "Tracker": "topotrain.tools.exporters.curve_exports",
    **dict.fromkeys(("save", "state_dict"), "topotrain.training.model_state"),
}
_MODULES = {
    "data_parallel": "topotrain.compat.caffe2.parallelize",
    "kvstore": "topotrain.compat.mxnet.kvstore",
    "train": "topotrain.compat.tensorflow.train_api",
}

__all__ = [
    "Cluster",
    "ConfigError",
    "Embedding",
    "Job",
    "Session",
    "Tracker",
    "Trainer",
    "Updater",
    "as_is",
    "assign",
    "broadcast",
    "clip_grad_norm_",
    "data_parallel",
    "device",
    "enumerate",
    "epochs",
    "gather",
    "global_step",
    "init",
    "is_main",
    "keep",
    "kvstore",
    "leave",
    "local",
    "log",
    "max",
    "mean",
    "min",
    "notebook_launch",
    "place",
    "prepare",
    "progress",
    "rank",
    "report",
    "save",
    "split",
    "state_dict",
    "sum",
    "train",
    "weight",
]


if not TYPE_CHECKING:  # a type checker knows the names from the imports above, and finds a misspelled one

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name not in _HOMES:
            raise AttributeError(f"module 'topotrain' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
