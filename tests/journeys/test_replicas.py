"""Servers with a second copy: they are killed one after the other, and the result has the bits of a calm run."""

import pytest
import torch
from job_runner import JobRunner

pytestmark = pytest.mark.journey

PAIRS = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp compression: kInt8"


def test_each_server_may_die_and_the_result_does_not_show_it(runner: JobRunner) -> None:
    """The one that decides, the one that has taken its part, and the one that has taken that one's."""
    # What is lazy has the same bits.
    calm = runner.run(PAIRS, "twice.py", str(runner.folder / "calm"), name="calm").final
    kills = ("4:0", "11:1", "19:1", "30:0")
    goes_on = "pull: kLazy on_failure: kContinue restarts: 2 snapshot_s: 0.2"
    ended = runner.run(f"{PAIRS} replicas: 2", "twice.py", str(runner.folder / "job"), *kills, extra=goes_on)
    assert calm.keys() == ended.final.keys()
    for name, values in calm.items():
        assert torch.equal(values, ended.final[name]), name
    incidents = ended.report["incidents"]
    assert [incident["who"][-1] for incident in incidents] == ["0", "1", "1", "0"]
    assert {incident["action"] for incident in incidents} == {
        "its second copy goes on; a fresh process becomes the second one"
    }
    assert all(0 < incident["waited_s"] < 20 for incident in incidents)
