"""Scripts that end their own processes: in the middle of a loop that is a death, after it the result comes home."""

import pytest
from free_ports import free_port
from job_runner import ALLREDUCE, PROGRAMS, SANDBLASTER, JobRunner
from shells import Shells, ended

pytestmark = pytest.mark.journey

EPOCHS = 3
SUM = "reduce: kSum"


def test_after_the_loop_the_result_comes_home(runner: JobRunner) -> None:
    ended = runner.run(SANDBLASTER, "leaves.py", "exit", "end", extra=SUM)
    ended.check_ledger(EPOCHS)
    assert ended.report["incidents"] == []
    assert ended.report["metrics"] == {"trained": 1.0}


def test_in_the_middle_of_a_loop_it_is_a_death(runner: JobRunner) -> None:
    ended = runner.run(ALLREDUCE, "leaves.py", "exec", "middle", str(runner.folder / "mark"), extra=SUM)
    ended.check_ledger(EPOCHS)
    (incident,) = ended.report["incidents"]
    assert "ended with exit code 0 before its work was done" in incident["what"]
    assert "the whole job" in incident["action"]


def test_a_worker_that_was_started_by_hand_brings_the_result_home_too(shells: Shells) -> None:
    port = free_port()
    words = ("--paddle", f"port={port}", "--workspace", "w", "--os-exit")
    trainer = shells.python(str(PROGRAMS / "by_hand.py"), *words)
    server = shells.python("-m", "topotrain", "pserver", f"--port={port}")
    ended([trainer, server], [0, 0])
    assert (shells.folder / "w" / "final.safetensors").exists()
