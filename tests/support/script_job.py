"""A script with `tt.prepare` as a job of one worker in this process, and the same script without it."""

import threading
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from in_process_job import cross_entropy, mlp, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from tests.support.in_process_job import FailureObserver
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.launch.runtime.prepare_composition import prepare_extensions
from topotrain.launch.runtime.process_host import HostOptions, RouterConfig, serve
from topotrain.launch.runtime.worker_connections import WorkerConnector
from topotrain.training import context, finish_job


def loader(**more):
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 12, generator=rng), torch.randint(5, (40,), generator=rng))
    return DataLoader(data, **{"batch_size": 8, "shuffle": True, **more})


def train(model, optimizer, batches, epochs=2):
    """The usual loop, dropout and all."""
    losses = []
    for _ in tt.epochs(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model, nn.functional.dropout(x, 0.2), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def unfused(model):
    """What plain torch takes on the CPU; a job would choose fused kernels, whose last bits are others."""
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=False)


def state(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def plain(make=sgd):
    torch.manual_seed(3)
    model = mlp()
    losses = train(model, make(model), loader())
    return state(model), losses, torch.get_rng_state()


class Here:
    """This process as worker 0/0 of a job; its server is a thread."""

    def __init__(self, job, folder):
        self.told = []
        (folder / "store").mkdir(mode=0o700)
        store, sockets = open_store((folder / "store").as_uri()), Path(mkdtemp(prefix="tt-"))
        places = [
            RouterConfig(job, layout(job.cluster), Identity(job.name, bytes(32), n, 0, job.digest()), store, sockets)
            for n in (1, 2)
        ]
        self.troubles = []
        self.server = threading.Thread(target=self.serve, args=(places[0],), daemon=True)
        self.server.start()
        self.context = context.Context(
            places[1], Address(Role.WORKER, 0, 0), folder, self, WorkerConnector(), prepare_extensions()
        )
        context.enter(self.context)

    def emit(self, event):
        self.told.append(event)

    def serve(self, place):
        observer = FailureObserver(lambda: self.troubles.append("trouble"))
        serve(place, [Address(Role.SERVER, 0, 0)], HostOptions(observer))

    def finish(self):
        finish_job.finish(self.context)
        self.close()
        self.server.join(30)
        assert not self.server.is_alive() and not self.troubles

    def close(self):
        if self.context.connections is not None:
            self.context.connections.close()

    def heard(self, kind):
        return [event for event in self.told if isinstance(event, kind)]


def jobs(folder, monkeypatch):
    """The body of a fixture: job(**fields of Job) enters one. What a job does to torch is undone."""
    for name in ("_current", "_unused"):  # `enter` sets both
        monkeypatch.setattr(context, name, None)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)
    made = []

    def enter(**fields):
        made.append(Here(Job(**{"cluster": Cluster(server_worker_separate=True), **fields}), folder))
        return made[-1]

    yield enter
    for here in made:
        here.close()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """See `jobs`."""
    yield from jobs(tmp_path, monkeypatch)
