"""The seam of `tt.prepare`: features take part as extensions of the context, and none of them is needed."""

import torch
from script_job import job as job  # a fixture
from script_job import loader, mlp, plain, train, unfused
from torch import nn

import topotrain as tt
from topotrain.training import finish_job
from topotrain.training.parameters.prepared_objects import RowModule


def trained() -> tuple[list[float], nn.Module]:
    torch.manual_seed(3)
    model = mlp()
    model, optimizer, batches = tt.prepare(model, unfused(model), loader())
    return train(model, optimizer, batches), model


def test_a_process_that_has_left_a_job_has_torch_s_own_functions(job):
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    here = job()
    trained()
    assert torch.autograd.backward is not before[0] and torch.amp.GradScaler.scale is not before[1]
    finish_job.finish(here.context)
    finish_job.close(here.context, finished=True)
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before


def test_without_any_extension_a_job_has_the_same_bits(job):
    here = job()
    here.context.extensions = ()
    losses, model = trained()
    here.finish()
    values, plain_losses, _ = plain(unfused)
    assert losses == plain_losses
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())


class Rows(RowModule):
    """A module that has noted which optimizer it follows."""

    def __init__(self) -> None:
        super().__init__()
        self.followed: list[torch.optim.Optimizer] = []

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        self.followed.append(optimizer)


def test_in_an_ordinary_process_modules_with_rows_follow_the_optimizer(monkeypatch):
    monkeypatch.setattr("topotrain.training.context._prepared", False)
    rows = Rows()
    model = nn.Sequential(nn.Linear(2, 2), rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tt.prepare(model, optimizer)
    assert rows.followed == [optimizer]
    tt.leave()
