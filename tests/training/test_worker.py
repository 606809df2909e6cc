"""What a worker's loop tells and refuses, and what asynchronous groups, pushes and fetches at intervals add up to."""

import pytest
import torch
from in_process_job import (
    Cnn,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    plain,
    run_local,
    usual_loop,
    vectors,
)
from torch import nn
from training_loops import clip_norm

from topotrain.config.job import ConfigError, Grads
from topotrain.core.client.client import JobError, PeerLost


def test_hidden_gradients_are_clipped_by_the_servers():
    norms = {}

    def hidden(t):
        norms[t.me.index] = []
        for batch in vectors(8):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.worker.clip(0.05, 2.0)
            t.optimizer.step()
            norms[t.me.index].append(t.worker.tally.last_norm)

    result = run_local(job_of(grads=Grads.kHidden), building(), hidden)
    assert result.distance(plain(building(), clip_norm)) < 1e-5
    assert norms[0] == norms[1] == norms[2] and min(norms[0]) > 0.05


# --- disagreements -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("early", "grads"), [(0, Grads.kHidden), (2, Grads.kVisible)])
def test_a_worker_that_ends_early_is_an_error_and_no_hang(early, grads):
    with pytest.raises(JobError, match=f"worker {early} ended its script after 2 steps"):
        run_local(job_of(grads=grads), building(), lambda t: usual_loop(vectors(2 if t.me.index == early else 4))(t))


def test_a_lost_server_and_an_unknown_optimizer_are_told():
    def script(t):
        t.exchange.lost(t.exchange.channel.servers[0], "closed by the peer")
        usual_loop(vectors(1))(t)

    with pytest.raises(PeerLost, match=r"worker 0/0 lost server 0/0: closed by the peer"):
        run_local(job_of("one"), building(), script)
    with pytest.raises(ConfigError, match="LBFGS"):
        run_local(job_of(), building(mlp, lambda m: torch.optim.LBFGS(m.parameters())), usual_loop(vectors(1)))


# --- asynchronous groups: gradients of one are added, so that the end value counts every update -------------------


def counter():
    model = nn.Linear(70, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def count(t, steps, batch=1):
    for _ in range(steps):
        t.optimizer.zero_grad()
        t.backward(t.losses(lambda m, x: -m(x).sum(), torch.ones(batch, 70)))
        t.optimizer.step()


def counted(t):
    return float(t.model.weight.detach()[0, 0])


def ends_at(result, number):
    return torch.equal(result.values["weight"], torch.full((1, 70), float(number)))


@pytest.mark.parametrize(("push", "fetch", "shared"), [(3, 1, False), (1, 3, True), (2, 4, False), (3, 2, True)])
def test_n_push_and_n_fetch_apply_every_gradient_once(push, fetch, shared):
    """Constant gradients: plain SGD from the servers gives what the local steps gave."""
    for groups in (1, 2):
        job = job_of("one", n_push=push, n_fetch=fetch, nworker_groups=groups)
        assert ends_at(run_local(job, counter, lambda t: count(t, 7), shared), 7 * groups)


@pytest.mark.parametrize(("servers", "shared"), [(1, True), (2, False)])
def test_warmup_trains_group_0_first_and_then_all(servers, shared):
    seen = []

    def script(t):
        if t.me.group == 1:
            seen.append(counted(t))
        count(t, 6)

    job = job_of("one", nworker_groups=2, nserver_groups=servers, warmup_steps=4, max_staleness=3)
    assert ends_at(run_local(job, counter, script, shared), 12) and seen.pop() >= 4.0
    longer = job_of("one", nworker_groups=2, nserver_groups=servers, warmup_steps=100)
    assert ends_at(run_local(longer, counter, lambda t: count(t, 3), shared), 6)


def test_groups_of_their_own_servers_train_their_own_model_and_group_0_is_saved():
    """nserver_groups = 0 with several groups: parameters and buffers are group 0's, not an average."""
    batches = images(6)
    job = job_of("serverless", nworker_groups=2)
    alone = run_local(job_of("serverless"), building(Cnn), usual_loop(batches[:3]))
    assert run_local(job, building(Cnn), lambda t: usual_loop(batches[: 3 + t.me.group])(t)).same_bits(alone)


# --- what is counted ---------------------------------------------------------------------------------------------


def test_an_accumulation_over_two_loaders_is_one_step():
    """Batches of two streams taken in turn: each stream goes on where it was."""

    def script(t):
        for seq in range(0, 4, 2):
            t.optimizer.zero_grad()
            for number in (seq, seq + 1):
                for stream in (7, 8):
                    t.worker.drawn(stream, number, 1.0, 1)
                    t.backward([cross_entropy(t.model, *vectors(1)[0])])
            t.optimizer.step()

    assert run_local(job_of("one"), building(), script).workers[0].worker.tally.samples == 8
