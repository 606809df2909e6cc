"""How jobs end when something goes wrong: soon, with every process gone, and with the first cause told."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from job_runner import ALLREDUCE, HOGWILD, SANDBLASTER, JobRunner
from killed_jobs import begun, entries
from shells import alive

pytestmark = pytest.mark.journey

END_S = 5.0  # what the product promises


class Running:
    """An endless job that has begun to train."""

    def __init__(self, runner: JobRunner, cluster: str, name: str = "job", extra: str = "") -> None:
        self.workspace = runner.folder / name
        command = runner.command(cluster, "wrong.py", "endless", name=name, extra=extra)
        self.process, self.heard = begun(command, runner.folder, "training")

    def pid(self, role: str) -> int:
        return next(entry["pid"] for entry in entries(self.workspace) if role in entry["roles"])

    def end(self) -> tuple[int, str, float]:
        """(exit code, all it said, seconds until it ended); no process of it is left then."""
        pids = [entry["pid"] for entry in entries(self.workspace)]
        began = time.monotonic()
        rest, _ = self.process.communicate(timeout=300)
        seconds = time.monotonic() - began
        while alive(pids) and time.monotonic() - began < 60:
            os.sched_yield()
        return self.process.returncode, self.heard + rest, max(seconds, time.monotonic() - began)


@pytest.fixture
def endless(runner: JobRunner) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(cluster: str, name: str = "job", extra: str = "") -> Running:
        started.append(Running(runner, cluster, name, extra))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def test_a_killed_process_ends_a_job_that_is_to_stop(endless: Callable[..., Running]) -> None:
    job = endless(ALLREDUCE, extra="on_failure: kStop")
    os.kill(job.pid("unit 1"), signal.SIGKILL)
    code, said, seconds = job.end()
    assert code == 1
    assert seconds < END_S
    assert "unit 1" in said
    assert "SIGKILL" in said


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("interrupt", 1, ["raise KeyboardInterrupt"]),
        ("steps", 1, ["worker 1 of the group left the loop", "worker 0 goes on"]),
        ("divided", 2, ["the loader of tt.prepare has other data on each worker (other content on", "tt.as_is"]),
        ("unprepared", 2, ["DataLoader of TensorDataset", "was not given to tt.prepare", "tt.as_is(loader)"]),
    ],
)
def test_a_wrong_program_is_refused_clearly(runner: JobRunner, how: str, code: int, words: list[str]) -> None:
    ended = runner.run("nworkers_per_group: 2", "wrong.py", how, code=code)
    for word in words:
        assert word in ended.err


def test_a_worker_that_all_others_wait_for_is_named(runner: JobRunner) -> None:
    go = runner.folder / "go"
    command = runner.command(SANDBLASTER, "wrong.py", "stall", str(go))
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            said += line
            if "; not worker 0/1: is its program computing" in line:
                go.touch()
        go.touch()
    assert job.returncode == 0, said
    assert "worker 0/0, worker 0/2 have waited" in said


def test_a_stranger_with_a_wrong_token_is_refused_and_the_job_goes_on(endless: Callable[..., Running]) -> None:
    from topotrain.comm.security.handshake import Identity
    from topotrain.comm.transport import Refused, TransportError
    from topotrain.comm.transport.tcp import TcpTransport
    from topotrain.config.topology import Address, Role

    class Nobody:
        def place(self, *_: object) -> None: ...
        def handle(self, *_: object) -> None: ...
        def lost(self, *_: object) -> None: ...

    job = endless(SANDBLASTER)
    (url,) = (
        a for e in entries(job.workspace) if "server 0/0" in e["roles"] for a in e["address"] if a.startswith("tcp")
    )
    assert "127.0.0.1" in url
    token = (job.workspace / "run" / "token").read_bytes()
    assert (job.workspace / "run" / "token").stat().st_mode & 0o077 == 0
    stranger = TcpTransport(Identity("job", bytes(32), 0, 0, ""), start_port=0)
    me, server = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)
    stranger.attach(me, Nobody())
    with pytest.raises(Refused) as refused:
        stranger.connect(me, server, url)
    assert refused.value.code == "AUTH"
    other_config = TcpTransport(Identity("job", token, 0, 0, "another"), start_port=0)
    other_config.attach(me, Nobody())
    with pytest.raises(TransportError, match="CONFIG"):
        other_config.connect(me, server, url)
    host, port = url.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    stranger.close()
    other_config.close()
    assert job.process.poll() is None
    assert alive([job.pid("server 0/0"), job.pid("worker 0/0")])
    os.killpg(job.process.pid, signal.SIGINT)
    code, _, seconds = job.end()
    assert code == 130 and seconds < END_S


def test_two_jobs_at_once_do_not_disturb_each_other_and_nothing_outlives_a_killed_launcher(
    runner: JobRunner, endless: Callable[..., Running]
) -> None:
    first = endless(HOGWILD, "first")
    second = runner.run(HOGWILD, "bits.py", "momentum", name="second")
    assert second.report["processes"]
    assert first.process.poll() is None
    third = subprocess.run(runner.command(HOGWILD, "bits.py", "momentum", name="first"), capture_output=True, text=True)
    assert third.returncode == 2
    assert "workspace" in third.stderr
    first.process.kill()
    _, _, seconds = first.end()
    assert seconds < END_S
