"""Which scripts can repeat a step: what is seen at `tt.prepare`, and what only at a step or in `tt.assign`."""

from types import SimpleNamespace

import pytest
import torch
from script_job import jobs, loader, mlp, unfused
from single_client import ClientHarness, applied
from torch import nn

import topotrain as tt
from topotrain.comm.router import RouterConfig
from topotrain.comm.store import open_store
from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client_context import PeerLost, StepOutcome
from topotrain.core.events import Repeatable
from topotrain.extensions.in_place_recovery.in_place_messages import StepAborted
from topotrain.extensions.in_place_recovery.repeated_steps import InPlaceExtension, RepeatedSteps
from topotrain.launch.runtime.worker_connections import WorkerConnector
from topotrain.training import context
from topotrain.training.context import Context, PrepareRequest
from topotrain.training.worker_stats import WorkerStats

PAIR = Job(cluster=Cluster(nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True))
APPLIED = StepOutcome(1, (0, 0), False, -1.0)
DROPPED = StepOutcome(-1, (), False, -1.0, late=True, next=4, repeats=True)


class Sink:
    def __init__(self):
        self.told = []

    def emit(self, event):
        self.told.append(event)

    @property
    def reasons(self):
        return [event.text for event in self.told if isinstance(event, Repeatable)]


@pytest.fixture
def here(tmp_path):
    """Worker 0/1 of a job with a group that recovers in place."""
    place = RouterConfig.of(
        layout(PAIR.cluster), PAIR, open_store(tmp_path.as_uri()), bytes(32), tmp_path, 0, "127.0.0.1"
    )
    return Context(place, Address(Role.WORKER, 0, 1), tmp_path, Sink(), WorkerConnector())


class Batches:
    """One batch in each step."""

    last_samples = 2

    def __len__(self):
        return 1


def worker():
    """As much of a worker as knows of its steps."""
    return SimpleNamespace(
        me=Address(Role.WORKER, 0, 1),
        client=ClientHarness(nservers_per_group=2).exchange,
        tally=WorkerStats(),
        batches=Batches(),
        path=SimpleNamespace(backwards=1, thaws=1),
        attach=lambda extension: None,
    )


@pytest.mark.parametrize(
    ("optimizers", "several", "loop", "reasons"),
    [
        (1, False, "", []),
        (2, False, "", ["several optimizers"]),
        (1, True, "", ["several models"]),
        (1, False, "the loop is another library's", ["the loop is another library's"]),
    ],
)
def test_one_model_with_one_optimizer_can_repeat_a_step(here, optimizers, several, loop, reasons):
    if loop:
        here.unrepeatable = loop
    model, extension = mlp(), InPlaceExtension()
    request = PrepareRequest(model, tuple(unfused(model) for _ in range(optimizers)), loader(), several)
    extension.connected(here, request)
    assert (extension.batch_replay(here, worker()) is None) is bool(reasons)
    assert len(here.sink.reasons) == len(reasons)
    assert all(reason in told for reason, told in zip(reasons, here.sink.reasons, strict=True))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """See `jobs`."""
    yield from jobs(tmp_path, monkeypatch)


def test_a_trainer_of_topotrain_says_so(job):
    here = job(train_steps=2)
    model = mlp()
    tt.Trainer(model, nn.CrossEntropyLoss(), loader(), optimizer=unfused(model)).fit()
    assert here.context.unrepeatable == "the steps of a tt.Trainer are numbered"
    here.finish()


# --- in a step, and between two ------------------------------------------------------------------------------------


def steps(here, *, made=1):
    found = worker()
    steps = RepeatedSteps(here, found)
    for _ in range(made):
        step(steps)
    return found, steps


def step(steps, outcome=APPLIED):
    steps.before_step()
    steps.after_commit(outcome)


def abort(worker, step, *members):
    for server in worker.client.channel.servers:
        worker.client.handle(server, StepAborted(step, members))


def test_a_script_that_assigns_parameters_is_reported_once(here):
    _, made = steps(here)
    made.before_change()
    made.before_change()
    assert here.sink.reasons == ["", "the script changes parameters in tt.assign"]
    with pytest.raises(PeerLost, match=r"cannot be repeated: the script changes parameters in tt\.assign"):
        step(made, DROPPED)


def test_nothing_is_assigned_while_a_worker_of_the_group_is_away(here):
    found, made = steps(here)
    abort(found, 3, 1)
    assert found.client.steps.finish(3, None).repeats
    with pytest.raises(PeerLost, match="a worker of the group is lost"):
        made.before_change()


def test_nothing_is_assigned_behind_a_step_that_is_still_to_be_repeated(here):
    """The other worker is back already: the group has dropped the step in which it joined."""
    _, made = steps(here)
    step(made, DROPPED)
    with pytest.raises(PeerLost, match="a worker of the group is lost"):
        made.before_change()


def test_a_script_that_thaws_a_layer_is_reported_and_does_not_go_on_with_a_worker_that_was_away(here):
    found, made = steps(here)
    step(made)
    found.path.thaws += 1
    step(made)
    step(made)
    assert here.sink.reasons == ["", "the script freezes or thaws parameters between its steps"]
    found, made = steps(here)
    abort(found, 3, 0, 1)
    assert found.client.steps.finish(3, None).repeats
    step(made)
    found.path.thaws += 1
    with pytest.raises(PeerLost, match="freezes or thaws"):
        step(made)


# --- a change that the group drops ---------------------------------------------------------------------------------


def test_a_change_is_applied_and_its_values_are_fetched():
    harness = ClientHarness()
    for number in (0, 1):
        harness.answer_next(number, applied(3))
    for number in (0, 1):
        harness.answer_next(number, *harness.values(number, -2, 7.0))
    assert not harness.exchange.steps.change(3).late
    assert all(float(harness.flats.view("params", bucket)[0]) == 7.0 for bucket in harness.map.buckets)


@pytest.mark.parametrize("applies", [False, True], ids=["the change", "the step behind it"])
def test_a_change_ends_when_the_group_drops_it_or_the_step_behind_it(applies):
    """Others of the group may be back in their loader, so that no values of this moment come for all."""
    harness = ClientHarness()
    for number in (0, 1) if applies else ():
        harness.answer_next(number, applied(3))
    for number in (0, 1):
        harness.answer_next(number, StepAborted(3 + applies, (1,)))
    outcome = harness.exchange.steps.change(3)
    assert outcome.late and outcome.repeats and outcome.next == 4 + applies
    assert not any(isinstance(message, m.Fetch) for _, message in harness.sent) or applies


def test_a_script_whose_change_is_dropped_ends_and_its_parameters_are_connected_again(job, monkeypatch):
    here = job()
    model = mlp()
    tt.prepare(model, unfused(model), loader())
    context.use()
    worker = here.context.worker
    monkeypatch.setattr(worker.client.steps, "change", lambda step: DROPPED)
    with pytest.raises(PeerLost, match=r"tt\.assign"), tt.assign(model), torch.no_grad():
        model[0].bias.fill_(5.0)
    assert worker.committed == 0
    worker.buffers.check()
