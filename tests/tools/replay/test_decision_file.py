"""The file of a recording: what it has, and what is refused with one line."""

import json
import os
import signal
import subprocess
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Cluster, ConfigError, Grads, Job, TransportChoice
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.events import ReplayReport, Started
from topotrain.extensions.decision_record.order_entries import LOST, Arrival, Entry, EntryEncoder, ModelKnown, StepMade
from topotrain.extensions.decision_record.process_order import WHOLE_LIFE
from topotrain.tools.cli import app
from topotrain.tools.replay.compare_records import first_difference
from topotrain.tools.replay.decision_file import DecisionFile, JobRecord, check_recordable, load_decisions
from topotrain.tools.replay.replay_command import parse_until, replayed_job
from topotrain.tools.replay.replay_run import ReplayRun

JOB = Job(program="train.py", args=("--epochs", "3"), cluster=Cluster(nworker_groups=2, server_worker_separate=True))
MODEL = ModelKnown(b"12345678")


def encoded(*entries: Entry) -> bytes:
    return b"".join(map(EntryEncoder().encode, entries))


def commit(group: int, checks: bytes = b"ab") -> Arrival:
    return Arrival(Address(Role.WORKER, group, 0), m.Commit.KIND, checks)


STEPS = (MODEL, commit(0), StepMade(0, 1), commit(1), StepMade(1, 2))
RECORD = DecisionFile(JOB, True, {"server-0-0": encoded(*STEPS)}, 12.5, {"torch": "2.0"})


def test_only_the_recorded_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that the kernel gives to another process meanwhile is no target."""
    deaths = encoded(*STEPS, *(Arrival(Address(Role.WORKER, group, 0), LOST) for group in range(2)))
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    with closing(ReplayRun(replace(RECORD, parts={"server-0-0": deaths}), None)) as run:
        for group in range(2):
            with subprocess.Popen(["true" if group else "cat"], stdin=subprocess.PIPE) as child:
                run(Started(f"worker {group}/0", child.pid))
                if group:
                    child.wait(30)
                run(ReplayReport("server 0/0", WHOLE_LIFE, f"worker {group}/0", 0, ""))
                assert child.wait(30) == (0 if group else -signal.SIGKILL)
    assert not sent


def test_a_file_has_the_job_and_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "job.record"
    # A URL may have a password, which no file has.
    replace(RECORD, job=replace(JOB, rendezvous="redis://me:hush@h/0")).save(path)
    assert load_decisions(path) == RECORD
    assert RECORD.last_version(0) == 2


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_decisions(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        ({"version": 2}, "is a recording of version 2, must be 1"),
        ({"format": "something"}, "is no recording"),
        ({"job": "cluster { nworker_groups: -1 }"}, "nworker_groups"),
        ({"job": None}, "record.json: job: must be the text of a job file"),
        ({"versions": 3}, "record.json: versions = 3: must be a block of texts by name"),
        ({"versions": {"torch": 2}}, "record.json: versions = .*: must be a block of texts by name"),
        ({"whole": "yes"}, "record.json: whole = 'yes': must be true or false"),
        ({"made_at": "now"}, "record.json: made_at = 'now': must be a number of seconds"),
        ({"made_at": True}, "record.json: made_at = true: must be a number of seconds"),
    ],
)
def test_another_version_or_format_is_refused(tmp_path: Path, about: dict[str, object], wanted: str) -> None:
    path, changed = tmp_path / "job.record", tmp_path / "changed.record"
    RECORD.save(path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(changed, "w") as other:
        for info in archive.infolist():
            data = archive.read(info)
            if info.filename == "record.json":
                data = json.dumps(json.loads(data) | about).encode()
            other.writestr(info.filename, data)
    with pytest.raises(ConfigError, match=wanted):
        load_decisions(changed)


def test_a_file_that_is_cut_off_or_has_other_parts_than_its_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.record"
    RECORD.save(path)
    data = path.read_bytes()
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        assert "is no recording of `topotrain run --record`, or is cut off" in refused(path)
    for parts, said in (
        ({}, "lacks the part of server 0/0"),
        ({"server-0-0": b"\x07"}, "has a damaged part server-0-0"),
        ({**RECORD.parts, "worker-0-9": bytes(65 << 20)}, "would take more than 64 MB of memory"),
    ):
        replace(RECORD, parts=parts).save(path)
        assert said in refused(path)
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "none.record")
    # No name of a part leads out of the folder of a replay.
    replace(RECORD, parts={**RECORD.parts, "../server-0-1": b"", "server-0-0/x": b""}).save(path)
    assert load_decisions(path).parts.keys() == RECORD.parts.keys()


def test_a_version_is_of_the_first_server_group_unless_it_is_named() -> None:
    assert parse_until("2", RECORD) == (0, 2) == parse_until("0:2", RECORD)
    assert parse_until("", RECORD) is None
    assert parse_until("", replace(RECORD, whole=False)) == (0, 2), "an interrupted job ends at its last version"
    for text in ("0", "3", "x", "-1", "1:1", "0:", "2.5"):
        with pytest.raises(ConfigError, match=f"--until = '?{text}'?: must be a version from 1 to 2"):
            parse_until(text, RECORD)


def test_a_replay_has_its_own_workspace_and_the_recorded_program(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.touch()
    job = replace(JOB, program=str(program))
    assert replayed_job(job, None, None, "there").args == ("--epochs", "3")
    again = replayed_job(job, str(program), ["--epochs", "4"], "there")
    assert again.args == ("--epochs", "4") and again.workspace == "there"


@pytest.mark.parametrize(
    ("cluster", "resumed", "wanted"),
    [
        ({}, True, "cannot be used for a job that goes on from a snapshot"),
        ({"replicas": 2, "transport": TransportChoice.kTcp, "nservers_per_group": 2}, False, "cluster.replicas"),
        ({"backup": 1, "nworkers_per_group": 3, "nworker_groups": 1}, False, "cluster.backup"),
    ],
)
def test_jobs_that_cannot_be_replayed_are_not_recorded(cluster: dict[str, Any], resumed: bool, wanted: str) -> None:
    hidden = {"grads": Grads.kHidden, "per_worker_batch": True} if "backup" in cluster else {}
    job = replace(JOB, cluster=replace(JOB.cluster, **cluster), **hidden)
    with pytest.raises(ConfigError, match=wanted):
        check_recordable(job, layout(JOB.cluster), resumed)


def test_server_groups_that_exchange_write_no_snapshots_while_they_are_recorded() -> None:
    """An exchange waits for a snapshot, and a snapshot for the clock."""
    for groups, drops in ((2, True), (1, False)):
        job = replace(JOB, cluster=replace(JOB.cluster, nserver_groups=groups))
        made = JobRecord(job, layout(job.cluster))
        assert (made.drops_snapshots, wants_snapshots(made.job)) == (drops, not drops)


# --- two recordings --------------------------------------------------------------------------------------------------


def other(*entries: Entry, job: Job = JOB) -> DecisionFile:
    return DecisionFile(job, True, {"server-0-0": encoded(*entries)})


def test_the_first_decision_that_differs_is_named_or_else_a_gradient_or_the_other_job() -> None:
    differing = other(MODEL, commit(0), StepMade(0, 1), commit(0), StepMade(0, 2))
    gradient = other(MODEL, commit(0), StepMade(0, 1), commit(1, b"ac"), StepMade(1, 2))
    for record, mine, theirs in (
        (differing, "a step of worker group 1 makes version 2", "a step of worker group 0 makes version 2"),
        (other(*STEPS[:3]), "a step of worker group 1 makes version 2", "the recording ends"),
        (gradient, "step 1 of worker 1/0 has checks 6162", "step 1 of worker 1/0 has checks 6163"),
    ):
        found = first_difference(RECORD, record)
        assert found is not None and (found.server, found.version) == ("server 0/0", 1)
        assert (found.first, found.second) == (mine, theirs)
    another = replace(JOB, cluster=replace(JOB.cluster, nworker_groups=3))
    for record, said in ((other(ModelKnown(b"87654321"), *STEPS[1:]), "model"), (other(job=another), "cluster block")):
        with pytest.raises(ConfigError, match=f"same {said}"):
            first_difference(RECORD, record)


def test_what_a_comparison_and_a_foreign_program_need_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.record"
    replace(RECORD, job=replace(JOB, program="-m timeit", args=("a \x1bb",))).save(path)
    only = "--compare runs nothing: leave out PROGRAM, --recorded, --until, --dump, --out and --workspace"
    for words, said in (
        *(
            (f"--compare {path} {more}", only)
            for more in ("--out x", "--workspace x", "--until 1", "x.py", "--recorded")
        ),
        ("", "give PROGRAM, or --recorded to run what the recording names, which is: -m timeit 'a ?b'"),
        ("--recorded train.py", "--recorded runs the program of the recording: leave out PROGRAM"),
    ):
        with pytest.raises(SystemExit) as left:
            app.main(("replay", str(path), *words.split()))
        printed = capsys.readouterr()
        assert left.value.code == 2 and said in printed.err and not printed.out
    assert not (tmp_path / "job.record.replay").exists()
