"""A trace of one step: processes side by side, shares of the time, and the format that Perfetto reads."""

import json
from pathlib import Path

import pytest

from topotrain.core.profiling.spans import PHASES, ProcessSpans, Span, to_json
from topotrain.tools.monitor import trace_export
from topotrain.tools.monitor.result_tables import phases
from topotrain.tools.monitor.terminal import console

MS = 1_000_000
MAIN = "MainThread"


def span(name: str, start: int, end: int, track: str = MAIN, **numbers: int) -> Span:
    return Span(name, track, start * MS, end * MS, numbers)


def worker(index: int = 0, shift: int = 0) -> ProcessSpans:
    """100 ms: data 10, forward 20, backward 40 with 5 of push in it, wait 25 with 10 of pull beside it, 5 unnamed."""
    rows = [
        span("data", 0, 10),
        span("forward", 10, 30),
        span("backward", 30, 70),
        span("push", 40, 45, step=7, ordinal=0, bucket=1),
        span("wait for values", 75, 100),
        span("pull", 80, 90, "reader", round=6, bucket=1),
        span("step", 0, 100, step=7),
    ]
    moved = [Span(s.name, s.track, s.start + shift * MS, s.end + shift * MS, s.numbers) for s in rows]
    return ProcessSpans(f"worker 0/{index}", 100 + index, tuple(moved))


def server(index: int = 0) -> ProcessSpans:
    """Reduces 10 ms and applies 15 ms within the worker's step, and has done things before and after it."""
    me = f"server 0/{index}"
    where = {"group": 0, "index": 0, "bucket": 1}
    return ProcessSpans(
        me,
        200 + index,
        (
            span("reduce", -90, -80, me, **where, step=6, ordinal=0),
            span("reduce", 46, 56, me, **where, step=7, ordinal=0),
            span("apply", 60, 75, me, group=0, step=7),
            span("pull", 70, 75, me, **where, round=6),
            span("apply", 95, 105, me, group=1, step=3),
        ),
    )


def collected(tmp_path: Path, *processes: ProcessSpans) -> list[ProcessSpans]:
    for process in processes:
        (tmp_path / (process.who.replace(" ", "-").replace("/", "-") + ".json")).write_text(to_json(process))
    return trace_export.collect(tmp_path)


def test_processes_stand_in_order_and_those_without_a_step_are_left_out(tmp_path):
    assert collected(tmp_path, server()) == [] == trace_export.collect(tmp_path / "missing")
    (tmp_path / "wanted").write_text("7")
    (tmp_path / "worker-0-5.tmp").write_text("half a fi")
    idle = ProcessSpans("worker 0/3", 5, (span("pull", 0, 1),))
    found = collected(tmp_path, worker(10), server(1), worker(2), idle, server(0))
    assert [process.who for process in found] == ["worker 0/2", "worker 0/10", "server 0/0", "server 0/1"]


def test_a_worker_is_counted_by_its_innermost_span_and_a_server_in_the_workers_time(tmp_path):
    own, others = trace_export.shares(collected(tmp_path, worker(), server()))
    for share, who, step, expected in (
        (
            own,
            "worker 0/0",
            7,
            {"forward": 0.2, "backward": 0.35, "push": 0.05, "pull": 0.1, "wait": 0.15, "other": 0.15},
        ),
        (others, "server 0/0", 0, {"reduce": 0.10, "apply": 0.15, "pull": 0.05, "wait": 0.70}),
    ):
        assert share.phases == pytest.approx({**dict.fromkeys((*PHASES, "other"), 0.0), **expected})
        assert (share.who, share.step, share.seconds) == (who, step, pytest.approx(0.1))
    terminal = console()
    with terminal.capture() as shown:
        terminal.print(phases([own, others]))
    row = next(line for line in shown.get().splitlines() if "worker 0/0" in line)
    assert row.split() == ["worker", "0/0", "7", "100.0", "20.0%", "35.0%", "5.0%", "–", "–", "10.0%", "15.0%", "15.0%"]
    assert "server 0/0" in shown.get()


def test_two_servers_of_a_process_are_one_row_and_groups_of_their_own_pace_widen_its_time(tmp_path):
    """At each moment the process does what the first of PHASES is that one of them does."""
    rows = (span("reduce", 0, 40, "server 0/0"), span("apply", 20, 60, "server 0/1"))
    _, share = trace_export.shares(collected(tmp_path, worker(), ProcessSpans("server 0/0", 9, rows)))
    assert [share.phases[name] for name in ("reduce", "apply", "wait")] == pytest.approx([0.4, 0.2, 0.4])
    *_, share = trace_export.shares(collected(tmp_path, worker(0), worker(1, shift=300), server()))
    assert share.seconds == pytest.approx(0.4) and sum(share.phases.values()) == pytest.approx(1)


def test_the_file_is_what_perfetto_reads_with_arrows_from_a_push_to_its_server_and_back(tmp_path):
    trace_export.write(collected(tmp_path, worker(), server()), tmp_path / trace_export.FILE)
    events = json.loads((tmp_path / trace_export.FILE).read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(100, "worker 0/0"), (200, "server 0/0")}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(100, 1): "script", (100, 2): "reader", (200, 1): "server 0/0"}
    complete = [e for e in events if e["ph"] == "X"]
    assert {"pid", "tid", "ts", "dur", "name", "cat", "args"} <= complete[0].keys()
    assert [e["ts"] for e in complete] == sorted(e["ts"] for e in complete)
    assert min(e["ts"] for e in complete) == 0 and all(e["dur"] >= 0 for e in complete)
    (push,) = (e for e in complete if e["name"] == "push")
    assert (push["ts"], push["dur"]) == (40_000, 5_000)  # microseconds
    assert push["args"] == {"step": 7, "ordinal": 0, "bucket": 1}
    assert {e["cat"] for e in complete} == {*PHASES, "other"}
    ends = {kind: {e["id"]: (e["name"], e["pid"], e["ts"]) for e in events if e["ph"] == kind} for kind in "sf"}
    assert sorted(ends["s"].values()) == [("gradient", 100, 40_000), ("values", 200, 70_000)]
    assert sorted(ends["f"].values()) == [("gradient", 200, 46_000), ("values", 100, 80_000)]
    assert ends["s"].keys() == ends["f"].keys()
