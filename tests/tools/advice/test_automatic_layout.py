"""`cluster { auto: true }`: what it excludes, what it chooses, and that nothing runs a job without a layout."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from topotrain.config import job_file
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.core.events import Resources, StepDone
from topotrain.tools.advice import trial_runs
from topotrain.tools.advice.auto_rules import LAYOUT_FIELDS, without_layout
from topotrain.tools.advice.trial_runs import AutomaticLayout, ShortRun, choose
from topotrain.tools.cli import app
from topotrain.tools.cli.run import chosen

AUTO = Job(name="a", program="train.py", cluster=Cluster(auto=True, workspace="w"))
OTHERS = (
    "nworker_groups: 2, nworkers_per_group: 2, nservers_per_group: 2, sync_freq: 2, n_push: 2, nworkers_per_procs: 2, "
    "nservers_per_procs: 2, n_fetch: 2, replicas: 2, backup: 2, max_staleness: 2, nserver_groups: 0, "
    "server_worker_separate: true, shares: [1], agreement: kGossip, moving_rate: 0.5, engine: kGloo, algorithm: kRing, "
    "compression: kInt8, compression_ratio: 0.5, weigh: kEqual, fragments: 2, overlap: 1, keep: kDrop, blend: 0.1, "
    "quorum: 1, slack: 0.1, merge: kRadial, pace: kTime"
)
"""Another value than the default for each field of a layout but `outer`."""


def test_what_it_decides_is_refused_by_name() -> None:
    others = dict(each.split(": ") for each in OTHERS.split(", "))
    for name, value in others.items():
        with pytest.raises(ConfigError) as refused:
            job_file.loads("cluster { auto: true }", overrides=[f"cluster.{name}={value}"])
        assert refused.value.field == f"cluster.{name}"
    outer = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
    with pytest.raises(ConfigError, match=r"cluster\.outer.*left out with auto: true"):
        job_file.loads(f"cluster {{ auto: true {outer} }}")
    assert {*others, "outer"} == set(LAYOUT_FIELDS)
    for more in ("placement: kAuto", "partition { match: 'a' }", "start_groups: 1"):
        with pytest.raises(ConfigError, match=r"(partition|placement|start_groups).*with cluster\.auto"):
            job_file.loads(f"cluster {{ auto: true }} grads: kHidden {more}")
    words = r"cluster\.auto = true: has no layout before it is measured: `topotrain run`"
    with pytest.raises(ConfigError, match=words):
        layout(AUTO.cluster)


class Machine:
    """Pretends to run jobs: a number of steps per second for each number of workers of a group.

    ran: the jobs, in order.
    """

    def __init__(self, steps: dict[int, float], samples: int = 8, failure: str = "", memory: int = 1000) -> None:
        self.steps, self.samples, self.failure, self.memory = steps, samples, failure, memory
        self.ran: list[Job] = []

    def run(self, processes: object, job: Job, seconds: float) -> ShortRun:
        self.ran.append(job)
        run, workers = ShortRun(), job.cluster.nworkers_per_group
        if self.failure:
            run.failed, run.note = True, self.failure
            return run
        run.add(Resources("worker 0/0", 1, self.memory, 1.0))
        rate = self.steps.get(workers, 0.0)
        for second in (0, 1) if rate else ():
            step = 10 + round(second * rate)
            for index in range(workers):
                samples = step * self.samples // workers
                run.add(StepDone(f"worker 0/{index}", float(second), step, samples, None, 0.0, 0, 0, 0))
        run.note = "too short"
        return run


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AutomaticLayout]:
    """Chooses a layout on a made-up machine."""

    def choose_on(machine: Machine, job: Job = AUTO, cores: int = 2) -> AutomaticLayout:
        monkeypatch.setattr(trial_runs, "forked_processes", lambda served: nullcontext(None))
        monkeypatch.setattr(trial_runs, "run_for", machine.run)
        monkeypatch.setattr(trial_runs, "allowed_cores", lambda: cores)
        return choose(job)

    return choose_on


def test_other_fields_are_kept_and_the_block_that_is_shown_gives_the_same_job(chooses) -> None:  # type: ignore[no-untyped-def]
    job = replace(AUTO, cluster=replace(AUTO.cluster, transport="kTcp", slice_bytes=65536))  # type: ignore[arg-type]
    found = chooses(Machine({1: 10.0, 2: 18.0}), job)
    # Of equally fast layouts one with few processes.
    assert (found.job.cluster.nworkers_per_group, found.job.cluster.nworker_groups) == (2, 1)
    chosen_fields = {name: getattr(found.job.cluster, name) for name in LAYOUT_FIELDS}
    written = replace(job.cluster, auto=False, **chosen_fields)
    assert found.job.cluster == written and found.job.digest() == replace(job, cluster=written).digest()
    found = chooses(Machine({1: 10.0, 2: 12.0, 4: 30.0}), cores=4)
    first, second = found.explain().splitlines()
    assert first.startswith(
        "auto: in-memory Sandblaster, 4 workers, 4 servers: 240 samples/s, measured here in at most 3 s; next: "
    )
    again = job_file.loads(second.removeprefix("auto: by hand this is ")).cluster
    assert replace(again, workspace="w") == found.job.cluster


def test_only_layouts_that_compute_the_same_are_run(chooses) -> None:  # type: ignore[no-untyped-def]
    machine = Machine({1: 10.0, 8: 20.0}, samples=32)
    chooses(machine, cores=8)
    assert [job.cluster.nworkers_per_group for job in machine.ran] == [1, 8, 8, 8, 8, 4]
    assert {job.cluster.nworker_groups for job in machine.ran} == {1}
    # The block by hand is all that is chosen: the script decides whether gradients may be hidden.
    assert {without_layout(job) for job in machine.ran} == {without_layout(AUTO)}
    assert all(job.cluster.outer is None and job.cluster.compression.value == "kNone" for job in machine.ran)


@pytest.mark.parametrize(("samples", "memory", "most"), [(3, 1000, 3), (32, 1 << 60, 1), (0, 1000, 8)])
def test_workers_are_as_many_as_the_batch_and_the_memory_allow(chooses, samples: int, memory: int, most: int) -> None:  # type: ignore[no-untyped-def]
    machine = Machine({1: 10.0}, samples, memory=memory)
    chooses(machine, cores=8)
    assert max(job.cluster.nworkers_per_group for job in machine.ran) == most


def test_a_program_without_a_loader_is_compared_by_its_steps_and_a_short_or_failing_one_not(chooses) -> None:  # type: ignore[no-untyped-def]
    found = chooses(Machine({1: 10.0, 2: 9.0}, samples=0))
    assert found.explain().startswith("auto: in-memory Sandblaster, 2 workers, 2 servers: 18 steps/s, measured here")
    machine = Machine({})
    found = chooses(machine)
    assert len(machine.ran) == 1
    assert found.job.cluster == replace(AUTO.cluster, auto=False)
    assert "because nothing could be compared: too short" in found.explain()
    machine = Machine({}, failure="it failed: no data")
    with pytest.raises(ConfigError, match=r"program = 'train\.py': it failed: no data"):
        chooses(machine)
    assert len(machine.ran) == 1
    # A job with a layout is not measured.
    job = Job(program="gone.py", cluster=Cluster(nworkers_per_group=2))
    assert chosen(job, "") is job


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "auto.conf"],
        ["unit", "auto.conf", "--rank", "0", "--nprocs", "1", "--rendezvous", "tcp://127.0.0.1:29411", "train.py"],
        ["launch", "slurm", "auto.conf", "train.py", "--dry-run"],
        ["compare", "auto.conf", "train.py"],
        ["chaos", "auto.conf", "train.py"],
        ["doctor", "auto.conf"],
    ],
)
def test_other_commands_refuse_it_with_the_way_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("auto.conf").write_text("cluster { auto: true }\n")
    Path("train.py").write_text("")
    with pytest.raises((SystemExit, typer.Exit)) as left:
        app.main(words)
    assert left.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "cluster.auto = true: has no layout before it is measured" in told
    assert "topotrain advise PROGRAM --hosts N" in told
