"""Models that torch's own parallelism has wrapped or divided are refused before anything is connected."""

from collections.abc import Iterator

import pytest
import torch
from script_job import job as job  # a fixture
from script_job import loader, train, unfused
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import topotrain as tt
from topotrain.config.job import ConfigError


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5))


def refused(here: object, model: nn.Module) -> str:
    with pytest.raises(ConfigError) as error:
        tt.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert here.context.connections is None  # type: ignore[attr-defined]
    return str(error.value)


@pytest.mark.usefixtures("alone")
def test_models_of_torchs_own_parallelism_are_refused_by_name(job) -> None:  # type: ignore[no-untyped-def]
    here = job()
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(small()))
    assert "tt.prepare = 'DistributedDataParallel': must be the model itself" in refused(here, wrapped)
    divided = distribute_module(small(), init_device_mesh("cpu", (1,)))
    assert "model parameter 0.weight = 'a DTensor': must be an ordinary tensor" in refused(here, divided)
    several = nn.DataParallel(small())
    several.device_ids = [0, 1]
    assert "tt.prepare = 'DataParallel': must be the model itself" in refused(here, several)


def test_data_parallel_on_one_device_is_the_model(job) -> None:  # type: ignore[no-untyped-def]
    here, model = job(), nn.DataParallel(small())
    train(*tt.prepare(model, unfused(model), loader()), 1)
    here.finish()


class Sharp(torch.optim.Optimizer):
    """As SAM is written: another optimizer inside makes the steps."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, 0.1)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.base.step()


def test_an_optimizer_with_another_one_inside_names_the_one_to_prepare(job) -> None:  # type: ignore[no-untyped-def]
    here, model = job(), small()
    sharp = Sharp(model.parameters())
    with pytest.raises(ConfigError, match=r"makes the steps: give tt\.prepare that one, optimizer\.base"):
        tt.prepare(model, sharp, loader())
    model, sharp.base, batches = tt.prepare(model, sharp.base, loader())
    train(model, sharp, batches, 1)
    here.finish()
