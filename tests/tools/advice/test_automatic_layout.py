"""`cluster { auto: true }`: what it excludes, what it chooses, and that nothing runs a job without a layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from arithmetic_predictor import ArithmeticPredictor, timed_probe

from topotrain.config import job_file
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.tools.advice.auto_rules import LAYOUT_FIELDS, without_layout
from topotrain.tools.advice.automatic_layout import choose
from topotrain.tools.cli import app
from topotrain.tools.cli.run import chosen

AUTO = Job(name="a", program="train.py", cluster=Cluster(auto=True, workspace="w"))
OTHERS = {
    **dict.fromkeys(("nworker_groups", "nworkers_per_group", "nservers_per_group", "sync_freq", "n_push"), "2"),
    **dict.fromkeys(
        ("nworkers_per_procs", "nservers_per_procs", "n_fetch", "replicas", "backup", "max_staleness"), "2"
    ),
    "nserver_groups": "0",
    "server_worker_separate": "true",
    "shares": "[1]",
    "agreement": "kGossip",
    "moving_rate": "0.5",
    "engine": "kGloo",
    "algorithm": "kRing",
    "compression": "kInt8",
    "compression_ratio": "0.5",
    "weigh": "kEqual",
    "fragments": "2",
    "overlap": "1",
    "keep": "kDrop",
    "blend": "0.1",
    "quorum": "1",
    "slack": "0.1",
    "merge": "kRadial",
    "pace": "kTime",
}
"""Another value than the default for each field of a layout but `outer`."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_it_decides_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job_file.loads("cluster { auto: true }", overrides=[f"cluster.{name}={OTHERS[name]}"])
    assert refused.value.field == f"cluster.{name}"


def test_an_outer_optimizer_is_refused() -> None:
    outer = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
    with pytest.raises(ConfigError, match=r"cluster\.outer.*left out with auto: true"):
        job_file.loads(f"cluster {{ auto: true {outer} }}")
    assert {*OTHERS, "outer"} == set(LAYOUT_FIELDS)


@pytest.mark.parametrize("more", ["placement: kAuto", "partition { match: 'a' }", "start_groups: 1"])
def test_fields_of_the_job_that_need_a_layout_are_refused(more: str) -> None:
    with pytest.raises(ConfigError, match=r"(partition|placement|start_groups).*with cluster\.auto"):
        job_file.loads(f"cluster {{ auto: true }} grads: kHidden {more}")


def test_a_cluster_without_a_layout_cannot_be_laid_out() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.auto = true: has no layout before it is measured: `topotrain run`"
    ):
        layout(AUTO.cluster)


def test_other_fields_are_kept_and_the_digest_is_that_of_the_block_by_hand() -> None:
    job = replace(AUTO, cluster=replace(AUTO.cluster, transport="kTcp", slice_bytes=65536))  # type: ignore[arg-type]
    found = choose(job, timed_probe(cores=2), ArithmeticPredictor())
    by_hand = Cluster(
        nworkers_per_group=2,
        nworkers_per_procs=2,
        nservers_per_group=2,
        nservers_per_procs=2,
        workspace="w",
        transport="kTcp",  # type: ignore[arg-type]
        slice_bytes=65536,
    )
    chosen_counts = (found.job.cluster.nworkers_per_group, found.job.cluster.nworker_groups)
    assert chosen_counts == (2, 1)
    # Of equally fast layouts the one without a process for servers.
    assert found.advice.winner.candidate.processes == 3
    assert not found.job.cluster.auto
    assert (found.job.cluster.workspace, found.job.cluster.slice_bytes) == ("w", 65536)
    written = replace(by_hand, **{name: getattr(found.job.cluster, name) for name in LAYOUT_FIELDS})
    assert found.job.cluster == written
    assert found.job.digest() == replace(job, cluster=written).digest()


def test_the_block_that_is_shown_gives_the_same_job() -> None:
    found = choose(AUTO, timed_probe(cores=4), ArithmeticPredictor())
    first, second = found.explain().splitlines()
    assert first.startswith(f"auto: {found.advice.winner.candidate.label}: ")
    assert "samples/s ± 8 %" in first and "; next: " in first
    block = second.removeprefix("auto: by hand this is ")
    again = job_file.loads(block).cluster
    assert replace(again, workspace="w") == found.job.cluster


def test_only_layouts_that_compute_the_same_are_looked_at() -> None:
    predictor = ArithmeticPredictor()
    choose(AUTO, timed_probe(cores=8), predictor)
    assert predictor.asked
    assert {job.cluster.nworker_groups for job in predictor.asked} == {1}
    # The block by hand is all that is chosen: the script decides whether gradients may be hidden.
    assert {without_layout(job) for job in predictor.asked} == {without_layout(AUTO)}
    assert all(job.cluster.outer is None and job.cluster.compression.value == "kNone" for job in predictor.asked)


def test_an_emulated_link_is_taken_into_account() -> None:
    job = replace(AUTO, cluster=job_file.loads("cluster { auto: true link { bandwidth: 1 } }").cluster)
    found = choose(job, timed_probe(cores=2), ArithmeticPredictor())
    # One unit needs no link.
    assert len(layout(found.job.cluster).units) == 1
    assert found.job.cluster.link == job.cluster.link


def test_a_job_with_a_layout_is_not_measured() -> None:
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
