"""Several runs side by side: their curves, their settings, their names, and the folders that have them."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from growing_recording import GrowingRecording, step, view_of
from prepared_view import PreparedJob

from topotrain.config.job import ConfigError
from topotrain.core.events import Started
from topotrain.tools.dashboard.run_comparison import compared, named_runs, read_runs, run_figures, runs_of
from topotrain.tools.recording.recorded_lines import RecordingEnd
from topotrain.tools.recording.recording_file import FILE


def test_rates_are_sums_other_figures_means_and_only_settings_that_differ_are_columns() -> None:
    views = {name: PreparedJob(groups=groups, slow=-1).view() for name, groups in (("a", 2), ("b", 3))}
    views["b"]["job"] |= {"ended": None, "lost": True, "code": None, "loss": None, "samples_per_s": None}
    run, other = compared({name: run_figures(view) for name, view in views.items()})
    assert {len(run["at"]), len(run["step"]), *map(len, run["curves"].values())} == {300}
    assert (run["at"][-1], run["step"][-1], run["curves"]["staleness_bound"][-1]) == (240.0, 240, 6.0)
    # Before its end: workers that have finished make no figures.
    ends = {metric: values[-2] for metric, values in run["curves"].items()}
    assert ends["samples_per_s"] == pytest.approx(200, rel=0.05) and ends["memory_bytes"] == pytest.approx(1e9, rel=0.1)
    assert ends["log:accuracy"] == pytest.approx(0.95, abs=0.02)
    first, second = run["columns"], other["columns"]
    settings = ["framework", "workers", "servers", "nworker_groups"]
    assert list(first) == ["state", *settings, "step", "loss", "samples/s", "time"]
    assert (first["nworker_groups"], second["nworker_groups"], second["workers"]) == ("2", "3", "3")
    assert (first["state"], second["state"], second["loss"], second["samples/s"]) == ("ended", "lost", "–", "–")
    assert first["time"] == "4:00", "as on the page and in the terminal"


def test_a_curve_of_a_run_breaks_while_its_processes_are_not_there() -> None:
    for away in ("dead", "away", "restarts"):
        view = PreparedJob(groups=1, servers=1, slow=-1).view()
        view["states"]["worker 0/0"] = [[0.0, "computes"], [96.0, away], [121.0, "computes"]]
        (run, _) = compared(dict.fromkeys("ab", run_figures(view)))
        absent = [at for at, loss in zip(run["at"], run["curves"]["loss"], strict=True) if loss is None]
        assert len(absent) > 10 and all(at < 2.0 or 96.0 <= at <= 121.0 for at in absent)


def test_a_run_without_any_figures_has_no_curves(tmp_path: Path) -> None:
    with closing(GrowingRecording(tmp_path, "young")) as recording:
        recording.add(1.0, Started("worker 0/0", 1))
        (run,) = compared({"young": run_figures(view_of(tmp_path))})
        assert (run["at"], run["curves"], run["columns"]["state"]) == ([], {}, "running")
        recording.add(2.0, step("worker 0/0", 1))
        recording.add(2.5, RecordingEnd(3))
    (run,) = compared({"young": run_figures(view_of(tmp_path))})
    assert run["columns"]["state"] == "failed, code 3" and run["curves"]["loss"][-1] == 0.5


def test_a_folder_of_runs_is_found_with_short_names(tmp_path: Path) -> None:
    for name in ("sweep/b", "sweep/a/deep", "sweep/a", "other"):
        GrowingRecording(tmp_path / name, name).close()
    assert list(named_runs(dict.fromkeys(runs_of([tmp_path / "sweep", tmp_path / "sweep" / "b"])))) == [
        "a",
        "a/deep",
        "b",
    ]
    assert list(named_runs(dict.fromkeys(runs_of([tmp_path / "other", tmp_path / "sweep" / "b"])))) == [
        "other",
        "sweep/b",
    ]
    assert runs_of([tmp_path / "none"]) == [tmp_path / "none"], "which is refused where it is read"


def test_one_recording_that_cannot_be_read_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good", "spoilt"):
        GrowingRecording(tmp_path / name, name).close()
    (tmp_path / "spoilt" / FILE).write_bytes(b"no recording\n")
    good, spoilt = runs_of([tmp_path])
    with ExitStack() as stack:
        assert list(read_runs([spoilt, good], stack)) == [good]
        assert f"left out: WORKSPACE = '{spoilt}'" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="spoilt"):
            read_runs([spoilt], stack)
