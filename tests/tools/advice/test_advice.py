"""The named blocks of an advice, their bounds, and the table, with a predictor that is plain arithmetic."""

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from arithmetic_predictor import ArithmeticPredictor, timed_probe
from seeds import SOAK

from topotrain.config import job_file
from topotrain.config.job import Cluster, Compression, ConfigError, Grads, Job, Link
from topotrain.config.topology import layout
from topotrain.core.events import StepDone
from topotrain.tools.advice import candidate, trial_runs
from topotrain.tools.advice.advice import Advice, advise
from topotrain.tools.advice.advice_text import explain, job_text
from topotrain.tools.advice.candidate import OWN, Candidate, LeftOut
from topotrain.tools.cli.performance.advise_command import trials_of
from topotrain.tools.prediction import rehearsal
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.prediction.speed_bounds import speed_bound

EIGHT = Machines(hosts=8, link=Link(bandwidth=100.0, delay=1.0))
BARE = Job(cluster=Cluster(auto=True))
"""A job without a block that would be compared."""
HIDDEN = "hidden gradients, applied on arrival"


def collected(machines: Machines = EIGHT, job: Job = BARE, **probe: int) -> tuple[list[Candidate], list[LeftOut]]:
    return candidate.candidates(timed_probe(**probe), machines, job)


def candidates(machines: Machines = EIGHT, job: Job = BARE, **probe: int) -> list[Candidate]:
    return collected(machines, job, **probe)[0]


def advised(machines: Machines = EIGHT, sync: bool = False, job: Job = BARE) -> Advice:
    return advise(timed_probe(), machines, job, sync, predictor=ArithmeticPredictor())


def plain(text: str) -> str:
    return " ".join(text.replace("\n#", " ").split())


# ---- candidates ------------------------------------------------------------------------------------------------------


def test_about_a_dozen_blocks_have_all_frameworks() -> None:
    words = ["one worker", "Sandblaster", "AllReduce", "Downpour", "Distributed Hogwild", "DiLoCo", "ring"]
    words += ["hidden gradients", "backup", "kInt8", "staleness", "averages"]
    for cores in (1, 2):
        labels = [each.label for each in candidates(job=replace(BARE, per_worker_batch=True), cores=cores)]
        assert 12 <= len(labels) <= 18 and len(labels) == len(set(labels)), sorted(labels)
        assert [name for name in words if not any(name in label for label in labels)] == []
    assert len(candidates(Machines(), cores=8)) == 11


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 100])
def test_layouts_fill_the_hosts_and_can_be_read_again(hosts: int) -> None:
    machines = Machines(hosts=hosts, link=Link(bandwidth=1000.0) if hosts > 1 else None)
    for each in candidates(machines, batch=512):
        assert job_file.loads(job_file.dumps(each.job)) == each.job
        units = len(layout(each.job.cluster).units)
        assert hosts == 1 or each.used == 1 or units == each.used <= hosts, each.label


def test_a_layout_is_marked_by_what_it_changes_and_needs() -> None:
    assert all(bool(each.needs) is (each.job.grads is Grads.kHidden) for each in candidates())
    marks = {each.label.split(",")[0]: set(each.changes) for each in candidates() if not each.setting}
    assert marks["AllReduce"] == marks["Sandblaster"] == set()
    assert marks["Downpour with co-located servers"] == {"asynchronous"}
    assert "local steps" in marks["DiLoCo (rounds of 50 steps)"]
    assert {each.needs for each in candidates(job=replace(BARE, grads=Grads.kHidden))} == {"", HIDDEN}
    exact = [each.label for each in candidates() if not each.changes]
    assert sorted(each.candidate.label for each in advised(sync=True).rehearsed) == sorted(exact)


def test_workers_are_as_many_as_the_batch_and_the_measured_times_allow() -> None:
    found, left_out = collected(batch=4)
    assert all(each.topology.workers_per_group <= 4 for each in found)
    assert any("must be at most 4: a batch has so many samples" in each.why for each in left_out)
    assert OWN in [each.what for each in collected(job=Job(cluster=Cluster(nworkers_per_group=5)), batch=4)[1]]
    whole = candidates(batch=4, job=replace(BARE, per_worker_batch=True))
    assert any(each.topology.workers_per_group > 4 for each in whole)
    # One host gets as many workers as the batch allows, and several hosts as many as compute the most.
    assert max(each.topology.workers_per_group for each in candidates(Machines(), batch=3, cores=8)) == 3
    for sharing, most in (({2: 1.0, 4: 1.1}, 4), ({2: 2.0, 4: 4.0}, 1), ({2: 1.7, 4: 4.0}, 2)):
        found = candidate.candidates(replace(timed_probe(cores=4), sharing=sharing), EIGHT, BARE)[0]
        assert max(len(unit.workers) for each in found if each.used == 8 for unit in each.topology.units) == most


def test_what_does_not_fit_into_memory_is_refused_with_both_numbers() -> None:
    # A worker has values, gradients and their mean: 3 or 4 MB; a server in the same host adds to it.
    found = advised(replace(EIGHT, memory_bytes=9_000_000))
    assert found.refused and found.rehearsed
    assert all("0.009 GB" in each.why and "needs" in each.why for each in found.refused)
    # Also of those that have a bound only.
    many = replace(EIGHT, hosts=40, memory_bytes=7_900_000)
    refused = {each.what for each in advised(many).refused}
    assert refused & {each.label for each, _ in advised(replace(many, memory_bytes=None)).bounded}
    with pytest.raises(ConfigError, match="--memory: no layout fits"):
        advised(replace(EIGHT, memory_bytes=1000))


def test_the_block_of_the_job_is_a_candidate_and_its_other_fields_are_kept() -> None:
    own = Job(name="mine", grads=Grads.kHidden, cluster=Cluster(nworkers_per_group=6, nservers_per_group=3))
    found = candidates(job=own)
    assert OWN in found[1].label and found[1].job == own
    assert all((each.job.name, each.job.grads) == ("mine", Grads.kHidden) for each in found)
    assert all(each.job.cluster.nservers_per_group != 3 for each in found if each.job != own)
    # A combination that a job refuses is told, and not rehearsed.
    own = Job(grads="kHidden", apply="kOnArrival", cluster=Cluster(nworkers_per_group=2))  # type: ignore[arg-type]
    found, left_out = collected(job=own)
    assert any("cluster.outer" in each.why for each in left_out)
    assert all(each.job.cluster.outer is None for each in found)


def test_a_straggler_is_a_host_with_all_its_workers_and_may_be_left_idle() -> None:
    slow = Machines(hosts=8, link=Link(bandwidth=10.0), stragglers={0: 4.0, 5: 2.0})
    found = candidates(slow, batch=512)
    assert {each.used for each in found} == {1, 4, 6, 8}
    for each in found:
        members = each.topology.workers_per_group
        places = {
            each.topology.host_of(worker): each.machines.stragglers.get(worker.group * members + worker.index, 1.0)
            for group in range(each.topology.worker_groups)
            for worker in each.topology.workers(group)
        }
        assert {host: times for host, times in places.items() if times > 1} == {
            host: times for host, times in slow.stragglers.items() if host in places and each.used == 8
        }, each.label
        each.machines.topology(each.job)
        assert each.used != 6 or each.label.endswith("on 6 of 8 hosts without hosts 0, 5")
        assert each.used > 1 or each.machines.link is None
    with pytest.raises(ConfigError, match="--straggler = 8: must be the number of a host, 0 to 7"):
        candidates(replace(EIGHT, stragglers={8: 2.0}))
    with pytest.raises(ConfigError, match="--straggler = 2: must be the number of a worker, 0 to 1"):
        candidates(Machines(stragglers={2: 2.0}))


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mbit", "stragglers", "cores"), [(20.0, {}, None), (10_000.0, {1: 4.0}, None), (10_000.0, {}, 3)]
)
def test_no_rehearsed_layout_is_faster_than_its_bound(
    mbit: float, stragglers: dict[int, float], cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the product's own servers in virtual time, on a small model."""
    monkeypatch.setattr(rehearsal, "MEASURED", ((1 << 20, 6),))
    machines = Machines(hosts=2, cores=cores, link=Link(bandwidth=mbit, delay=0.1), stragglers=stragglers)
    probe = replace(timed_probe(elements=4000, batch=12), sharing={2: 2.0})
    plain_ones = candidate.candidates(probe, machines, BARE)[0][:: 1 if SOAK else 2]
    plain_ones = [each for each in plain_ones if each.job.cluster.compression is Compression.kNone]
    assert len(plain_ones) >= (10 if SOAK else 4)
    for each in plain_ones:
        prediction = predict(each.job, probe, each.machines)
        bound = speed_bound(each.job, each.topology, each.machines, probe)
        assert prediction.samples_per_s <= bound.samples_per_s * 1.001, each.label
        assert prediction.same_as_one_process is not bool(each.changes)


def test_layouts_have_bounds_after_the_time_and_for_more_processes_than_are_rehearsed() -> None:
    seen: list[str] = []
    predictor, every = ArithmeticPredictor(), candidates()
    found = advise(timed_probe(), EIGHT, BARE, within_s=0.0, predictor=predictor, show=seen.append)
    # One worker is the first one, so nothing slower is ever advised.
    label = found.winner.candidate.label
    assert label.startswith("one worker") and seen == [f"rehearsing 1 of {len(every)}: {label}"]
    assert [each.candidate.label for each in found.rehearsed] == [label]
    assert len(found.bounded) == len(every) - 1 and len(predictor.asked) == 1
    said = explain(found)
    assert "bounds by arithmetic" in said and "at most " in said
    assert "a layout that was not rehearsed may be faster: see its bound" in said
    assert "by arithmetic" not in explain(advised())
    machines, began = Machines(hosts=1000, link=Link(bandwidth=1000.0)), time.process_time()
    found = advise(timed_probe(batch=10_000), machines, BARE, within_s=1e9, predictor=ArithmeticPredictor())
    assert time.process_time() - began < 10
    assert {each.candidate.used for each in found.rehearsed} == {1, 16}
    assert all(each.used == 1000 for each, _ in found.bounded)
    speeds = [each["at_most_samples_per_s"] for each in found.as_data()["bounds"]]
    assert len(speeds) > 10 and speeds == sorted(speeds, reverse=True)


# ---- the advice ------------------------------------------------------------------------------------------------------


def test_the_winner_is_the_fastest_and_sync_gives_another_one() -> None:
    found, exact = advised(), advised(sync=True)
    assert found.winner.samples_per_s >= 0.98 * found.rehearsed[0].samples_per_s
    assert found.winner.candidate.changes and not exact.winner.candidate.changes
    assert found.best_exact is not None
    assert found.best_exact.samples_per_s == pytest.approx(exact.winner.samples_per_s)
    # The script may not allow hidden gradients, which are faster.
    exact = advised(replace(EIGHT, link=Link(bandwidth=1000.0)), sync=True)
    first = exact.rehearsed[0]
    assert first.candidate.needs and first.is_exact and not exact.winner.candidate.needs
    assert f"if the script allows {HIDDEN}: {first.samples_per_s:,.0f} samples/s" in plain(explain(exact))
    # On one host, without a link, everything is computing. Of equally fast layouts the exact one is taken.
    found = advised(Machines(hosts=1))
    best = max(each.samples_per_s for each in found.rehearsed)
    assert any(each.candidate.changes and each.samples_per_s == best for each in found.rehearsed)
    assert not found.winner.candidate.changes and found.winner.samples_per_s == best


def test_one_host_is_advised_where_the_link_is_too_slow_for_several() -> None:
    found = advised(replace(EIGHT, link=Link(bandwidth=1.0)), sync=True)
    winner = found.winner.candidate
    assert (winner.used, winner.topology.workers_per_group) == (1, 2) and "on 1 of 8 hosts" in winner.label
    assert job_text(found).startswith("# Advised by `topotrain advise` for one host: ")
    assert found.as_data()["winner"]["hosts"] == 1


def test_what_cannot_be_predicted_is_told() -> None:
    predicts = ArithmeticPredictor()

    def hidden_only(job: Job, *more: Any) -> Any:
        if job.grads is Grads.kVisible:
            raise ConfigError("grads", "kVisible", "cannot be predicted")
        return predicts(job, *more)

    found = advise(timed_probe(), EIGHT, BARE, predictor=hidden_only)
    assert any("staleness of at most 4" in each.what and "cannot be" in each.why for each in found.left_out)
    # Nothing else is left, so the block that the script must allow is advised.
    assert found.winner.candidate.needs and found.best_exact is None
    assert all(f"he script must allow its {HIDDEN}" in plain(text) for text in (explain(found), job_text(found)))


@pytest.mark.parametrize(("samples", "told"), [(8, "measured 8 (the "), (0, "gives tt.prepare no loader")])
def test_the_advised_layout_is_tried_first_and_a_trial_says_its_rate_or_why_there_is_none(
    samples: int, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def run_job(job: Job, on_event: Any) -> str:
        for step in range(20):
            on_event(StepDone("worker 0/0", float(step), step, samples * step, None, 0.0, 0, 0, 0))
        return "it is ended before its end"

    forks = SimpleNamespace(folder=tmp_path, run_job=run_job)
    monkeypatch.setattr(trial_runs, "forked_processes", lambda served: nullcontext(forks))
    found = advised(Machines(hosts=1))
    others = tuple(each for each in found.rehearsed if each is not found.winner)
    tried = list(trials_of(replace(found, rehearsed=(*others, found.winner)), timed_probe(), 2, True))
    assert [trial.layout for trial in tried] == [each.candidate.label for each in (found.winner, others[0])]
    assert all(told in trial.explain() for trial in tried)


def test_a_reason_names_the_busy_resource_the_process_that_is_waited_for_or_the_computing() -> None:
    crawl = advised(replace(EIGHT, link=Link(bandwidth=1.0)))
    apart = next(each for each in crawl.rehearsed if "14 workers, 1 server apart" in each.candidate.label)
    busy = apart.prediction.busiest[0].share
    assert apart.reason == f"server 0/0's link out is busy {busy:.0%} of the step"
    slow = advised(replace(EIGHT, link=Link(bandwidth=1e6), stragglers={1: 4.0}))
    downpour = next(each for each in slow.rehearsed if "Downpour" in each.candidate.label)
    assert "for worker 0/1; computing takes" in downpour.reason
    assert advised(Machines(hosts=1)).rehearsed[0].reason == "workers compute 100% of the step"


def test_text_file_and_data_have_each_layout_and_the_verdict() -> None:
    job = Job(name="mine", program="train.py", args=("--epochs", "3"), cluster=Cluster(auto=True))
    found = advised(replace(EIGHT, memory_bytes=12_000_000), job=job)
    text = explain(found)
    assert found.best_exact is not None
    for each in found.rehearsed:
        assert each.candidate.label + " *" * (each is found.best_exact) + " " in text
    assert text.count(" *  ") == 1 and " 8 %" in text
    assert "not considered:" in text and "does not fit into memory:" in text
    assert f"advised: {found.winner.candidate.label}" in plain(text)
    assert "it changes the statistics of the training" in text
    assert all(len(line) <= 120 for line in text[text.index("not considered:") :].splitlines())
    text = job_text(found)
    assert text.startswith("# Advised by `topotrain advise` for 8 hosts, one unit on each: ")
    again = job_file.loads(text)
    assert again == found.winner.candidate.job
    assert (again.name, again.program, again.args, again.cluster.auto) == ("mine", "train.py", ("--epochs", "3"), False)
    assert len(layout(again.cluster).units) == 8
    data = json.loads(json.dumps(found.as_data()))
    assert data["hosts"] == 8 and len(data["candidates"]) == len(found.rehearsed)
    assert data["winner"] in data["candidates"]
    for row in data["candidates"]:
        assert job_file.loads(row["block"]).cluster
        assert row["samples_per_s"] <= row["at_most_samples_per_s"] * 1.001, row["layout"]
