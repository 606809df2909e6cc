"""Scripts that end their own processes: in the middle of a loop that is a death, after it the result comes home."""

import pytest
from free_ports import free_port
from job_runner import ALLREDUCE, DOWNPOUR, HOGWILD, PROGRAMS, SANDBLASTER, JobRunner
from shells import Shells, ended
from soak_cases import soak_only, soaked

pytestmark = pytest.mark.journey

EPOCHS = 3
SUM = "reduce: kSum"


@pytest.mark.parametrize(("how", "cluster"), soaked([("exit", SANDBLASTER)], [("exec", DOWNPOUR), ("c", ALLREDUCE)]))
def test_after_the_loop_the_result_comes_home(runner: JobRunner, how: str, cluster: str) -> None:
    ended = runner.run(cluster, "leaves.py", how, "end", extra=SUM)
    ended.check_ledger(EPOCHS)
    assert ended.report["incidents"] == []
    assert ended.report["metrics"] == {"trained": 1.0}


@pytest.mark.parametrize(("how", "cluster"), soaked([("exec", ALLREDUCE)], [("c", SANDBLASTER), ("exit", HOGWILD)]))
def test_in_the_middle_of_a_loop_it_is_a_death(runner: JobRunner, how: str, cluster: str) -> None:
    ended = runner.run(cluster, "leaves.py", how, "middle", str(runner.folder / "mark"), extra=SUM)
    ended.check_ledger(EPOCHS)
    (incident,) = ended.report["incidents"]
    assert "ended with exit code 0 before its work was done" in incident["what"]
    assert ("the whole job" if cluster == ALLREDUCE else "group") in incident["action"]


def test_a_worker_that_was_started_by_hand_brings_the_result_home_too(shells: Shells) -> None:
    port = free_port()
    words = ("--paddle", f"port={port}", "--workspace", "w", "--os-exit")
    trainer = shells.python(str(PROGRAMS / "by_hand.py"), *words)
    server = shells.python("-m", "topotrain", "pserver", f"--port={port}")
    ended([trainer, server], [0, 0])
    assert (shells.folder / "w" / "final.safetensors").exists()


@soak_only
def test_a_thread_that_keeps_a_worker_started_by_hand_is_named(shells: Shells) -> None:
    port = free_port()
    words = ("--paddle", f"port={port}", "--workspace", "w", "--linger-s", "8")
    trainer = shells.python(str(PROGRAMS / "by_hand.py"), *words)
    server = shells.python("-m", "topotrain", "pserver", f"--port={port}")
    said, _ = ended([trainer, server], [0, 0])
    assert "its program has ended, but for the thread 'lingerer'" in said
