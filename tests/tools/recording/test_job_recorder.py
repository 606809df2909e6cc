"""Which process records a job: the one that leads it, from then on."""

from pathlib import Path

import pytest

from tests.support.recorded_jobs import history, job_of, read_recording, recorder_of, report_of, step
from topotrain.config.topology import layout
from topotrain.core import events
from topotrain.tools.monitor.job_monitor import JobMonitor
from topotrain.tools.monitor.progress_display import QuietProgress
from topotrain.tools.monitor.terminal import console
from topotrain.tools.recording.job_recorder import JobRecorder
from topotrain.tools.recording.recording_file import FILE


def lines(folder: Path) -> list[str]:
    return [type(timed.event).__name__ for timed in read_recording(folder / FILE)]


def test_a_launched_job_is_recorded_to_its_end(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with recorder_of(job) as made:
        assert made.summary() is None
        made(step(number=7))
        summary = made.summary()
        assert summary is not None and (summary["step"], summary["state"], summary["left_out"]) == (7, "running", 0)
        made.end(3)
    assert lines(tmp_path) == ["RecordingHeader", "StepDone", "RecordingEnd"]
    assert history(*read_recording(tmp_path / FILE)).view()["job"]["code"] == 3
    assert not made.notices()


def test_a_job_that_ends_by_an_exception_has_an_unknown_code(tmp_path: Path) -> None:
    job = job_of(tmp_path)

    def launch() -> None:
        with recorder_of(job) as made:
            made(step())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch()
    assert history(*read_recording(tmp_path / FILE)).view()["job"]["code"] is None


def test_before_its_first_event_a_job_does_not_touch_the_workspace_of_another(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / FILE).write_text("of another job\n")
    # As where the launcher refuses the workspace.
    with recorder_of(job) as made:
        assert made.summary() is None
    assert (tmp_path / FILE).read_text() == "of another job\n"


def test_a_unit_records_when_it_leads(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    follows = JobRecorder()
    follows.begin(job, layout(job.cluster))
    follows(step(number=1))
    assert not (tmp_path / FILE).exists() and follows.summary() is None
    leads = JobRecorder()
    leads.lead(False, ("north", "south", "east", "west", "x"))
    leads.begin(job, layout(job.cluster))
    leads(step(number=5))
    leads.end(143)
    # Elected after the other one was lost: it goes on in the same file, where the workspace is shared.
    follows.lead(True, ("north", "south", "east", "west", "x"))
    follows.lead(True, ())
    follows(step(number=6))
    follows.end(0)
    made = history(*read_recording(tmp_path / FILE))
    assert made.summary()["step"] == 6 and made.view()["job"]["code"] == 0
    assert {each["host"] for each in made.view()["processes"]} >= {"north", "south"}
    assert lines(tmp_path).count("RecordingHeader") == 2


@pytest.mark.parametrize("leads_before", [True, False])
def test_a_resize_changes_the_layout(tmp_path: Path, leads_before: bool) -> None:
    job = job_of(tmp_path, nworker_groups=1, nworkers_per_group=3)
    made = JobRecorder()
    made.begin(job, layout(job.cluster))
    for leads, event in ((leads_before, events.Resized(0, 3, 2, 10, 1.0)), (True, step())):
        if leads:
            made.lead(False, ())
        made(event)
    made.end(0)
    view = history(*read_recording(tmp_path / FILE)).view()
    workers = [each["name"] for each in view["processes"] if each["role"] == "worker"]
    assert workers == ["worker 0/0", "worker 0/1"]
    assert [entry["kind"] for entry in view["story"]] == ["resized", "ended"][not leads_before :]


def test_a_disk_that_cannot_be_written_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("no folder")
    job = job_of(tmp_path / "work" / "job")
    with recorder_of(job) as made:
        made(step(number=7))
        summary = made.summary()
        assert summary is not None and summary["step"] == 7
        (notice,) = made.notices()
        assert notice.who == "launcher" and "the job continues" in notice.text
        assert not made.notices()


def test_what_follows_a_job_logs_its_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = QuietProgress(report_of(layout(job_of(tmp_path).cluster)), console())
    JobMonitor(shown, JobRecorder())(events.Incident(0, "worker 0/1", "was killed", "its group restarts", 1.0))
    assert ("topotrain", 30, "worker 0/1: was killed; its group restarts") in caplog.record_tuples
