"""Loops of other libraries go on after deaths: the same bits, every sample once, and the library's own counters."""

import json
from typing import Any

import pytest
import torch
from job_runner import Ended, JobRunner
from killed_jobs import resumed, terminated
from soak_cases import soak_only, soaked

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

SYNC = "nworkers_per_group: 2 server_worker_separate: true"
INLINE = "nworkers_per_group: 2 nservers_per_group: 2"
DOWNPOUR = "nworker_groups: 2 server_worker_separate: true"
LIBRARIES = ("transformers", "accelerate", "lightning")
PROGRAM = "library_loops.py"


def libraries(first: str) -> list[str]:
    """One of them; in the soak all."""
    return soaked([first], [name for name in LIBRARIES if name != first])


def run(
    runner: JobRunner, cluster: str, name: str, *words: str, extra: str = "", deaths: int = 0
) -> tuple[Ended, dict[str, Any]]:
    """The job's end, and what the library's loop says of itself."""
    library, kind, *more = words
    out = runner.folder / f"{name}-out.json"
    ended = runner.run(cluster, PROGRAM, library, kind, str(out), *more, name=name, extra=extra)
    assert len(ended.report["incidents"]) == deaths
    return ended, json.loads(out.read_text())


def different(one: Ended, other: Ended) -> list[str]:
    assert one.final.keys() == other.final.keys()
    return [name for name, tensor in one.final.items() if not torch.equal(tensor, other.final[name])]


@pytest.mark.parametrize("library", libraries("lightning"))
def test_the_whole_job_starts_again_and_ends_with_the_same_bits(library_runner: JobRunner, library: str) -> None:
    """With random numbers in the model and in the dataset; all that the library keeps is as without the death."""
    plain, expected = run(library_runner, INLINE, "undisturbed", library, "net")
    ended, found = run(
        library_runner, INLINE, "job", library, "net", "--die", "1:17", extra="snapshot_s: 0.1", deaths=1
    )
    assert not different(plain, ended)
    assert found == expected


# What is as at the beginning of the epoch in a group that starts again alone, as what `tt.keep` has.
KEPT = ("counted", "seen", "logs", "batches")
TWICE = ["1:14", "1:1"]
"""Deaths in one epoch."""


@pytest.mark.parametrize(
    ("library", "deaths"),
    soaked(
        [("transformers", [*TWICE, "0:1:validating"])],
        [
            ("transformers", ["0:24:validating"]),
            ("accelerate", TWICE),
            ("lightning", [*TWICE, "0:1:validating"]),
            ("lightning", ["0:24:validating"]),
        ],
    ),
)
def test_a_group_starts_again_behind_a_step_or_in_a_validation_and_ends_with_the_same_bits(
    library_runner: JobRunner, library: str, deaths: list[str]
) -> None:
    """The process dies between the servers' step and that of the schedule, also twice in one epoch.

    A validation at the end of an epoch that was interrupted runs again. accelerate has none.
    """
    plain, expected = run(library_runner, SYNC, "undisturbed", library, "plain")
    ended, found = run(library_runner, SYNC, "job", library, "plain", "--die", *deaths, deaths=len(deaths))
    assert not different(plain, ended)
    for name in ("evaluated", "validated"):
        assert found.get(name, [12, 24, 36]) == [12, 24, 36]
    for name in KEPT:
        assert (library != "transformers" or name != "logs") or found["logs"][-11:] == expected["logs"][-11:]
        found.pop(name, None), expected.pop(name, None)
    assert found == expected


@soak_only
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_workers_agree_about_the_rate_behind_the_first_step(library_runner: JobRunner, library: str) -> None:
    """The process that dies cannot know that its schedule steps with each step. The other one may.

    Servers refuse a step with two rates, which would end the job.
    """
    _, found = run(library_runner, SYNC, "job", library, "plain", "--die", "0:1", deaths=1)
    assert library == "accelerate" or found["step"] == 36


@pytest.mark.parametrize("library", libraries("accelerate"))
def test_every_sample_counts_once_where_a_group_starts_again(library_runner: JobRunner, library: str) -> None:
    ended, _ = run(library_runner, DOWNPOUR, "job", library, "ledger", "--die", "1:8", extra="reduce: kSum", deaths=1)
    (cells,) = ended.final.values()
    assert torch.equal(cells, torch.full_like(cells, 3)), cells


@soak_only
def test_a_loop_over_range_goes_on_with_the_same_bits(library_runner: JobRunner) -> None:
    """The epochs that are over have no batch, and processes that read the data draw random numbers of their own."""
    words = ("accelerate", "net", "--range", "--loaders", "1")
    plain, expected = run(library_runner, INLINE, "undisturbed", *words)
    ended, found = run(library_runner, INLINE, "job", *words, "--die", "1:17", extra="snapshot_s: 0.1", deaths=1)
    assert not different(plain, ended)
    assert found == expected


@soak_only
@pytest.mark.parametrize("library", LIBRARIES)
def test_sigterm_leaves_a_snapshot_from_which_the_same_bits_come(library_runner: JobRunner, library: str) -> None:
    plain, expected = run(library_runner, SYNC, "undisturbed", library, "net")
    out = library_runner.folder / "out.json"
    words = (PROGRAM, library, "net", str(out), "--at", "17")
    code, said, workspace = terminated(library_runner, SYNC, *words, extra="snapshot_s: 1000", all=True)
    found = latest(workspace)
    assert code == 143 and found is not None and 17 <= found.steps(0) < 36, said
    assert not out.exists()
    ended = resumed(library_runner, workspace)
    assert not different(plain, ended)
    assert json.loads(out.read_text()) == expected


@soak_only
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_job_goes_on_with_other_groups_and_every_sample_counts_once(library_runner: JobRunner, library: str) -> None:
    """The groups are in different epochs at the snapshot, so two epochs are left in part."""
    out = library_runner.folder / "out.json"
    words = (PROGRAM, library, "ledger", str(out), "--at", "20", "--together", "1", "--slow", "1")
    code, said, workspace = terminated(library_runner, DOWNPOUR, *words, extra="snapshot_s: 1000 reduce: kSum")
    found = latest(workspace)
    assert code == 143 and found is not None, said
    ended = resumed(library_runner, workspace, "--set", "cluster.nworker_groups=3")
    (cells,) = ended.final.values()
    assert torch.equal(cells, torch.full_like(cells, 3)), (found.steps(0), cells)
