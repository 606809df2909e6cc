"""Loops of other libraries go on after deaths: the same bits, every sample once, and the library's own counters."""

import json
from typing import Any

import pytest
import torch
from job_runner import Ended, JobRunner

pytestmark = pytest.mark.journey

SYNC = "nworkers_per_group: 2 server_worker_separate: true"
INLINE = "nworkers_per_group: 2 nservers_per_group: 2"
DOWNPOUR = "nworker_groups: 2 server_worker_separate: true"
PROGRAM = "library_loops.py"


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


def test_the_whole_job_starts_again_and_ends_with_the_same_bits(library_runner: JobRunner) -> None:
    """With random numbers in the model and in the dataset; all that the library keeps is as without the death."""
    plain, expected = run(library_runner, INLINE, "undisturbed", "lightning", "net")
    words = ("lightning", "net", "--die", "1:17")
    ended, found = run(library_runner, INLINE, "job", *words, extra="snapshot_s: 0.1", deaths=1)
    assert not different(plain, ended)
    assert found == expected


# What is as at the beginning of the epoch in a group that starts again alone, as what `tt.keep` has.
KEPT = ("counted", "seen", "logs", "batches")


def test_a_group_starts_again_behind_a_step_or_in_a_validation_and_ends_with_the_same_bits(
    library_runner: JobRunner,
) -> None:
    """The process dies between the servers' step and that of the schedule, also twice in one epoch.

    A validation at the end of an epoch that was interrupted runs again. accelerate has none.
    """
    deaths = ["1:14", "1:1", "0:1:validating"]
    plain, expected = run(library_runner, SYNC, "undisturbed", "transformers", "plain")
    ended, found = run(library_runner, SYNC, "job", "transformers", "plain", "--die", *deaths, deaths=len(deaths))
    assert not different(plain, ended)
    for name in ("evaluated", "validated"):
        assert found.get(name, [12, 24, 36]) == [12, 24, 36]
    for name in KEPT:
        assert name != "logs" or found["logs"][-11:] == expected["logs"][-11:]
        found.pop(name, None), expected.pop(name, None)
    assert found == expected


def test_every_sample_counts_once_where_a_group_starts_again(library_runner: JobRunner) -> None:
    ended, _ = run(
        library_runner, DOWNPOUR, "job", "accelerate", "ledger", "--die", "1:8", extra="reduce: kSum", deaths=1
    )
    (cells,) = ended.final.values()
    assert torch.equal(cells, torch.full_like(cells, 3)), cells
