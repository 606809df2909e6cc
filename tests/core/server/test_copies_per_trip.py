"""Copies per trip: how often a gradient or a value is copied by us between the script's `.grad` and its parameter.

Over TCP the kernel copies once on each side besides; bodies are received right into their final place.
"""

import pytest
import torch
from in_process_job import building, cross_entropy, job_of, mlp, run_hosted, run_local, sgd, vectors

from topotrain.comm.transport.inprocess import InProcessTransport
from topotrain.config.job import Grads, TransportChoice
from topotrain.core import protocol as m

ELEMENTS = sum(p.numel() for p in mlp().parameters())
STEPS = 4


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of every tensor that any thread copies with `copy_`."""
    counts: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        counts.append(self.numel())
        return copy(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return counts


@pytest.mark.parametrize("transport", [TransportChoice.kShm, TransportChoice.kTcp])
def test_a_worker_alone_copies_each_gradient_once_and_no_value(transport, copied, tmp_path):
    """The one copy is autograd's price: its tensor is private memory.

    In the first two steps the server also tries kernels (`kernel_rounds`) and joins the optimizer's state once.
    """
    seen = []

    def script(trainer):
        for batch in vectors(STEPS):
            before = sum(copied)
            trainer.backward(trainer.losses(cross_entropy, *batch))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            seen.append(sum(copied) - before)

    run_hosted(job_of("one", transport=transport, server_worker_separate=True), building(mlp, sgd), script, tmp_path)
    assert seen[2:] == [ELEMENTS] * (STEPS - 2)


@pytest.mark.parametrize("grads", list(Grads))
def test_on_shared_memory_only_gradients_are_ever_shown(grads, monkeypatch):
    """After the start no mean and no value travels: the workers have them when they are told so."""
    bodies: list[type[m.Message]] = []
    send = InProcessTransport.send

    def noted(self, me, to, message, wait=False):
        if message.body is not None:
            bodies.append(type(message))
        send(self, me, to, message, wait)

    monkeypatch.setattr(InProcessTransport, "send", noted)

    def script(trainer):
        for batch in vectors(STEPS):
            trainer.backward(trainer.losses(cross_entropy, *batch))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    result = run_local(job_of("sandblaster", grads=grads), building(mlp, sgd), script, shared=True)
    assert bodies.count(m.ReducedGradient) == 0
    buckets = sum(len(server.state.known.buckets) for server in result.servers)
    assert bodies.count(m.Push) == 3 * STEPS * buckets
    assert bodies.count(m.Values) == buckets, "only the final values, which worker (0,0) asks for"
    first, *others = result.workers
    for worker in others:
        for index in range(len(first.worker.parts.tensors)):
            mine, theirs = (each.worker.buffers.view("params", index) for each in (first, worker))
            assert mine.data_ptr() == theirs.data_ptr()
