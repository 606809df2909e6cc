"""`topotrain run --profile`: the trace of a real job's step has every process and every phase, properly nested."""

import json
from collections import defaultdict
from typing import Any

import pytest
from job_runner import ALLREDUCE, SANDBLASTER, Ended, JobRunner

pytestmark = pytest.mark.journey

TCP = " transport: kTcp"
WORKER = {"forward", "backward", "push", "wait", "pull"}
SERVER = {"reduce", "apply", "pull", "wait"}


def profiled(runner: JobRunner, cluster: str, *options: str) -> tuple[Ended, list[dict[str, Any]]]:
    ended = runner.run(cluster, "small.py", options=options)
    trace = json.loads((ended.workspace / "trace.json").read_text())
    return ended, trace["traceEvents"]


def by_process(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event)
    return found


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On each thread two spans are apart, or one lies in the other; floats allow for a nanosecond."""
    threads = defaultdict(list)
    for event in events:
        assert event["ts"] >= 0 and event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    for row in threads.values():
        open_until: list[float] = []
        for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-3, event
            open_until.append(end)


def test_the_trace_has_every_process_and_every_phase(runner: JobRunner) -> None:
    ended, events = profiled(runner, SANDBLASTER + TCP, "--profile")
    processes = by_process(events)
    assert list(processes) == ["worker 0/0", "worker 0/1", "worker 0/2", "server 0/0", "server 0/1"]
    check_nesting([event for event in events if event["ph"] == "X"])
    for who, spans in processes.items():
        assert {span["cat"] for span in spans} >= (WORKER if who.startswith("worker") else SERVER), who
        if who.startswith("worker"):
            (step,) = (span for span in spans if span["name"] == "step")
            assert step["args"] == {"step": 10}
            pushed = {span["args"]["step"] for span in spans if span["name"] == "push"}
            assert pushed == {10}
    assert {e["id"] for e in events if e["ph"] == "s"} == {e["id"] for e in events if e["ph"] == "f"} != set()
    pids = {p["pid"] for p in ended.report["processes"]}
    assert {event["pid"] for event in events} == pids
    for who in processes:
        assert who in ended.err


def test_which_step(runner: JobRunner) -> None:
    """Six epochs of eight batches: of a job with fewer steps the last one is shown."""
    ended, events = profiled(runner, ALLREDUCE, "--profile", "--profile-step", "999")
    assert {e["args"]["step"] for e in events if e["ph"] == "X" and e["name"] == "step"} == {48}
    check_nesting([event for event in events if event["ph"] == "X"])
    assert "open it at" in ended.err
