"""Synchronous jobs compute what the plain script computes, and what the one-process reference does bit for bit."""

import pytest
import torch
from in_process_job import (
    Cnn,
    Transformer,
    adagrad,
    adam,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    plain,
    reference,
    run_local,
    sgd,
    tokens,
    usual_loop,
    vectors,
)
from memory_modes import BOTH, in_pairs, memory  # noqa: F401
from torch import nn
from training_loops import (
    ALWAYS,
    clip_norm,
    clip_value,
    edit,
    edit_between_backwards,
)

from topotrain.config.job import Apply, ConfigError, Grads, Pull, Reduce
from topotrain.core.client.client import JobError, PeerLost

MODELS = {"mlp": (mlp, vectors), "cnn": (Cnn, images), "transformer": (Transformer, tokens)}
OPTIMIZERS = {"sgd": sgd, "adam": adam, "adagrad": adagrad}
LAYOUT_OF = {"sgd": "sandblaster", "adam": "allreduce", "adagrad": "two by two"}
STEPS = 20


def check(job, build, script, near: float | None = 1e-5):
    """The job equals the reference bit for bit, and the plain script nearly."""
    result = run_local(job, build, script)
    assert result.same_bits(reference(job, build, script))
    if near is not None:
        assert result.distance(plain(build, script)) < near
    return result


@in_pairs("model, optimizer", MODELS, OPTIMIZERS)
def test_a_synchronous_job_equals_the_reference_and_the_plain_script(model, optimizer):
    make, batches = MODELS[model]
    script = usual_loop(batches(STEPS))
    # Batch statistics are a share's, so a CNN with BatchNorm computes something else than the plain script.
    near = None if model == "cnn" else 1e-5
    check(job_of(LAYOUT_OF[optimizer]), building(make, OPTIMIZERS[optimizer]), script, near)


@in_pairs("model, layout", MODELS, ["in-memory", "serverless", "one"])
def test_other_layouts_and_hidden_gradients_have_the_same_bits_as_their_reference(model, layout):
    make, batches = MODELS[model]
    grads = Grads.kVisible if layout == "serverless" else Grads.kHidden
    check(job_of(layout, grads=grads), building(make, adam), usual_loop(batches(15)), None)


def test_a_job_has_the_same_bits_twice_and_hidden_or_not():
    script, build = usual_loop(tokens(10)), building(Transformer, adam)
    first = run_local(job_of(), build, script)
    assert first.same_bits(run_local(job_of(), build, script))
    assert first.same_bits(run_local(job_of(grads=Grads.kHidden), build, script))


@BOTH
def test_batches_that_do_not_divide_are_weighted_by_samples():
    batches = [batch for size in (7, 2, 11, 1, 3) for batch in vectors(2, size)]
    for grads in Grads:
        check(job_of(grads=grads), building(), usual_loop(batches))


def test_token_means_are_global_token_means():
    """Each share divides by its own count of tokens; `weight` makes the group's mean that of all tokens."""

    def masked(model, x, y):
        losses = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none")
        mask = (y.flatten() < 6).float()
        return (losses * mask).sum() / mask.sum()

    def script(t):
        for batch in tokens(10):
            t.optimizer.zero_grad()
            t.backward(t.losses(masked, *batch, weight=lambda x, y: float((y < 6).sum())))
            t.optimizer.step()

    check(job_of(), building(Transformer), script)


@BOTH
def test_reduce_sum_adds():
    def summed(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="sum")

    check(job_of(reduce=Reduce.kSum), building(), usual_loop(vectors(10), summed))


@BOTH
def test_defect_9_tied_weights_are_summed():
    """The gradient of a tied weight is the sum over its uses, in every worker and in the group's mean."""
    seen = []

    def script(t):
        t.backward(t.losses(cross_entropy, *tokens(1)[0]))
        seen.append(t.model.embed.weight.grad.clone())
        t.optimizer.step()

    result = run_local(job_of(), building(Transformer), script)
    plain(building(Transformer), script)
    assert len(seen) == 4
    for gradient in seen[:3]:
        torch.testing.assert_close(gradient, seen[3], rtol=1e-5, atol=1e-7)
    assert "out.weight" not in result.values
    assert result.workers[0].model.out.weight is result.workers[0].model.embed.weight


def test_defect_11_adam_bias_correction():
    """A first step of Adam has the size of the learning rate, whatever the gradient's is."""
    start = building(mlp, adam)()[0]

    def script(t):
        t.backward(t.losses(lambda m, x, y: 1e-3 * cross_entropy(m, x, y), *vectors(1)[0]))
        t.optimizer.step()

    def build():
        model = mlp()
        model.load_state_dict(start.state_dict())
        return model, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-12)

    result = run_local(job_of(), build, script)
    moved = torch.cat([(result.values[n] - p.detach()).abs().view(-1) for n, p in start.named_parameters()])
    torch.testing.assert_close(moved[moved > 1e-4], torch.full_like(moved[moved > 1e-4], 0.01), rtol=1e-3, atol=0)


# --- the loop's features -----------------------------------------------------------------------------------------


@in_pairs("script, layout", ALWAYS, ["sandblaster", "one"])
def test_the_unchanged_loop_with_visible_gradients(script, layout):
    check(job_of(layout), building(), script)


@pytest.mark.parametrize("script", ALWAYS, ids=lambda f: f.__name__)
def test_the_unchanged_loop_with_hidden_gradients(script):
    # Hidden, autograd sums the step's backwards before the group does: equal, but with other last bits.
    job = job_of(grads=Grads.kHidden)
    assert run_local(job, building(), script).distance(plain(building(), script)) < 1e-5


@in_pairs("script, layout", [clip_norm, clip_value, edit, edit_between_backwards], ["allreduce", "one"])
def test_what_the_script_does_to_visible_gradients_counts(script, layout):
    check(job_of(layout), building(), script)


@pytest.mark.parametrize("script", [clip_value, edit], ids=lambda f: f.__name__)
def test_edits_of_hidden_gradients_are_refused_with_the_remedies(script):
    with pytest.raises(RuntimeError, match=r"kVisible, tt.clip_grad_norm_, or updater"):
        run_local(job_of(grads=Grads.kHidden), building(), script)


@BOTH
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


# --- which parameters --------------------------------------------------------------------------------------------


@BOTH
def test_a_gradient_that_only_some_workers_have_counts_as_zero_from_the_others():
    """`.grad` is there for the union; without any it stays None and the parameter does not move."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def half(model, x, y):
        chosen = model.a if x[0, 0] > 0 else model.b
        return nn.functional.cross_entropy(chosen(x), y)

    def script(t):
        for batch in vectors(10):
            t.optimizer.zero_grad()
            t.backward(t.losses(half, *batch))
            assert t.model.c.weight.grad is None
            t.optimizer.step()

    for grads in Grads:
        result = check(job_of(grads=grads), building(Two, adam), script, None)
        torch.manual_seed(1)
        assert torch.equal(result.values["c.weight"], Two().c.weight)


def test_frozen_parameters_stay():
    def build():
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model, sgd(model)

    result = check(job_of(), build, usual_loop(vectors(5)))
    torch.manual_seed(1)
    assert torch.equal(result.values["0.weight"], mlp()[0].weight)


@BOTH
def test_parameters_may_be_frozen_on_the_way():
    def script(t):
        for step, batch in enumerate(vectors(8)):
            if step == 4:
                t.model[0].requires_grad_(False)
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    for grads in Grads:
        assert run_local(job_of(grads=grads), building(), script).distance(plain(building(), script)) < 1e-5


THAWING = [
    *[job_of(layout, grads=grads) for layout in ("sandblaster", "allreduce") for grads in Grads],
    job_of("in-memory"),
    job_of("one"),
    job_of(pull=Pull.kLazy),
    job_of(grads=Grads.kHidden, apply=Apply.kOnArrival),
]


def thaw(t, module, trains):
    """Also in the replicas of the reference."""
    name = next(name for name, each in t.model.named_modules() if each is module)
    for model in (t.model, *getattr(t, "_replicas", ())):
        model.get_submodule(name).requires_grad_(trains)


@BOTH
@pytest.mark.parametrize("job", THAWING, ids=lambda job: f"{job.grads.value}-{job.pull.value}-{job.apply.value}")
def test_layers_thaw_and_freeze_on_the_way(job):
    """A slice holds frozen and other parameters, so its last gradient is another one in each phase."""

    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model, adam(model)

    def script(t):
        for step, batch in enumerate(vectors(12)):
            if step == 3:
                thaw(t, t.model[0], True)
            if step == 6:
                thaw(t, t.model[2], False)
            if step == 9:
                thaw(t, t.model[2], True)
                thaw(t, t.model[0], False)
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()
            frozen = [not 3 <= step < 9, 6 <= step < 9]
            assert [layer.weight.grad is None for layer in (t.model[0], t.model[2])] == frozen

    check(job, build, script)


def test_a_layer_that_no_group_of_the_optimizer_has_stays_when_it_thaws():
    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model, sgd(model[2])

    def script(t):
        thaw(t, t.model[0], True)
        for batch in vectors(3):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    result = check(job_of(), build, script)
    torch.manual_seed(1)
    assert torch.equal(result.values["0.weight"], mlp()[0].weight)


def test_parameters_that_are_in_no_group_stay():
    def build():
        model = mlp()
        return model, torch.optim.SGD(model[2].parameters(), lr=0.1)

    result = check(job_of(), build, usual_loop(vectors(5)))
    torch.manual_seed(1)
    assert torch.equal(result.values["0.weight"], mlp()[0].weight)


@BOTH
def test_two_dtypes_and_tiny_models_on_many_servers():
    """Some shards have nothing at all: they must answer all the same."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 5)
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return self.a(x) * self.scale.float()

    check(job_of(nservers_per_group=6, nservers_per_procs=2), building(Mixed), usual_loop(vectors(6)))


# --- disagreements -----------------------------------------------------------------------------------------------


def test_hyperparameters_that_differ_within_a_group_are_an_error():
    def script(t):
        t.optimizer.param_groups[0]["lr"] = 0.1 + t.me.index
        t.backward(t.losses(cross_entropy, *vectors(1)[0]))
        t.optimizer.step()

    with pytest.raises(JobError, match=r"workers \d and \d of a group disagree about the optimizer's hyper-parameters"):
        run_local(job_of(), building(), script)


@pytest.mark.parametrize("early", [0, 2])
@pytest.mark.parametrize("grads", list(Grads))
def test_a_worker_that_ends_early_is_an_error_and_no_hang(early, grads):
    def script(t):
        for batch in vectors(2 if t.me.index == early else 4):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    with pytest.raises(JobError, match=f"worker {early} ended its script after 2 steps"):
        run_local(job_of(grads=grads), building(), script)


def test_a_script_that_fails_ends_the_job_with_its_error():
    def script(t):
        if t.me.index == 1:
            raise ZeroDivisionError("mine")
        usual_loop(vectors(2))(t)

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_local(job_of(), building(), script)


def test_a_lost_server_is_told():
    def script(t):
        t.exchange.lost(t.exchange.channel.servers[0], "closed by the peer")
        usual_loop(vectors(1))(t)

    with pytest.raises(PeerLost, match=r"worker 0/0 lost server 0/0: closed by the peer"):
        run_local(job_of("one"), building(), script)


def test_another_optimizer_is_refused_by_name():
    with pytest.raises(ConfigError, match="LBFGS"):
        run_local(job_of(), building(mlp, lambda m: torch.optim.LBFGS(m.parameters())), usual_loop(vectors(1)))


# --- asynchronous groups -----------------------------------------------------------------------------------------


def test_groups_of_their_own_servers_train_their_own_model_and_group_0_is_saved():
    """nserver_groups = 0 with several groups: parameters and buffers are group 0's, not an average."""
    batches = images(6)

    def script(t):
        usual_loop(batches[: 3 + t.me.group])(t)

    job = job_of("serverless", nworker_groups=2)
    alone = run_local(job_of("serverless"), building(Cnn), usual_loop(batches[:3]))
    assert run_local(job, building(Cnn), script).same_bits(alone)


@BOTH
def test_downpour_ends_and_counts_every_update_once():
    """kSum and gradients of one: the end value is the start plus every update, whatever the order."""

    def build():
        model = nn.Linear(70, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def script(t):
        for _ in range(5 + 3 * t.me.group):
            t.optimizer.zero_grad()
            t.backward(t.losses(lambda m, x: -m(x).sum(), torch.ones(2, 70)))
            t.optimizer.step()

    for layout in (
        {"nservers_per_group": 2, "server_worker_separate": True},
        {"nserver_groups": 2},
        {"nserver_groups": 2, "sync_freq": 3},
        {"max_staleness": 0},
    ):
        job = job_of("one", nworker_groups=2, nworkers_per_group=2, reduce=Reduce.kSum, **layout)
        result = run_local(job, build, script)
        assert torch.equal(result.values["weight"], torch.full((1, 70), 2.0 * (5 + 8))), layout


@BOTH
@pytest.mark.parametrize(("push", "fetch"), [(3, 1), (1, 3), (2, 4), (3, 2)])
def test_n_push_and_n_fetch_apply_every_gradient_once(push, fetch):
    """Constant gradients: plain SGD from the servers gives what the local steps gave."""

    def build():
        model = nn.Linear(70, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def script(t):
        for step in range(7):
            t.optimizer.zero_grad()
            t.backward(t.losses(lambda m, x: -m(x).sum(), torch.ones(1, 70)))
            t.optimizer.step()
            t.notes[step] = float(t.model.weight.detach()[0, 0])

    result = run_local(job_of("one", n_push=push, n_fetch=fetch), build, script)
    assert torch.equal(result.values["weight"], torch.full((1, 70), 7.0))
    alone = run_local(job_of("one", n_push=push, n_fetch=fetch, nworker_groups=2), build, script)
    assert torch.equal(alone.values["weight"], torch.full((1, 70), 14.0))


@BOTH
def test_warmup_trains_group_0_first_and_then_all():
    seen = []

    def script(t):
        if t.me.group == 1:
            seen.append(float(t.model.weight.detach()[0, 0]))
        for _ in range(6):
            t.optimizer.zero_grad()
            t.backward(t.losses(lambda m, x: -m(x).sum(), torch.ones(1, 70)))
            t.optimizer.step()

    def build():
        model = nn.Linear(70, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    for servers in (1, 2):
        job = job_of("one", nworker_groups=2, nserver_groups=servers, warmup_steps=4, max_staleness=3)
        assert torch.equal(run_local(job, build, script).values["weight"], torch.full((1, 70), 12.0))
        assert seen.pop() >= 4.0


def test_a_warmup_that_is_longer_than_the_script_does_not_hang():
    job = job_of("one", nworker_groups=2, warmup_steps=100)
    run_local(job, building(), usual_loop(vectors(3)))


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


def test_the_tally_counts():
    result = run_local(job_of("allreduce"), building(), usual_loop(vectors(4, 7)))
    tallies = [handle.worker.tally for handle in result.workers]
    assert [t.samples for t in tallies] == [8, 8, 12]
    assert [t.steps for t in tallies] == [4, 4, 4]
    assert [t.staleness_max for t in tallies] == [0, 0, 0]
    assert result.traffic[0] == result.traffic[1] > 0
