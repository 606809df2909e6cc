"""The candidates of an advice, their bounds, the search and the reasons, with a predictor that is plain arithmetic."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from arithmetic_predictor import ArithmeticPredictor, timed_probe

from topotrain.config import job_file
from topotrain.config.job import Cluster, Compression, ConfigError, Grads, Job, Link
from topotrain.config.topology import layout
from topotrain.tools.advice import trial_runs
from topotrain.tools.advice.advice import Advice, advise
from topotrain.tools.advice.advice_text import explain, job_text
from topotrain.tools.advice.candidate import Candidate, Family
from topotrain.tools.advice.candidate_list import CandidateSource
from topotrain.tools.advice.layout_proposals import counts, proposals
from topotrain.tools.advice.layout_search import LayoutSearch, Rehearsed
from topotrain.tools.advice.predictor import RehearsalPredictor
from topotrain.tools.advice.trial_runs import Trial
from topotrain.tools.advice.wishes import Wishes, search_time
from topotrain.tools.cli.performance.advise_command import trials_of
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.prediction.rehearsable import same_as_one_process
from topotrain.tools.probe.probe_file import Probe

EIGHT = Machines(hosts=8, link=Link(bandwidth=100.0, delay=1.0))


def source(machines: Machines = EIGHT, job: Job | None = None, sync: bool = False, **probe: int) -> CandidateSource:
    return CandidateSource(timed_probe(**probe), machines, job or Job(), Wishes(sync), job is not None)


def advised(machines: Machines = EIGHT, **more: object) -> Advice:
    return advise(timed_probe(), machines, predictor=ArithmeticPredictor(), **more)  # type: ignore[arg-type]


# ---- candidates ------------------------------------------------------------------------------------------------------


def test_all_families_have_candidates_on_several_hosts() -> None:
    found = source().collect()
    assert {each.family for each in found.candidates} == set(Family) - {Family.OWN}
    frameworks = " ".join(each.topology.framework for each in found.candidates)
    for name in ("Sandblaster", "AllReduce", "Downpour", "Distributed Hogwild", "DiLoCo", "in-memory Hogwild"):
        assert name in frameworks
    agreements = {each.job.cluster.agreement.value for each in found.candidates if each.topology.synced}
    assert agreements == {"kMaster", "kRingAverage", "kElastic", "kGossip"}


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 100])
def test_layouts_fill_the_hosts_and_can_be_read_again(hosts: int) -> None:
    machines = Machines(hosts=hosts, link=Link(bandwidth=1000.0) if hosts > 1 else None)
    found = source(machines, batch=512).collect().candidates
    assert 5 < len(found) < 120
    for each in found:
        assert job_file.loads(job_file.dumps(each.job)) == each.job
        if hosts > 1 and each.family is not Family.ONE:
            units = len(layout(each.job.cluster).units)
            assert units == hosts if each.used == hosts else each.used == 1 or each.used == units < hosts, each.label


def test_a_layout_is_marked_by_what_it_changes() -> None:
    for each in source().collect().candidates:
        assert each.is_exact is same_as_one_process(each.job), each.label
    marks = {each.family: set(each.changes) for each in source().collect().candidates if each.family is not Family.ONE}
    assert marks[Family.ALLREDUCE] == marks[Family.SANDBLASTER] == set()
    assert marks[Family.DOWNPOUR] == {"asynchronous"}
    assert "local steps" in marks[Family.ISLANDS]
    assert "lossy compression" in marks[Family.COMPRESSED]


def test_sync_leaves_what_computes_the_same_and_counts_the_rest() -> None:
    found = source(sync=True).collect()
    assert found.candidates
    assert all(each.is_exact for each in found.candidates)
    every = len(source().collect().candidates)
    (told,) = [each for each in found.left_out if "--sync" in each.why]
    assert told.what.startswith(f"{every - len(found.candidates)} layouts")


def test_a_batch_is_not_divided_over_more_workers_than_it_has_samples() -> None:
    found = source(batch=4).collect()
    assert all(each.topology.workers_per_group <= 4 for each in found.candidates)
    assert any("must be at most 4: a batch has so many samples" in each.why for each in found.left_out)
    whole = source(batch=4, job=Job(per_worker_batch=True)).collect().candidates
    assert any(each.topology.workers_per_group > 4 for each in whole)


def test_what_does_not_fit_into_memory_is_refused_with_both_numbers() -> None:
    # A worker has values, gradients and their mean: 3 or 4 MB; a server in the same host adds to it.
    machines = replace(EIGHT, memory_bytes=9_000_000)
    found = source(machines).collect()
    assert found.refused and found.candidates
    assert all("0.009 GB" in each.why and "needs" in each.why for each in found.refused)
    names = {each.what for each in found.refused}
    assert not names & {each.label for each in found.candidates}


def test_an_advice_without_any_layout_says_why() -> None:
    with pytest.raises(ConfigError, match="--memory: no layout fits"):
        advised(replace(EIGHT, memory_bytes=1000))


def test_the_number_of_workers_on_a_host_follows_the_measured_times() -> None:
    fast = replace(timed_probe(cores=4), sharing={2: 1.0, 4: 1.1})
    slow = replace(timed_probe(cores=4), sharing={2: 2.0, 4: 4.0})
    between = replace(timed_probe(cores=4), sharing={2: 1.7, 4: 4.0})
    found = [CandidateSource(probe, EIGHT, Job(), Wishes()).workers_per_host() for probe in (fast, slow, between)]
    assert found == [(1, 4), (1,), (1, 2)]


def test_counts_are_few_and_have_both_ends() -> None:
    assert counts(1) == (1,)
    assert counts(8) == (1, 2, 4, 8)
    assert counts(12) == (1, 2, 4, 8, 12)
    for most in (100, 5000, 50_000):
        found = counts(most)
        assert found[0] == 1 and found[-1] == most and len(found) <= 6 and list(found) == sorted(set(found))


def test_the_block_of_the_job_is_a_candidate_and_its_other_fields_are_kept() -> None:
    own = Job(name="mine", grads=Grads.kHidden, cluster=Cluster(nworkers_per_group=6, nservers_per_group=3))
    found = source(job=own).collect().candidates
    assert found[0].family is Family.OWN and found[0].job == own
    assert all((each.job.name, each.job.grads) == ("mine", Grads.kHidden) for each in found)
    assert all(each.job.cluster.nservers_per_group != 3 for each in found[1:])


def test_a_combination_that_a_job_refuses_is_told_and_not_rehearsed() -> None:
    own = Job(grads="kHidden", apply="kOnArrival", cluster=Cluster(nworkers_per_group=2))  # type: ignore[arg-type]
    found = source(job=own).collect()
    assert any("cluster.outer" in each.why for each in found.left_out)
    assert all(each.job.cluster.outer is None for each in found.candidates)


# ---- stragglers ------------------------------------------------------------------------------------------------------


def test_a_straggler_is_a_host_and_all_its_workers() -> None:
    machines = replace(EIGHT, stragglers={1: 4.0})
    for each in source(machines, batch=512).collect().candidates:
        slow = {
            each.topology.host_of(worker)
            for group in range(each.topology.worker_groups)
            for worker in each.topology.workers(group)
            if each.machines.stragglers.get(group * each.topology.workers_per_group + worker.index) == 4.0
        }
        assert slow == ({1} if each.used == 8 else set()), each.label
        each.machines.topology(each.job)


def test_a_straggler_that_no_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="--straggler = 8: must be the number of a host, 0 to 7"):
        source(replace(EIGHT, stragglers={8: 2.0})).collect()
    with pytest.raises(ConfigError, match="--straggler = 2: must be the number of a worker, 0 to 1"):
        source(Machines(stragglers={2: 2.0})).collect()


# ---- bounds and search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mbit", "stragglers", "cores"), [(20.0, {}, None), (10_000.0, {1: 4.0}, None), (10_000.0, {}, 16)]
)
def test_no_rehearsed_layout_is_faster_than_its_bound(
    mbit: float, stragglers: dict[int, float], cores: int | None
) -> None:
    """With the product's own servers in virtual time, on a small model."""
    machines = Machines(hosts=2, cores=cores, link=Link(bandwidth=mbit, delay=0.1), stragglers=stragglers)
    probe = replace(timed_probe(elements=20_000, batch=12), sharing={2: 2.0})
    found = CandidateSource(probe, machines, Job(), Wishes()).collect().candidates
    predictor, compared = RehearsalPredictor(), set()
    for each in found:
        if each.job.cluster.compression is not Compression.kNone:
            continue
        prediction = predictor.predict(each.job, probe, each.machines)
        compared.add(each.family)
        assert prediction.samples_per_s <= each.bound(probe).samples_per_s * 1.001, each.label
        assert prediction.same_as_one_process is each.is_exact
    assert compared == set(Family) - {Family.OWN, Family.COMPRESSED}


@dataclass
class Watch:
    """Counts rehearsals, and lets each take a second."""

    seen: list[Candidate] = field(default_factory=list)
    of: set[int] = field(default_factory=set)

    def rehearsing(self, number: int, of: int, candidate: Candidate) -> None:
        self.seen.append(candidate)
        self.of.add(of)
        assert number == len(self.seen)

    def now(self) -> float:
        return float(len(self.seen))


def search(wishes: Wishes, machines: Machines = EIGHT) -> tuple[LayoutSearch, Watch]:
    watch, probe = Watch(), timed_probe()
    found = CandidateSource(probe, machines, Job(), wishes).collect()
    made = LayoutSearch(ArithmeticPredictor(), probe, wishes, search_time(wishes.within_s, watch), watch)
    made.run(found.candidates)
    assert len(made.rehearsed) + len(made.left_out) == len(found.candidates)
    return made, watch


def test_the_search_finds_the_fastest_although_it_leaves_out_much() -> None:
    pruned, _ = search(Wishes(most=1000, within_s=1e9))
    assert any("by arithmetic at most" in each.why for each in pruned.left_out)
    probe, predictor = timed_probe(), ArithmeticPredictor()
    every = [
        (predictor.predict(each.job, probe, each.machines).samples_per_s, each)
        for each in CandidateSource(probe, EIGHT, Job(), Wishes()).collect().candidates
    ]
    assert pruned.rehearsed[0].samples_per_s == max(speed for speed, _ in every)
    exact = max(speed for speed, each in every if each.is_exact)
    assert max(each.samples_per_s for each in pruned.rehearsed if each.is_exact) == exact


def test_each_family_is_rehearsed_first() -> None:
    _, watch = search(Wishes())
    families = [each.family for each in watch.seen]
    every = len(set(families))
    assert len(set(families[:every])) == every == len(Family) - 1
    # Time may run out, and nothing slower than one worker is to be advised.
    assert watch.seen[0].family is Family.ONE
    assert watch.seen[1].is_exact


def test_a_search_ends_after_its_time_or_its_number_and_says_so() -> None:
    short, watch = search(Wishes(within_s=3.0))
    assert len(watch.seen) == 3
    assert any("has ended after 3 s" in each.why for each in short.left_out)
    few, watch = search(Wishes(most=5))
    assert len(watch.seen) == 5 and watch.of == {5}
    assert any("has ended after 5 rehearsals" in each.why for each in few.left_out)


@dataclass
class Slow:
    """A clock on which a second passes each time that it is read."""

    at: float = 0.0

    def now(self) -> float:
        self.at += 1.0
        return self.at


def test_the_time_of_a_search_begins_before_the_first_rehearsal() -> None:
    clock, predictor = Slow(), ArithmeticPredictor()
    found = advise(timed_probe(), EIGHT, wishes=Wishes(within_s=10.0), predictor=predictor, clock=clock)
    # Half of the time for candidates, the rest for bounds and rehearsals.
    assert len(predictor.asked) <= 5
    assert clock.at < 100
    assert found.rehearsed[-1].candidate.family is Family.ONE or len(found.rehearsed) == 1
    assert any("half of the 10 s of the search was over" in each.why for each in found.left_out)
    assert found.late > 20
    said = " ".join(explain(found).split())
    assert f"the time has ended the search: within 10 s {found.late} layouts were not looked at" in said
    assert found.as_data()["ended_by_time"] is True
    whole = advised()
    assert not whole.late and "ended the search" not in explain(whole) and not whole.as_data()["ended_by_time"]


def test_bounds_of_thousands_of_hosts_are_quick() -> None:
    many = Machines(hosts=3000, link=Link(bandwidth=1000.0))
    groups = Job(cluster=Cluster(nworker_groups=3000, nservers_per_group=1000))
    found = CandidateSource(timed_probe(), many, Job(), Wishes()).candidate(Family.DOWNPOUR, groups)
    began = time.process_time()
    assert found.bound(timed_probe()).samples_per_s > 0
    assert time.process_time() - began < 5


def test_fewer_hosts_are_considered_the_fastest_ones() -> None:
    slow = Machines(hosts=8, link=Link(bandwidth=10.0), stragglers={0: 4.0, 5: 2.0})
    found = source(slow, batch=512).collect().candidates
    assert {each.used for each in found} == {1, 2, 4, 6, 8}
    six = [each for each in found if each.used == 6]
    assert all(each.label.endswith("on 6 of 8 hosts without hosts 0, 5") for each in six)
    assert not any(each.machines.stragglers for each in found if each.used < 8)
    assert all(each.given == 8 for each in found)
    one = [each for each in found if each.used == 1]
    assert {each.topology.worker_groups * each.topology.workers_per_group for each in one} == {1, 2}
    assert all(each.machines.link is None for each in one)


def test_one_host_is_advised_where_the_link_is_too_slow_for_several() -> None:
    crawl = replace(EIGHT, link=Link(bandwidth=1.0))
    found = advised(crawl, wishes=Wishes(sync=True))
    assert found.winner.candidate.used == 1
    assert found.winner.candidate.topology.workers_per_group == 2
    assert "on 1 of 8 hosts" in found.winner.candidate.label
    assert job_text(found, found.winner.candidate.job).startswith("# Advised by `topotrain advise` for one host: ")
    assert found.as_data()["winner"]["hosts"] == 1
    assert len(found.rehearsed) <= Wishes().most


class Refusing(ArithmeticPredictor):
    """Cannot predict Downpour."""

    def predict(self, job: Job, probe: Probe, machines: Machines) -> Prediction:
        if job.cluster.max_staleness is not None:
            raise ConfigError("cluster.max_staleness", job.cluster.max_staleness, "cannot be predicted")
        return super().predict(job, probe, machines)


def test_what_cannot_be_predicted_is_told() -> None:
    found = advise(timed_probe(), EIGHT, wishes=Wishes(most=1000), predictor=Refusing())
    assert all(each.candidate.job.cluster.max_staleness is None for each in found.rehearsed)
    assert any("max_staleness" in each.what for each in found.left_out)


def test_a_mistake_in_a_predictor_is_not_hidden() -> None:
    class Broken(ArithmeticPredictor):
        def predict(self, job: Job, probe: Probe, machines: Machines) -> Prediction:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        advise(timed_probe(), EIGHT, predictor=Broken())


# ---- the advice ------------------------------------------------------------------------------------------------------


def test_the_winner_is_the_fastest_and_sync_gives_another_one() -> None:
    found = advised()
    assert found.winner.samples_per_s >= 0.98 * found.rehearsed[0].samples_per_s
    assert found.winner.candidate.changes
    exact = advised(wishes=Wishes(sync=True))
    assert not exact.winner.candidate.changes
    assert found.best_exact is not None
    assert found.best_exact.samples_per_s == pytest.approx(exact.winner.samples_per_s)


def test_of_equally_fast_layouts_the_one_that_changes_nothing_is_taken() -> None:
    # On one host, without a link, everything is computing.
    found = advised(Machines(hosts=1))
    best = max(each.samples_per_s for each in found.rehearsed)
    assert any(each.candidate.changes and each.samples_per_s == best for each in found.rehearsed)
    assert not found.winner.candidate.changes
    assert found.winner.samples_per_s == best


def test_the_advised_layout_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = advised(Machines(hosts=1))
    others = tuple(each for each in found.rehearsed if each is not found.winner)
    given: list[Rehearsed] = []

    def tried(rehearsed: Sequence[Rehearsed], *more: object) -> Iterator[Trial]:
        given.extend(rehearsed)
        return iter(())

    monkeypatch.setattr(trial_runs, "tried", tried)
    assert list(trials_of(replace(found, rehearsed=(*others, found.winner)), timed_probe(), 2, True)) == []
    assert given == [found.winner, others[0]]


def test_a_reason_names_the_busy_resource_and_what_more_servers_do_to_it() -> None:
    gigabit = replace(EIGHT, link=Link(bandwidth=1000.0))
    candidates = source(gigabit, sync=True).collect().candidates
    rehearsal = LayoutSearch(ArithmeticPredictor(), timed_probe(), Wishes(True), search_time(60.0))
    for each in candidates:
        if each.family is Family.SANDBLASTER and each.job.cluster.server_worker_separate:
            rehearsal.run([each])
    found = replace(advised(), rehearsed=tuple(rehearsal.rehearsed))
    one, four = ({each.candidate.server_count: each for each in found.rehearsed}[count] for count in (1, 4))
    text = found.reason(one)
    busy, less = (each.prediction.busiest[0].share for each in (one, four))
    assert text == f"server 0/0's link out is busy {busy:.0%} of the step; with 4 servers {less:.0%}"


def test_a_reason_names_who_is_waited_for_and_else_the_computing() -> None:
    slow = advised(replace(EIGHT, link=Link(bandwidth=1e6), stragglers={1: 4.0}))
    downpour = next(each for each in slow.rehearsed if each.candidate.family is Family.DOWNPOUR)
    assert "for worker 0/1; computing takes" in slow.reason(downpour)
    quick = advised(Machines(hosts=1))
    assert quick.reason(quick.rehearsed[0]) == "workers compute 100% of the step"


def test_the_text_has_a_row_and_a_reason_for_each_layout_and_the_verdict() -> None:
    found = advised(replace(EIGHT, memory_bytes=9_000_000))
    text = explain(found)
    for each in found.rehearsed[:20]:
        assert each.candidate.label in text
    assert "not considered:" in text and "does not fit into memory:" in text
    assert f"advised: {found.winner.candidate.label}" in " ".join(text.split())
    assert "it changes the statistics of the training" in text
    assert " 8 %" in text
    for line in text[text.index("not considered:") :].splitlines():
        assert len(line) <= 120, line


def test_the_winners_file_is_a_job_with_comments() -> None:
    job = Job(name="mine", program="train.py", args=("--epochs", "3"), cluster=Cluster(auto=True))
    found = advised(job=job)
    text = job_text(found, found.winner.candidate.job)
    assert text.startswith("# Advised by `topotrain advise` for 8 hosts, one unit on each: ")
    again = job_file.loads(text)
    assert again == found.winner.candidate.job
    assert (again.name, again.program, again.args, again.cluster.auto) == ("mine", "train.py", ("--epochs", "3"), False)
    assert len(layout(again.cluster).units) == 8


def test_the_data_is_json_and_complete() -> None:
    found = advised()
    data = json.loads(json.dumps(found.as_data()))
    assert data["hosts"] == 8
    assert len(data["candidates"]) == len(found.rehearsed)
    assert data["winner"] in data["candidates"]
    for row in data["candidates"]:
        assert job_file.loads(row["block"]).cluster
        assert row["samples_per_s"] <= row["at_most_samples_per_s"] * 1.001, row["layout"]


def test_proposals_are_told_apart() -> None:
    labels = [each.label for each in source().collect().candidates]
    assert len(labels) == len(set(labels)), sorted(labels)
    assert len(list(proposals(8, (2,)))) < 60
