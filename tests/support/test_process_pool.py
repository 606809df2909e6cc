"""What tests take for `python …` (warm.py) is as the real one: its arguments, modules, folders, streams and ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from process_pool import Forked, client

pytestmark = pytest.mark.journey

PROBE = """
import os, signal, sys
main = sys.modules["__main__"]
print(sys.argv, __name__, main.__dict__ is globals(), sys.path[0], os.getcwd(), os.environ["PROBED"])
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), sys.stdin.read(), flush=True)
print("to stderr", file=sys.stderr)
sys.exit(3)
"""
WORDS = [("-c", PROBE, "a", "b c"), ("-m", "probe", "a"), ("below/probe.py", "--flag")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for path in (tmp_path / "probe.py", tmp_path / "below" / "probe.py"):
        path.write_text(PROBE)
    return tmp_path


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PROBED", "here")
    return dict(os.environ)


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_it_is_as_python_is(warm_at: str, folder: Path, environ: dict[str, str], words: Sequence[str]) -> None:
    real, ours = (
        subprocess.run([*python, *words], cwd=folder, capture_output=True, text=True, input="typed")
        for python in ([sys.executable], client(warm_at))
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (real.returncode, real.stdout, real.stderr)
    assert "typed" in real.stdout and real.returncode == 3
    forked = Forked(warm_at, words, folder, environ)
    said, _ = forked.communicate(60)
    assert sorted(said.splitlines()) == sorted((real.stdout.replace("typed", "") + real.stderr).splitlines())
    assert forked.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_as_they_end_python(
    warm_at: str, folder: Path, environ: dict[str, str], number: signal.Signals
) -> None:
    code = "import time; print('up', flush=True); time.sleep(1000)"
    forked = Forked(warm_at, ("-c", code), folder, environ)
    assert forked.stdout.readline() == "up\n"
    assert os.getpgid(forked.pid) == forked.pid
    assert forked.poll() is None
    forked.send_signal(number)
    said, _ = forked.communicate(60)
    assert forked.returncode == -number
    assert ("KeyboardInterrupt" in said) is (number is signal.SIGINT)


def test_an_error_is_shown_and_has_its_code(warm_at: str, folder: Path, environ: dict[str, str]) -> None:
    forked = Forked(warm_at, ("-c", "raise ValueError('of the script')"), folder, environ)
    assert "ValueError: of the script" in forked.communicate(60)[0]
    assert forked.returncode == 1


def test_it_ends_with_its_caller(warm_at: str, folder: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(1000)"
    with subprocess.Popen([*client(warm_at), "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "up\n"
        asking.kill()
        assert asking.stdout.read() == ""  # the other one, too, has let go of it
