"""Caffe2's interface as `tt.data_parallel`: Parallelize, on Gloo.

A process is one shard with one device: worker `shard_id` of the AllReduce layout, with the server of the same number
beside it (`nets`, `shard_rendezvous`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topotrain.compat.caffe2.nets import ForwardBuilder, InputBuilder, Model, Net, OptimizerBuilder
from topotrain.compat.caffe2.shard_rendezvous import FileStoreHandler, RedisStoreHandler, ShardRendezvous
from topotrain.config.job import ConfigError, Engine

__all__ = [
    "FetchBlob",
    "FileStoreHandler",
    "FinalizeAfterCheckpoint",
    "GetLearningRateBlobNames",
    "Model",
    "Net",
    "Parallelize",
    "Parallelize_CPU",
    "Parallelize_GPU",
    "RedisStoreHandler",
    "RunInitNet",
    "RunNet",
]

_UNUSED: Mapping[str, Any] = {
    "param_update_builder_fun": None,
    "post_sync_builder_fun": None,
    "pre_grad_net_transformer_fun": None,
    "net_transformer_fun": None,
    "net_type": "dag",
    "broadcast_computed_params": True,
    "dynamic_memory_management": False,
    "blobs_to_keep": None,
    "use_nccl": False,
    "max_concurrent_distributed_ops": 16,
    "ideep": False,
    "num_threads_per_device": 4,
    "shared_model": False,
    "combine_spatial_bn": False,
}
"""Caffe2's arguments that control how its nets run, with their default values."""
_ANY = ("shared_model", "combine_spatial_bn")

PATIENCE_S = 300.0
"""The same as Caffe2's barrier before training."""


def Parallelize(
    model: nn.Module | Model,
    input_builder_fun: InputBuilder,
    forward_pass_builder_fun: ForwardBuilder,
    optimizer_builder_fun: OptimizerBuilder | None = None,
    devices: Sequence[int] = (0,),
    rendezvous: Mapping[str, Any] | None = None,
    *,
    optimize_gradient_memory: bool = False,
    cpu_device: bool = False,
    barrier_net_timeout_sec: float = PATIENCE_S,
    workspace: str | Path = "workspace/parallelize",
    **others: Any,
) -> "Net":
    """Make a net of a model, its input, its loss and its optimizer.

    This is `caffe2.python.data_parallel_model.Parallelize`. It does not wait: shards meet in `RunInitNet`, or when the
    net runs for the first time. Then all of them have the parameters of shard 0. Without a rendezvous it is an ordinary
    training loop in this process. Under `topotrain run`, which has placed this process already, the rendezvous is not
    used.

    Args:
        model: a module, or a `Model` around one.
        input_builder_fun: model -> batches: a DataLoader or anything else that can be iterated again and again, of this
            shard's data. A function that returns None is called before every iteration and sets `model.batch`.
        forward_pass_builder_fun: model, loss_scale -> list of losses. Each loss is to be multiplied by `loss_scale`,
            which is 1 / number of shards.
        optimizer_builder_fun: model -> a `torch.optim` optimizer. None: the net only computes losses, in this process.
        devices: the number of this process's GPU, as a list of one: several GPUs are several shards. [0] for a CPU.
        rendezvous: dict(kv_handler=…, shard_id=…, num_shards=…, engine="GLOO", exit_nets=None), and `interface`, the
            network interface to use ("lo"). engine "NCCL" sums on GPUs. exit_nets: functions to call at the end.
        optimize_gradient_memory: has no effect: PyTorch frees the gradients between layers by itself.
        cpu_device: compute on the CPU.
        barrier_net_timeout_sec: how long shards wait for each other before training.
        workspace: where shard 0 writes the result.
        others: Caffe2's other arguments, with their default values. `shared_model` and `combine_spatial_bn` are about
            several devices of one process, and may have any.

    Raises:
        ConfigError: an argument is invalid.
    """
    # Named here instead of a TypeError: scripts of Caffe2 pass arguments that have no meaning any more.
    for name, value in others.items():
        if name not in _UNUSED:
            why = "is not an argument of Parallelize here; docs/data-parallel.md lists the accepted ones"
            raise ConfigError(name, value, why)
        if name not in _ANY and value != _UNUSED[name]:
            why = f"must be {_UNUSED[name]!r}, or not given: it has no meaning here"
            raise ConfigError(name, getattr(value, "__name__", value), why)
    for name, builder in (
        ("input_builder_fun", input_builder_fun),
        ("forward_pass_builder_fun", forward_pass_builder_fun),
    ):
        if not callable(builder):
            raise ConfigError(name, builder, "must be a function")
    if optimizer_builder_fun is not None and not callable(optimizer_builder_fun):
        raise ConfigError("optimizer_builder_fun", optimizer_builder_fun, "must be a function or None")
    meets = ShardRendezvous(rendezvous) if rendezvous is not None else None
    # Without an optimizer no gradients are exchanged, so there is nothing to meet for.
    if meets is not None and optimizer_builder_fun is None:
        raise ConfigError("rendezvous", None, "a net without optimizer_builder_fun runs in this process alone")
    if meets is not None and meets.engine is Engine.kNccl and cpu_device:
        raise ConfigError("rendezvous['engine']", "NCCL", "needs cpu_device=False")
    patience = barrier_net_timeout_sec
    if not isinstance(patience, int | float) or not patience > 0:
        raise ConfigError("barrier_net_timeout_sec", patience, "must be a number of seconds above 0")
    if not isinstance(workspace, str | Path):
        raise ConfigError("workspace", workspace, "must be the path of a directory")
    helper = model if isinstance(model, Model) else Model(model)
    # Before the builder functions, which may put data or other modules on the same device.
    helper.set_device(_device(devices, cpu_device))
    net = Net(helper, meets, float(patience), str(workspace))
    net.build(input_builder_fun, forward_pass_builder_fun, optimizer_builder_fun)
    return net


def Parallelize_CPU(*args: Any, **kwargs: Any) -> "Net":
    """`Parallelize` with `cpu_device=True`."""
    return Parallelize(*args, **{**kwargs, "cpu_device": True})


def Parallelize_GPU(*args: Any, **kwargs: Any) -> "Net":
    """`Parallelize` with `cpu_device=False`."""
    return Parallelize(*args, **{**kwargs, "cpu_device": False})


def _device(devices: Sequence[int], cpu: bool) -> torch.device:
    numbers = list(devices) if isinstance(devices, list | tuple | range) else None
    if not numbers or any(type(number) is not int or number < 0 for number in numbers):
        raise ConfigError("devices", devices, "must be a list with the number of one device, such as [0]")
    # Caffe2 ran one process over several GPUs. Here each GPU is a shard with a process of its own.
    if len(numbers) > 1:
        why = "must be one device: start a process for each, with a shard_id of its own, and count all in num_shards"
        raise ConfigError("devices", numbers, why)
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("cpu_device", cpu, "must be True without an NVIDIA GPU, or without a build of torch for it")
    count = torch.cuda.device_count()
    if numbers[0] >= count:
        raise ConfigError("devices", numbers, f"must be from 0 to {count - 1}: this machine has {count}")
    return torch.device("cuda", numbers[0])


# --- Caffe2's functions around a net -----------------------------------------------------------------------------


def _net(function: str, net: object) -> Net:
    if not isinstance(net, Net):
        raise ConfigError(f"{function} net", type(net).__name__, "must be the net that Parallelize returned")
    return net


def RunInitNet(net: Net) -> None:
    """Meet the other shards, see `Net.start`."""
    _net("RunInitNet", net).start()


def RunNet(net: Net, num_iterations: int = 1) -> float:
    """Run iterations, see `Net.run`."""
    return _net("RunNet", net).run(num_iterations)


def FinalizeAfterCheckpoint(net: Net) -> None:
    """Give all shards the parameters of shard 0, after it loaded a checkpoint.

    It may follow `RunInitNet`. Raises ConfigError if the net has run already, and the errors of `Net.start`.
    """
    if _net("FinalizeAfterCheckpoint", net).has_run and net.optimizer is not None:
        raise ConfigError(
            "FinalizeAfterCheckpoint", None, "must come before the first RunNet; later there is tt.assign"
        )
    # Shards get the values that shard 0 has when the net runs for the first time.
    net.start()


def GetLearningRateBlobNames(net: Net) -> list[str]:
    """Return the names of the learning rates for `FetchBlob`, one per parameter group."""
    optimizer = _net("GetLearningRateBlobNames", net).optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    return [f"optimizer/{number}/lr" for number in range(len(groups))]


def FetchBlob(net: Net, name: str) -> Any:
    """Return a learning rate, or a value in `model.blobs`. Raises ConfigError."""
    rates = GetLearningRateBlobNames(_net("FetchBlob", net))
    if net.optimizer is not None and name in rates:
        return net.optimizer.param_groups[rates.index(name)]["lr"]
    if name not in net.model.blobs:
        names = [*net.model.blobs, *rates]
        raise ConfigError("FetchBlob", name, f"must be one of {', '.join(names) or '(there are none)'}")
    return net.model.blobs[name]
