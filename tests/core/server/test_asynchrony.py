"""Groups that do not wait for each other: how far apart they are, what momentum does, and how the user hears of it."""

import json
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from script_job import jobs, loader
from simulation import ScriptedCluster, ScriptedWorker, job, parameters
from torch import nn
from torch.autograd.graph import get_gradient_edge

import topotrain as tt
from tests.support.reporter_parts import context_of, no_connections, worker_of
from topotrain.config.async_momentum import Corrector, corrector, explanation, groups_apart, momentum_of, warning
from topotrain.config.job import Agreement, Cluster, ConfigError, Correction, Job, NonFinite, Updater, UpdaterType
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client import JobError
from topotrain.core.events import Apart, Event, LastingNotice, Notice
from topotrain.core.optim.adapter import SliceUpdate, describe, hyper
from topotrain.core.optim.optimizer_part import OptimizerPart, PartGroup
from topotrain.core.profiling.spans import SILENT
from topotrain.launch import JobOutcome
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.result_tables import comparison, distance, summary
from topotrain.tools.monitor.terminal import console
from topotrain.tools.plan.layout_plan import plan
from topotrain.training.finish_job import SpoiledResult
from topotrain.training.loss_watch import LossTrend, LossWatch, watch_losses
from topotrain.training.step_progress import ProgressReporter
from topotrain.training.worker_stats import WorkerStats

DOWNPOUR = Cluster(nworker_groups=3)
HOGWILD = Cluster(nworker_groups=3, nserver_groups=3)


# --- how far apart (12) ----------------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("agreement", list(Agreement))
def test_the_servers_of_a_job_know_it(agreement: Agreement) -> None:
    cluster = ScriptedCluster(job(2, 1, 1, nserver_groups=2, agreement=agreement), 3, None, parameters(150, 256))

    def script(worker: ScriptedWorker) -> None:
        worker.open(1000.0)
        for _ in range(6):
            worker.sleep(0.01, 0.02)
            worker.step([torch.ones(150), torch.ones(256)])
        worker.finish()

    cluster.play(script)
    for group in range(2):
        found = cluster.server(group, 0).exchange.distance
        assert found.exchanges > 0 and found.updates > 0 and 0 < found.share < 0.1
    assert ScriptedCluster(job(1, 1, 1)).server(0, 0).exchange.distance.exchanges == 0


def test_the_report_and_the_tables_show_it() -> None:
    of = Job(cluster=HOGWILD)
    report = Report(of, layout(HOGWILD))
    assert report.as_data(JobOutcome(0, 1.0))["server_groups_apart"] is None
    report(Apart("server 1/0", 30, 2.0, 7, 0.03))
    report(Apart("server 2/0", 10, 4.0, 9, 0.04))
    data = report.as_data(JobOutcome(0, 1.0))
    squares = (30 * 0.03**2 + 10 * 0.04**2) / 40
    assert data["server_groups_apart"] == {
        "exchanges": 40,
        "updates_mean": 2.5,
        "updates_max": 9,
        "share": pytest.approx(math.sqrt(squares)),
    }
    assert "server groups 2.5 updates (max 9), 3.3% apart" in summary(data)
    single = Report(Job(cluster=DOWNPOUR), layout(DOWNPOUR)).as_data(JobOutcome(0, 1.0))
    assert distance(single) == "–" and "apart" not in summary(single)
    terminal = console()
    with terminal.capture() as shown:
        terminal.print(comparison([data | {"label": "Hogwild"}, single | {"label": "Downpour"}]))
    assert "server groups apart" in shown.get() and "2.5 updates (max 9), 3.3%" in shown.get()


# --- the warning at the start (13a) ----------------------------------------------------------------------------------


def test_who_is_warned() -> None:
    def said(cluster: Cluster, momentum: float, **more: Any) -> str:
        more.setdefault("correction", Correction.kNone)
        return warning(Job(cluster=cluster, **more), layout(cluster), momentum)

    text = said(DOWNPOUR, 0.9)
    assert "momentum 0.9 may be too much for 3 worker groups" in text
    assert "a momentum of 0.67" in text and "at most 0.33" in text and "kMomentum or kRate" in text
    assert "kRate" not in said(HOGWILD, 0.9)
    assert said(DOWNPOUR, 1 / 3) == said(DOWNPOUR, 0.0) == ""
    assert said(Cluster(nworkers_per_group=3), 0.9) == "", "one group: nothing is late"
    assert said(Cluster(nworker_groups=3, nserver_groups=0), 0.9) == "", "independent trainings"
    for correction in (Correction.kRate, Correction.kMomentum):
        assert said(DOWNPOUR, 0.9, correction=correction) == ""
    text = said(DOWNPOUR, 0.9, correction=Correction.kAuto)
    assert text.startswith("momentum 0.9 counts as 0.233: 3 worker groups") and "correction: kNone leaves it" in text
    for calm in (Cluster(nworkers_per_group=3), DOWNPOUR):
        assert said(calm, 0.0 if calm is DOWNPOUR else 0.9, correction=Correction.kAuto) == ""
    assert groups_apart(layout(HOGWILD)) == 3


@pytest.mark.parametrize("name", ["torch.optim.AdamW", "kAdamMax"])
def test_groups_that_add_steps_of_an_adaptive_optimizer_are_warned(name: str) -> None:
    def said(cluster: Cluster, name: str) -> str:
        return warning(Job(cluster=cluster), layout(cluster), 0.0, [name])

    text = said(HOGWILD, name)
    assert f"a step of {name.rpartition('.')[2]}" in text
    assert "agreement: kRingAverage" in text
    assert said(replace(HOGWILD, agreement=Agreement.kRingAverage), name) == "", "the average is right"
    assert said(DOWNPOUR, name) == "", "one server group: nothing is added up between groups"
    assert said(HOGWILD, "torch.optim.SGD") == said(HOGWILD, "module:Adamant") == ""


def test_what_counts_as_momentum_also_in_a_plan() -> None:
    weights = [nn.Parameter(torch.zeros(4, 4))]
    for optimizer, momentum in (
        (torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True), 0.9),
        (torch.optim.RMSprop(weights, lr=0.1, momentum=0.5), 0.5),
        (torch.optim.SGD(weights, lr=0.1), 0.0),
        (torch.optim.Adam(weights, lr=0.1), 0.0),
        (torch.optim.Muon(weights, lr=0.1), 0.0),
    ):
        assert momentum_of(type(optimizer).__name__, optimizer.param_groups) == momentum
        assert PreparedArguments(None, (optimizer,), None).momentum(None) == momentum
    block = Updater(type=UpdaterType.kSGD, momentum=0.8)
    assert PreparedArguments(None, (), None).momentum(block) == 0.8
    found = plan(Job(cluster=DOWNPOUR, updater=block))
    assert "warning: momentum 0.8 counts as" in found.explain() and "counts as" in found.as_data()["warning"]
    assert "warning" not in plan(Job(cluster=DOWNPOUR)).as_data()
    adds = plan(Job(cluster=HOGWILD, updater=Updater(type=UpdaterType.kAdam)))
    assert "agreement: kRingAverage" in adds.as_data()["warning"]


# --- a loss that rises (13b) -----------------------------------------------------------------------------------------


def rose(losses: list[float]) -> bool:
    trend = LossTrend()
    return [trend(loss) for loss in losses].count(True) > 0


def test_noise_is_no_rise() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        falls = [2.3 * 0.99**n + 0.3 + rng.gauss(0, 0.1) for n in range(2000)]
        still = [1.0 + rng.gauss(0, 0.3) for _ in range(2000)]
        spikes = [0.5 + abs(rng.gauss(0, 0.05)) + (100.0 if n % 40 == 7 else 0.0) for n in range(2000)]
        two_losses = [(0.1 if n % 2 else 3.0) + rng.gauss(0, 0.05) for n in range(2000)]
        negative = [-5.0 + rng.gauss(0, 0.5) for _ in range(2000)]
        assert not any(map(rose, (falls, still, spikes, two_losses, negative))), f"seed {seed}"


def test_a_rise_is_found() -> None:
    rng = random.Random(1)
    learned = [2.3 * 0.95**n + 0.1 + rng.gauss(0, 0.03) for n in range(100)]
    assert rose([*learned, *(1.9 + rng.gauss(0, 0.2) for _ in range(40))])
    assert rose([0.35, 0.3, 0.4, *(1.9 + rng.gauss(0, 0.2) for _ in range(40))]), "wrong from the first block on"
    assert rose([10.0**n for n in range(40)]), "each loss ten times the one before"
    assert rose([1.0] * 8 + [math.nan] * 24)
    assert not rose([*learned, *(0.5 + rng.gauss(0, 0.05) for _ in range(10))]), "not yet"
    short = LossTrend()
    assert not [short(5.0 * 3.0**n) for n in range(14)].count(True) and short.end()
    calm = LossTrend()
    assert not [calm(loss) for loss in learned].count(True) and not calm.end()


def watcher(
    cluster: Cluster, index: int = 0, steps: int = 0, optimizers: int = 1, resumed: object = None
) -> tuple[LossWatch, list[Event]]:
    told: list[Event] = []
    me = Address(Role.WORKER, 0, index)
    place = SimpleNamespace(job=Job(cluster=cluster, correction=Correction.kNone), topology=layout(cluster))
    here = SimpleNamespace(me=me, is_main=index == 0, emit=told.append, place=place, resumed=resumed)
    worker = SimpleNamespace(momentum=0.9, optimizers=[None] * optimizers, tally=WorkerStats(steps=steps))
    return LossWatch(here, worker), told  # type: ignore[arg-type]


def test_it_is_reported_once_by_one_worker_of_an_asynchronous_job() -> None:
    rising, told = watcher(DOWNPOUR)
    for n in range(200):
        rising(0.1 if n < 20 else 2.0)
    rising.end()
    (notice,) = told
    assert isinstance(notice, Notice)
    assert "the loss is rising: 2 now, 0.1 at its lowest. 3 worker groups train without waiting" in notice.text
    assert "momentum of at most 0.33" in notice.text
    for silent, told in (watcher(DOWNPOUR, 1), watcher(Cluster(nworkers_per_group=2))):
        for n in range(200):
            silent(0.1 if n < 20 else 2.0)
        silent.end()
        assert told == []


CHANCE = [2.31, 2.305, 2.30, 2.295]


def falls(losses: Iterable[float], cluster: Cluster = DOWNPOUR, **more: Any) -> list[str]:
    """What is said at the end of a job with these losses."""
    watch, told = watcher(cluster, **{"steps": 100, **more})
    for loss in losses:
        watch(loss)
    watch.end()
    assert all(isinstance(each, LastingNotice) for each in told)
    return [each.text for each in told if isinstance(each, Notice)]


@pytest.mark.parametrize("count", [40, 513])
def test_a_loss_that_has_not_fallen_is_told_at_the_end(count: int) -> None:
    flat = [CHANCE[n % 4] for n in range(count)]
    (said,) = falls(flat)
    assert said.startswith("the loss has not fallen (2.30 to 2.30). 3 worker groups train without waiting")
    assert falls(flat, Cluster(nworkers_per_group=2)) == ["the loss has not fallen (2.30 to 2.30)"]
    assert falls([-2.3] * count)[0].startswith("the loss has not fallen (-2.30 to -2.30)")
    (said,) = falls([5 + n / count for n in range(count)], Cluster())
    assert said.startswith("the loss has not fallen (5.0")


def test_nothing_is_told_of_a_loss_that_may_have_fallen() -> None:
    rng = random.Random(0)
    assert falls(CHANCE * 9) == [], "too few"
    assert falls(CHANCE * 30, steps=10) == [], "a script that mostly evaluates"
    assert (
        falls(CHANCE * 30, optimizers=2)
        == falls(CHANCE * 30, resumed="a snapshot")
        == falls(CHANCE * 30, index=1)
        == []
    )
    assert falls([math.nan] * 200, Cluster()) == [], "there are other words for that"
    for count in (64, 700, 3000):
        assert falls([2.3 - 0.3 * n / count + rng.gauss(0, 0.1) for n in range(count)], Cluster()) == []
        # Learned at once, and flat since.
        assert falls([2.3 * 0.5**n + 0.02 + rng.random() * 0.01 for n in range(count)], Cluster()) == []


def test_roots_that_are_no_number_are_none_of_the_losses() -> None:
    """As in plain PyTorch: an edge of the graph, and a complex scalar."""
    seen: list[float] = []
    worker: Any = SimpleNamespace(
        lazy=False,
        optimizers=[None],
        path=SimpleNamespace(private=False, look=lambda: None),
        tally=SimpleNamespace(add_backward=lambda losses: None),
        client=SimpleNamespace(channel=SimpleNamespace(spans=SILENT)),
    )
    weight = torch.ones(2, requires_grad=True)
    with ExitStack() as closing:
        watch_losses(worker, seen.append, closing)  # type: ignore[arg-type]
        torch.autograd.backward(get_gradient_edge((weight * 3).sum()), torch.tensor(1.0))
        torch.autograd.backward([get_gradient_edge((weight * 3).sum()), (weight * 2).sum()], [torch.tensor(1.0), None])
        root = (weight * (1 + 1j)).sum()
        root.backward(torch.ones_like(root))
    assert seen == [4.0]
    assert weight.grad is not None and weight.grad.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("last", [math.inf, math.nan, 0.5])
def test_a_last_loss_that_is_not_finite_is_told(last: float) -> None:
    told: list[Event] = []
    place = SimpleNamespace(job=Job(cluster=DOWNPOUR), topology=layout(DOWNPOUR))
    here = context_of(Address(Role.WORKER, 0, 0), told, is_main=True, place=place)
    tally = WorkerStats(steps=4, started=1.0, loss_sum=last, losses=1)
    ProgressReporter(here, worker_of(tally, momentum=0.0), no_connections()).job_over()
    notices = [event.text for event in told if isinstance(event, Notice)]
    assert len(notices) == (not math.isfinite(last))
    assert all("the last loss is not finite" in text and "without waiting" in text for text in notices)


# --- the words for gradients that are not finite (13c) ---------------------------------------------------------------


@pytest.mark.parametrize(("groups", "words"), [(2, "2 worker groups train without waiting for each other"), (1, "")])
def test_the_error_says_what_may_have_led_there(groups: int, words: str) -> None:
    cluster = ScriptedCluster(job(groups, 1, 1))
    caught: list[str] = []

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        try:
            for _ in range(3):
                worker.step([torch.full((p.count,), torch.nan) for p in cluster.schema.parameters])
        except JobError as error:
            caught.append(str(error))

    cluster.play(script, [cluster.workers[0]])
    assert "3 steps in a row" in caught[0]
    assert ("without waiting" in caught[0]) == bool(words) and words in caught[0]
    assert explanation(Job(), layout(Cluster()), 0.9) == ""
    taken = explanation(Job(cluster=DOWNPOUR), layout(DOWNPOUR), 0.9)
    assert "use a smaller learning rate, or fewer groups" in taken and "kMomentum" not in taken


# --- the correction (13e) --------------------------------------------------------------------------------------------


def test_what_the_correction_takes() -> None:
    cluster = Cluster(nworker_groups=4)
    assert corrector(Job(), 1) == corrector(Job(cluster=cluster, correction=Correction.kNone), 4) == Corrector()
    # Where nothing is said it is taken.
    assert corrector(Job(cluster=cluster), 4) == corrector(Job(cluster=cluster, correction=Correction.kMomentum), 4)
    assert corrector(Job(cluster=cluster, correction=Correction.kRate), 4) == Corrector(by_staleness=True)
    # Muon has a momentum that decides about a direction only.
    weights = [nn.Parameter(torch.ones(4, 4))]
    for optimizer, momentum in (
        (torch.optim.Muon(weights), 0.95),
        (torch.optim.SGD(weights, lr=0.1, momentum=0.9), 0.4),
    ):
        part = OptimizerPart(optimizer, [PartGroup(0, (0,), (weights[0].detach(),))], False)
        part.set(json.loads(hyper(optimizer)), Corrector(less_momentum=0.5))
        assert part.optimizer.param_groups[0]["momentum"] == pytest.approx(momentum)
    made = corrector(Job(cluster=cluster, correction=Correction.kMomentum), 4)
    assert made.momentum(0.9) == pytest.approx(0.15) and made.momentum(0.5) == 0.0 and made.rate(7) == 1.0
    assert [Corrector(by_staleness=True).rate(n) for n in (0, 1, 2, 4)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("fused", [None, False])
def test_a_slice_is_updated_as_torch_does_with_the_corrected_settings(fused: bool | None) -> None:
    """Rates change from step to step, and a scheduler's change in between counts."""
    rng = torch.Generator().manual_seed(0)
    plain, ours = nn.Parameter(torch.ones(64)), torch.ones(64)
    mine = torch.optim.SGD([plain], lr=0.1, momentum=0.4, fused=fused)
    told = torch.optim.SGD([nn.Parameter(torch.ones(64))], lr=0.1, momentum=0.9, fused=fused)
    spec = describe(told, told.param_groups[0]["params"])
    update = SliceUpdate(spec, [(0, 0, ours)], correct=Corrector(less_momentum=0.5, by_staleness=True))
    for staleness, rate in ((0, 0.1), (3, 0.1), (3, 0.05), (1, 0.05), (2, 0.05)):
        gradient = torch.randn(64, generator=rng)
        mine.param_groups[0]["lr"] = rate / max(1, staleness)
        told.param_groups[0]["lr"] = rate
        plain.grad = gradient.clone()
        mine.step()
        update.apply(hyper(told), {0: gradient}, staleness)
        torch.testing.assert_close(ours, plain.detach())


def test_a_server_divides_the_rate_by_the_staleness_of_the_step() -> None:
    """Group 1 makes three updates while group 0 computes one: that one is worth a third."""
    settings = json.dumps([{"lr": 1.0, "momentum": 0.0}]).encode()
    for correction, last in ((Correction.kRate, 1 / 3), (Correction.kNone, 1.0)):
        cluster = ScriptedCluster(job(2, 1, 1, correction=correction, share_memory=False), 0, None, parameters(64))

        def script(worker: ScriptedWorker, cluster: ScriptedCluster = cluster) -> None:
            worker.open()
            for _ in range(1 if worker.me.group == 0 else 3):
                cluster.sim.sleep(10.0 if worker.me.group == 0 else 1.0)
                worker.step([torch.ones(64)], hyper=settings)
            worker.finish()

        cluster.play(script)
        assert float(cluster.values()[0][0]) == pytest.approx(-3.0 - last)


def test_a_correction_of_momentum_needs_one() -> None:
    cluster = ScriptedCluster(job(2, 1, 1, correction=Correction.kMomentum))
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="correction = kMomentum: needs an optimizer with a momentum above 0"):
        cluster.worker(cluster.workers[0], model, torch.optim.Adam(model.parameters()))


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from jobs(tmp_path, monkeypatch)


@pytest.mark.parametrize("nonfinite", [NonFinite.kSkip, NonFinite.kAllow])
def test_a_job_whose_result_is_not_finite_fails_unless_it_may(
    nonfinite: NonFinite, entered: Any, tmp_path: Path
) -> None:
    """Every gradient is finite, and a step of this rate is not. A value that is not trained may be what it likes."""
    here, model = entered(nonfinite=nonfinite), nn.Linear(12, 5)
    model.mask = nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    model, optimizer, batches = tt.prepare(model, optimizer, loader())
    for x, _ in batches:
        optimizer.zero_grad()
        (model(x.abs()) * 100).mean().backward()
        optimizer.step()
    with nullcontext() if nonfinite is NonFinite.kAllow else pytest.raises(SpoiledResult) as caught:
        here.finish()
    if caught is not None:
        assert "the final parameters are not finite: weight" in str(caught.value) and "mask" not in str(caught.value)
    assert (tmp_path / "final.safetensors").exists()
