"""Workers that leave a job of one group and join it, and whole groups: layouts, what is refused, and the launcher.

What is decided: policy.txt.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.launch_targets import launch, parts, processes
from topotrain.config import job_file
from topotrain.config.job import Apply, Cluster, ConfigError, Grads, Job, OnFailure, Placement, Shard
from topotrain.config.topology import Address, Role, layout
from topotrain.core.events import Bounded, Event, Failed, Incident, Notice, Recovered, Resized, Saved, Serving, Started
from topotrain.extensions.elastic.eligibility import absent_groups, leave_refusal
from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import RequestSnapshot, ResizeRefused, ResizeRequest, RestartResized
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy, recovery
from topotrain.launch.recovery.resize import resized
from topotrain.parallel.api.prepare_split import SplitExtension
from topotrain.parallel.capture import device_scopes
from topotrain.training.worker_limits import bound

BEGAN = 100.0
ALLREDUCE = Cluster(nworkers_per_group=3, nservers_per_group=3)
SANDBLASTER = Cluster(nworkers_per_group=3, nservers_per_group=2, server_worker_separate=True)
SAVED = Saved("server 0/0", 4, 70, "manifests/000004", "end")


def machine(job: Job) -> RecoveryPolicy:
    """A job that trains."""
    topology = layout(job.cluster)
    made = recovery(job, topology, BEGAN)
    assert made is not None
    for unit in topology.units:
        for who in (*unit.workers, *unit.servers):
            made.on_event(Started(str(who), 7), BEGAN)
    return made


def job(cluster: Cluster = SANDBLASTER, **fields: Any) -> Job:
    return Job(cluster=cluster, **fields)


def refused(words: list[Any]) -> str:
    (word,) = words
    assert isinstance(word, ResizeRefused)
    return word.error


# ---- layouts ---------------------------------------------------------------------------------------------------------


def counts(cluster: Cluster) -> tuple[int, int, int, int]:
    return (
        cluster.nworkers_per_group,
        cluster.nworkers_per_procs,
        cluster.nservers_per_group,
        cluster.nservers_per_procs,
    )


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE])
def test_units_of_another_tool_are_neither_more_nor_renumbered(cluster: Cluster) -> None:
    """Nobody could start another one, so workers come as far as there are units."""
    whole = layout(cluster)
    made = recovery(job(cluster), whole, BEGAN, near=frozenset({"worker 0/0"}))
    assert made is not None
    text = refused(made.on_resize_request(ResizeRequest("join", 1), 105.0))
    units = len(whole.units)
    assert f"they need {units + 1} units, and {units} were started" in text
    assert made.on_resize_request(ResizeRequest("leave", 2), 106.0) == [RequestSnapshot()]
    *_, relay = made.on_event(SAVED, 107.0)
    assert isinstance(relay, RestartResized)
    smaller = layout(relay.job.cluster, (0,) * units)
    assert [bool(unit.workers or unit.servers) for unit in smaller.units].count(False) == 2
    for server in smaller.servers(0):
        assert smaller.unit_of(server) == whole.unit_of(server)
    made.begin_resized(relay.job, smaller)
    # an idle unit that is gone costs nothing, until it would be needed
    (incident,) = made.on_unit_lost(2, Failed("unit 2", "died", "gone", ""), 108.0)
    assert isinstance(incident, Incident)
    assert made.on_resize_request(ResizeRequest("join", 1), 109.0) == [RequestSnapshot()]
    made.on_event(replace(SAVED, why="end"), 110.0)
    made.begin_resized(replace(relay.job, cluster=resized(cluster, 2)), layout(resized(cluster, 2), (0,) * units))
    made.on_unit_lost(2, Failed("unit 2", "died", "gone", ""), 111.0)
    assert "unit 2 is gone" in refused(made.on_resize_request(ResizeRequest("join", 1), 112.0))
    assert "were started" in refused(made.on_resize_request(ResizeRequest("join", 2), 113.0))


@pytest.mark.parametrize(
    ("cluster", "workers", "expected"),
    [
        (SANDBLASTER, 2, (2, 1, 2, 1)),
        (ALLREDUCE, 2, (2, 1, 2, 1)),
        (Cluster(), 3, (3, 1, 3, 1)),
        (Cluster(nworkers_per_group=3, nworkers_per_procs=3), 5, (5, 5, 1, 1)),
        (replace(ALLREDUCE, nworkers_per_procs=3, nservers_per_procs=3), 2, (2, 2, 2, 2)),
        (Cluster(nworkers_per_group=3, nserver_groups=0), 4, (4, 1, 1, 1)),
    ],
    ids=["sandblaster", "allreduce", "one worker and its server", "one unit", "all in one unit", "no servers"],
)
def test_servers_follow_where_each_worker_has_one_beside_it(cluster: Cluster, workers: int, expected: Any) -> None:
    found = resized(cluster, workers)
    assert counts(found) == expected
    framework = layout(found).framework
    assert framework == layout(cluster).framework or layout(cluster).workers_per_group == 1


# ---- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "wish", "words"),
    [
        (job(replace(SANDBLASTER, nworker_groups=2)), ResizeRequest("leave", 1), "2 worker groups.*use --group"),
        (job(snapshot_s=0), ResizeRequest("leave", 1), "takes none .snapshot_s: 0"),
        (job(), ResizeRequest("leave", 3), "has 3 workers, and one has to stay"),
        (job(), ResizeRequest("join", 0), "at least 1"),
        (job(replace(SANDBLASTER, shares=(1, 1, 2))), ResizeRequest("leave", 1), "with 2 workers: cluster.shares"),
        (
            job(replace(SANDBLASTER, nworkers_per_group=4, nworkers_per_procs=2)),
            ResizeRequest("join", 1),
            "with 5 workers.*procs",
        ),
        (job(), ResizeRequest("join", 1 << 20), "must be at most"),
    ],
    ids=["groups", "no snapshots", "all", "none", "shares", "units that are not full", "too many"],
)
def test_what_the_conf_forbids_is_refused_and_nothing_happens(changed: Job, wish: ResizeRequest, words: str) -> None:
    made = machine(changed)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused(made.on_resize_request(wish, 105.0)))
    assert made.due is None
    assert made.on_event(SAVED, 106.0) == [SAVED]


# ---- scripts ---------------------------------------------------------------------------------------------------------


def said(fields: dict[str, Any], model: nn.Module, loader: Any, cut: bool = False, main: bool = True) -> list[Bounded]:
    """What worker (0,0) tells of its script in a job with these fields."""
    found: list[Bounded] = []
    cluster = fields.pop("cluster", SANDBLASTER)
    place = SimpleNamespace(job=job(cluster, **fields), topology=layout(cluster))
    here = SimpleNamespace(is_main=main, me=Address(Role.WORKER, 0, 0), place=place, emit=found.append)
    here.names_workers = SplitExtension().splits
    bound(here, model, loader, cut)  # type: ignore[arg-type]
    return found


def test_the_first_worker_tells_what_only_its_script_shows() -> None:
    model, loader = nn.Linear(2, 2), DataLoader(TensorDataset(torch.zeros(21)), batch_size=5)
    assert said({}, model, loader) == []
    (told,) = said({"per_worker_batch": True}, model, loader)
    assert told.most == 4 and "for each of 4 workers" in told.text
    assert said({"per_worker_batch": True}, model, loader, main=False) == []
    for split in (said({}, model, loader, cut=True), said({"placement": Placement.kAuto}, model, loader)):
        assert split[0].most == 0 and "one model is split" in split[0].text
    model.__dict__[device_scopes.PLACE] = "/job:worker/task:0"
    assert said({"cluster": Cluster()}, model, loader)[0].most == 0, "with more workers it would be split"
    (told,) = said({}, nn.Linear(2, 2), None)
    assert told.most == 0 and "divides its data itself" in told.text


# ---- groups ----------------------------------------------------------------------------------------------------------

DOWNPOUR = Cluster(nworker_groups=3, server_worker_separate=True)
GROUPS = Job(cluster=DOWNPOUR, on_failure=OnFailure.kContinue, restarts=1)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(cluster=Cluster(nworkers_per_group=2, server_worker_separate=True)), "leave WORKSPACE --workers 1"),
        (replace(GROUPS, on_failure=OnFailure.kStop), "kContinue is needed"),
        (replace(GROUPS, shard=Shard.kStatic), "shard: kStatic"),
        (replace(GROUPS, apply=Apply.kOnArrival, grads=Grads.kHidden), "kOnArrival"),
        (Job(cluster=Cluster(nworker_groups=2, nserver_groups=2)), "servers of its own"),
        (Job(cluster=Cluster(nworker_groups=2, nworkers_per_group=2, nserver_groups=0)), ""),
        (GROUPS, ""),
    ],
    ids=["synchronous", "kStop", "static", "on arrival", "hogwild", "no servers", "downpour"],
)
def test_layouts_that_cannot_do_it_say_why(job: Job, words: str) -> None:
    why = leave_refusal(replace(job, cluster=job.cluster), layout(job.cluster), job.cluster.nworker_groups - 1)
    assert (words in why) if words else (why == "" or job.cluster.nserver_groups == 0)


def test_a_job_may_begin_with_some_of_its_groups() -> None:
    job = replace(GROUPS, start_groups=1)
    assert absent_groups(job, layout(DOWNPOUR)) == {1, 2}
    for wrong in (replace(GROUPS, start_groups=4), replace(job, shard=Shard.kStatic)):
        with pytest.raises(ConfigError, match="start_groups"):
            absent_groups(wrong, layout(DOWNPOUR))


# ---- the launcher ----------------------------------------------------------------------------------------------------


class Caller:
    """Asks at the control socket, on a thread of its own, when the processes are there; keeps the answer."""

    def __init__(self, folder: Path, wish: ResizeRequest) -> None:
        self.folder, self.wish, self.heard, self.events = folder, wish, "", []  # type: ignore[var-annotated]
        self.thread = threading.Thread(target=self.ask)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        serving = {each.who for each in self.events if isinstance(each, Serving)}
        if serving >= {"server 0/0", "worker 0/0", "worker 0/1"} and not self.thread.ident:
            self.thread.start()

    def ask(self) -> None:
        try:
            self.heard = json.dumps(ask(self.folder, self.wish))
        except ConfigError as error:
            self.heard = str(error)
        over = Path(self.folder, "run", "over")
        if not any(isinstance(event, Resized) for event in self.events):
            over.touch()


@pytest.mark.journey
def test_a_job_goes_on_with_one_worker_more_and_the_caller_is_told_when_it_trains(tmp_path: Path, mark: str) -> None:
    caller = Caller(tmp_path, ResizeRequest("join", 1, 60.0))
    roles = parts(worker_0_0="stay once", worker_0_1="stay once", server_0_0="saves once")
    outcome, events = launch(tmp_path, roles, caller, restarts=3)
    caller.thread.join(10)
    assert (outcome.code, outcome.cause) == (0, None)
    assert json.loads(caller.heard) == {
        "workers": 3,
        "step": 70,
        "text": "a worker has joined: the job goes on after step 70 with 3 workers",
    }
    assert [type(event) for event in events if isinstance(event, Resized | Recovered)] == [Resized, Recovered]
    assert job_file.load(tmp_path / "run" / "job.conf").cluster.nworkers_per_group == 3
    assert {tuple(entry["roles"]) for entry in processes(tmp_path)} > {("worker 0/2",)}
    log = (tmp_path / "logs" / "worker-0-1.log").read_text()
    assert "--- worker 0/1 starts again: the job goes on with nworkers_per_group: 3 ---" in log


@pytest.mark.journey
def test_a_job_of_which_no_snapshot_can_be_taken_goes_on_as_it_was(tmp_path: Path, mark: str) -> None:
    caller = Caller(tmp_path, ResizeRequest("leave", 1, 60.0))
    roles = parts(worker_0_0="until over", worker_0_1="until over", server_0_0="unsaved until over")
    outcome, events = launch(tmp_path, roles, caller, restarts=3)
    caller.thread.join(10)
    assert (outcome.code, outcome.cause) == (0, None)
    assert caller.heard == "--workers = 1: it would resume from a snapshot, and none can be taken: why"
    assert not [event for event in events if isinstance(event, Resized)]
    assert not [event for event in events if isinstance(event, Notice) and "starts again" in event.text]


@pytest.mark.journey
def test_where_a_death_ends_the_job_no_worker_leaves(tmp_path: Path, mark: str) -> None:
    caller = Caller(tmp_path, ResizeRequest("leave", 1, 60.0))
    roles = parts(worker_0_0="until over", worker_0_1="until over", server_0_0="until over")
    outcome, _ = launch(tmp_path, roles, caller)
    caller.thread.join(10)
    assert outcome.code == 0 and "kContinue is needed" in caller.heard
