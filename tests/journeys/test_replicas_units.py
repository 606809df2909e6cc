"""Servers with a second copy in units that are started one by one: a process dies, then a whole unit, then one more."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hosts_town import Job, port
from shop import Shop

pytestmark = pytest.mark.journey

PAIRS = "nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 2 server_worker_separate: true road: kTcp"
# The product waits longer before it takes a silent unit for a lost one; a test need not.
HASTY = """
import sys
from topotrain.cli import main
from topotrain.launch import meeting
meeting.BEAT_S, meeting.ALIVE_S = 0.3, 1.5
from topotrain.launch import company, part
company.LOST_S, company.STORE_LOST_S, part.STORE_S = 3.0, 2.5, 1.0
sys.exit(main())
"""
HASTILY = (sys.executable, "-c", HASTY, "unit")


@pytest.fixture
def units(shop: Shop) -> Iterator[Any]:
    """Makes a job of three units: the workers, and each server with its own."""
    made: list[Job] = []

    def begin(*kills: str) -> Job:
        words = [str(shop.folder / "units"), *kills]
        job = Job(shop, f"{PAIRS} replicas: 2", "twice.py", words, [None] * 3, f"tcp://127.0.0.1:{port()}?job=twice")
        job.conf.write_text(f"on_failure: kContinue restarts: 2 snapshot_s: 0.2\n{job.conf.read_text()}")
        made.append(job)
        for rank in range(3):
            job.start(rank, command=HASTILY)
        return job

    yield begin
    for job in made:
        for unit in job.units.values():
            unit.kill()


def test_a_server_and_a_unit_die_and_nobody_can_tell_from_the_result(shop: Shop, units: Any) -> None:
    calm = shop.run(PAIRS, "twice.py", str(shop.folder / "calm"), name="calm").final
    job = units("6:0", "16:unit-2", "26:0")
    ends = {rank: unit.end() for rank, unit in job.units.items()}
    assert [code for code, _, _ in ends.values()] == [0, 0, -9], "\n".join(err for _, _, err in ends.values())
    assert calm.keys() == job.final.keys()
    for name, values in calm.items():
        assert torch.equal(values, job.final[name]), name
    incidents = json.loads((job.folder / "report-0.json").read_text())["incidents"]
    assert [incident["who"] for incident in incidents] == ["server 0/0", "unit 2", "server 0/0"]
    assert "fresh processes in unit 0" in incidents[1]["action"]
