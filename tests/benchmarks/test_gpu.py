"""`make bench-gpu` without a GPU: its sides, its limits, its page, and what it makes of a trace."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import gpu, gpu_overlap, gpu_training
from benchmarks.gpu_training import GLOO, NCCL, Clock, Contestant, Target, contestants, measure_model
from benchmarks.gpus import Gpus, probe
from benchmarks.harness import Row, absent, interleave, row
from benchmarks.markdown import section
from benchmarks.record import Table, load, save
from benchmarks.sides import Refused, Side, Sides, cluster, refusal
from benchmarks.traces import TO_DEVICE, TO_HOST, common, copies_of, union

TWO = Gpus(("H100", "H100"), 80.0, "12.6", "2.21.5")
ONE = Gpus(("H100",), 80.0, "12.6", "2.21.5")


# --- sides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpus", [ONE, TWO, Gpus(("A100",) * 8, 40.0, "12.6", "2.21.5")], ids=lambda gpus: str(gpus.count)
)
def test_every_side_is_a_peer_or_a_valid_job_or_says_why_not(gpus: Gpus) -> None:
    found = contestants(Target("cuda", gpus))
    assert len({one.key for one in found}) == len(found)
    for one in found:
        assert one.way or one.missing or refusal(one.conf) == "", one
        assert one.over in {other.key for other in found}


def test_two_gpus_are_connected_by_nccl() -> None:
    found = {one.key: one for one in contestants(Target("cuda", TWO))}
    assert (found[NCCL].way, found[NCCL].workers) == ("ddp+nccl", 2)
    assert "engine: kNccl" in found["AllReduce, engine kNccl, kHidden, kAtStep"].conf
    assert found["Sandblaster, servers on the CPU, kVisible, kAtStep"].over == NCCL
    assert GLOO not in found


def test_two_workers_on_one_gpu_are_compared_with_gloo_and_nccl_has_a_single_worker() -> None:
    found = {one.key: one for one in contestants(Target("cuda", ONE))}
    assert found[NCCL].missing == found["AllReduce, engine kNccl, kHidden, kAtStep"].missing == gpu_training.ONE_GPU
    assert found["Sandblaster, servers on the CPU, kVisible, kAtStep"].over == GLOO
    assert (found[f"{NCCL}, one worker"].way, found[f"{NCCL}, one worker"].workers) == ("ddp+nccl", 1)


def test_what_does_not_exist_yet_is_a_side_with_its_reason() -> None:
    found = {one.key: one for one in contestants(Target("cuda", TWO))}
    assert found["Sandblaster, servers on the GPU"].missing
    # As soon as the field exists the side is a job, and this refusal is gone.
    assert ("cluster.outer" in found["2 islands"].missing) == ("cluster.outer" in refusal(found["2 islands"].conf))


def test_batches_are_as_large_as_the_memory_of_the_gpus_allows() -> None:
    assert [Target("cuda", Gpus(("x",), size)).times(10) for size in (16.0, 48.0, 141.0)] == [4, 16, 64]
    assert Target("cpu", Gpus()).times(10) == 1


# --- failures -------------------------------------------------------------------------------------------------


def test_a_side_that_fails_loses_only_itself() -> None:
    calls = iter([1.0, 2.0, Refused("it ended")])

    def weak() -> float:
        value = next(calls)
        if isinstance(value, Exception):
            raise value
        return value

    lost: dict[str, str] = {}
    found = interleave({"weak": weak, "strong": lambda: 3.0}, 5, lost=lost)
    assert (found.keys(), lost) == ({"strong"}, {"weak": "it ended"})
    assert found["strong"].values == (3.0,) * 5
    with pytest.raises(StopIteration):
        interleave({"weak": weak}, 5)


def test_sides_are_left_out_when_the_time_is_over() -> None:
    target = Target("cpu", Gpus())
    rows = measure_model("small", target, 5, Clock(0.0), contestants(target))
    assert len(rows) == len(contestants(target))
    assert all(line.figure is None for line in rows)
    assert "left out: the 0 s for this table were over" in {line.note for line in rows}


def test_whatever_goes_wrong_with_a_model_the_others_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: str, *_: Any) -> list[Row]:
        if model == "mlp":
            raise KeyError("surprise")
        return [row("", model, 1.0, "s")]

    monkeypatch.setattr(gpu_training, "measure_model", broken)
    monkeypatch.setattr(gpu_training, "probe", lambda: TWO)
    parser = argparse.ArgumentParser()
    gpu_training.declare(parser)
    rows = gpu_training.measure(parser.parse_args(["--models", "mlp", "gpt"]))
    assert rows[-1].what == "gpt"
    assert {line.note for line in rows[:-1]} >= {"KeyError: 'surprise'"}


def test_a_run_that_is_stopped_keeps_the_models_that_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def stopped(model: str, *_: Any) -> list[Row]:
        begun.append(model)
        if model == "gpt":
            raise SystemExit(143)
        return [row("", model, 1.0, "s")]

    monkeypatch.setattr(gpu_training, "measure_model", stopped)
    monkeypatch.setattr(gpu_training, "probe", lambda: TWO)
    parser = argparse.ArgumentParser()
    gpu_training.declare(parser)
    rows = gpu_training.measure(parser.parse_args(["--models", "mlp", "gpt", "cnn"]))
    assert begun == ["mlp", "gpt"]
    assert rows[0].figure == 1.0
    assert {line.note for line in rows[1:]} == {"stopped: the time for all tables was over"}
    assert {line.what.partition(",")[0] for line in rows[1:]} == {"GPT", "CNN"}


@dataclass(frozen=True, slots=True)
class Killed(Contestant):
    """A side whose processes are killed after it has said hello."""

    def start(self, sides: Sides, model: str) -> Side:
        side = super(Killed, self).start(sides, model)
        for process in side.processes:
            process.kill()
            process.wait()
        return side


@pytest.mark.journey
def test_the_code_path_of_gpus_measures_on_cpus_and_keeps_what_works() -> None:
    """A side that is refused and one that dies are rows with a reason; the others have figures."""
    target = Target("cpu", Gpus())
    chosen = [
        Contestant("alone", 2, way="alone"),
        Contestant(GLOO, 2, way="ddp"),
        Contestant("engine", 2, conf=cluster(2, 2, separate=False, inside="engine: kGloo"), over=GLOO),
        Contestant("refused", 2, conf=cluster(2, inside="outer { }"), over=GLOO),
        Killed("killed", 2, way="alone"),
        Contestant("downpour", 2, conf=cluster(1, groups=2), rate=True),
    ]
    rows = {line.what.partition(": ")[2]: line for line in measure_model("small", target, 5, Clock(300.0), chosen)}
    assert rows["alone, one step"].unit == "ms"
    assert rows[GLOO].unit == "× alone"
    assert rows["engine"].unit == f"× {GLOO}"
    assert rows["downpour"].unit == "× samples per second of alone"
    assert all(rows[name].figure for name in ("alone, one step", GLOO, "engine", "downpour")), rows
    assert "outer" in rows["refused"].note
    assert "ended" in rows["killed"].note


@pytest.mark.journey
def test_a_job_writes_traces_in_which_a_cpu_copies_nothing(tmp_path: Path) -> None:
    rows = gpu_overlap.measure_model("small", Target("cpu", Gpus()), 1, Clock(300.0), tmp_path)
    assert {line.note for line in rows} == {"the trace has no copies between host and GPU"}
    traces = sorted(tmp_path.glob("small-*.json"))
    assert len(traces) == len(gpu_overlap.TOPS)
    events = json.loads(traces[0].read_text())["traceEvents"]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == "backward"]
    assert len(marks) == gpu_overlap.STEPS


@pytest.mark.journey
def test_a_table_that_fails_is_named_and_has_its_reason(tmp_path: Path) -> None:
    outcome = bench.run_all(
        ["gpu_training"], False, 300.0, {"gpu_training": 0.1}, {"gpu_training": ["--rounds", "few"]}
    )
    assert outcome.failed == ["gpu_training"]
    gpu.note_absence("gpu_training", "its process failed", TWO, tmp_path)
    assert {line.note for line in load(tmp_path / "gpu_training.json").rows} >= {"its process failed"}


# --- the machine ----------------------------------------------------------------------------------------------


@pytest.mark.journey
def test_a_driver_that_crashes_hangs_or_babbles_is_a_reason() -> None:
    def asked(program: str, limit_s: float = 20.0) -> Gpus:
        return probe(limit_s, (sys.executable, "-c", program))

    assert asked("import os; os.abort()").reason == "asking for GPUs ended with exit code -6"
    assert asked("raise SystemExit('driver too old')").reason == "driver too old"
    assert asked("import threading; threading.Event().wait()", 0.5).reason == "the GPUs did not answer within 0.5 s"
    assert "answered 'hello" in asked("print('hello')").reason
    assert asked("").reason == "asking for GPUs answered ''"
    assert probe(1.0, ("/nonexistent/python",)).reason.startswith("the GPUs could not be asked")
    found = asked(
        """print('{"names": ["H100", "H100"], "gibibytes": 80, "cuda": "12.6", "nccl": "2.21.5", "reason": ""}')"""
    )
    assert (found.count, str(found)) == (2, "2 × H100 (80 GiB), CUDA 12.6, NCCL 2.21.5")


# --- the page -------------------------------------------------------------------------------------------------


def table(*rows: Row, name: str = "gpu_training") -> Table:
    return Table(name, "A training step on GPUs", "python -m benchmarks.gpu_training", "abc", "2 cores", 3.0, rows)


def test_without_a_gpu_the_page_says_so_and_why(tmp_path: Path) -> None:
    for name in gpu.TABLES:
        gpu.note_absence(name, "torch sees no NVIDIA GPU on this machine", Gpus(), tmp_path)
    gpu.render(tmp_path, tmp_path / "page.md", "torch sees no NVIDIA GPU on this machine")
    page = (tmp_path / "page.md").read_text()
    assert "**Not measured**: torch sees no NVIDIA GPU on this machine." in page
    assert page.count("| torch sees no NVIDIA GPU on this machine |") > 10


def test_figures_of_a_machine_with_gpus_outlive_a_run_without(tmp_path: Path) -> None:
    before = table(row("", "DDP", 1.5, "× alone"), absent("", "islands", "×", "no such field"))
    save(before, tmp_path)
    gpu.note_absence("gpu_training", "no GPU", Gpus(), tmp_path)
    assert load(tmp_path / "gpu_training.json") == before
    gpu.render(tmp_path, tmp_path / "page.md", "no GPU")
    page = (tmp_path / "page.md").read_text()
    assert "Not measured" not in page
    assert section(before) in page


def test_the_tables_fit_into_ten_minutes() -> None:
    assert gpu.BUDGET_S <= 600
    assert set(gpu.TABLES) == gpu.MINUTES.keys() == gpu.LIMITS_S.keys()
    assert sum(gpu.LIMITS_S.values()) + bench.ENDING_S < gpu.BUDGET_S


def test_without_a_gpu_nothing_fails(tmp_path: Path) -> None:
    assert gpu.report(gpu.TABLES, Gpus(reason="no driver"), tmp_path, tmp_path / "page.md") == []
    assert "**Not measured**: no driver." in (tmp_path / "page.md").read_text()


def test_unknown_tables_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "p5"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "p5: must be one of gpu_overlap, gpu_training" in capsys.readouterr().err


# --- traces ---------------------------------------------------------------------------------------------------


def event(cat: str, name: str, at: float, took: float, stream: int = 7, call: int = 0, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": call, **more}
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": took, "pid": 1, "tid": 1, "args": args}


def written(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return folder / "trace.json"


def test_only_copies_beside_kernels_of_the_backward_on_another_stream_are_overlapped(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        event("user_annotation", "backward", 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 10, 2, call=1),
        event("cuda_runtime", "cudaMemcpyAsync", 20, 2, call=2),
        event("cuda_runtime", "cudaMemcpyAsync", 30, 2, call=3),
        event("cuda_runtime", "cudaLaunchKernel", 40, 2, call=4),
        event("cuda_runtime", "cudaMemcpyAsync", 150, 2, call=5),
        event("cuda_runtime", "cudaLaunchKernel", 160, 2, call=6),
        event("kernel", "gemm", 100, 50, call=1),
        event("kernel", "gather", 100, 400, stream=9, call=4),  # on the stream of the copies
        event("kernel", "step", 400, 100, call=6),  # after the backward
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 120, 20, 9, 2, bytes=1 << 20),  # beside gemm
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 140, 40, 9, 3, bytes=1 << 20),  # a quarter of it
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 420, 40, 9, 5, bytes=1 << 20),  # at step()
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 430, 10, 9, 8, bytes=1 << 20),
    )
    found = copies_of(trace, TO_HOST)
    assert (found.count, found.megabytes, found.pinned, found.launched) == (3, 3.0, 2, 2)
    assert found.share == pytest.approx((20 + 10) / (20 + 40))
    assert found.spent == pytest.approx(0.06)
    back = copies_of(trace, TO_DEVICE)
    assert (back.count, back.launched, back.share) == (1, 0, None)


def test_kernels_of_another_gpu_cover_nothing(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        event("user_annotation", "backward", 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 10, 2, call=1),
        event("cuda_driver", "cuMemcpyAsync", 20, 2, call=2),
        event("kernel", "gemm", 100, 50, call=1, device=1),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 120, 20, 9, 2),
    )
    assert copies_of(trace, TO_HOST).share == 0.0


def test_spans_that_touch_are_counted_once() -> None:
    joined = union([(5, 9), (0, 2), (1, 4), (9, 10)])
    assert joined == [(0, 4), (5, 10)]
    assert common((3, 6), joined) == 2
