"""The device of a worker: from the job's `gpu` field, or all GPUs in turn."""

from collections.abc import Sequence

import torch

from topotrain.config.job import ConfigError
from topotrain.training.context import Context


def device_of(here: Context | None, count: int) -> torch.device:
    """Return the device of this process, on a machine with `count` GPUs; see `chosen`."""
    if here is None:
        return torch.device("cuda", 0) if count else torch.device("cpu")
    if not here.gpus:
        return torch.device("cpu")
    topology = here.place.topology
    number = topology.units[topology.unit_of(here.me)].workers.index(here.me)
    return chosen(here.place.job.gpu, number, here.number, count)


def chosen(gpu: Sequence[int], in_unit: int, in_job: int, count: int) -> torch.device:
    """Return the device of a worker.

    With a list `gpu`, worker number `in_unit` of its unit (from 0) takes gpu[in_unit], cyclically. Without a list,
    worker number `in_job` of the job takes the `count` GPUs of the machine cyclically, or the CPU if there is none.

    Raises:
        ConfigError: the machine does not have the GPU that the job names.
    """
    # Counted over the job, because the workers of several units may share the machine.
    if not gpu:
        return torch.device("cuda", in_job % count) if count else torch.device("cpu")
    wanted = gpu[in_unit % len(gpu)]
    if wanted >= count:
        has = f"0 to {count - 1}" if count else "none, so leave the field out"
        raise ConfigError("gpu", wanted, f"must name a GPU that torch sees on this machine: {has}")
    return torch.device("cuda", wanted)
