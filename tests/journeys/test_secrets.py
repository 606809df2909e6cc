"""What a job leaves behind does not have its secret in it, and its servers unpickle nothing."""

import base64
from pathlib import Path

import pytest
from job_runner import SANDBLASTER, Ended, JobRunner

pytestmark = pytest.mark.journey


def forms(secret: bytes) -> dict[str, bytes]:
    """How a secret could stand somewhere; half of it is as bad as all."""
    found = {}
    for part, name in ((secret[:16], "first half"), (secret[16:], "second half")):
        whole = base64.b64encode(part)[:20]
        found |= {
            f"{name}, raw": part,
            f"{name}, hex": part.hex().encode(),
            f"{name}, HEX": part.hex().upper().encode(),
            f"{name}, base64": whole,
            f"{name}, urlsafe": base64.urlsafe_b64encode(part)[:20],
            f"{name}, repr": repr(part)[2:-1].encode(),
        }
    return found


def find(secret: bytes, folder: Path, *outputs: str) -> list[str]:
    """Where it stands, among all files below a folder and what was printed."""
    places = [(str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file()]
    places += [(f"output {number}", text.encode()) for number, text in enumerate(outputs)]
    assert len(places) > 3
    return [f"{form} in {place}" for place, raw in places for form, words in forms(secret).items() if words in raw]


def token_of(ended: Ended) -> bytes:
    """That of the run, which is its own: the one file that has it is there for this user alone."""
    path = ended.workspace / "run" / "token"
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    secret = path.read_bytes()
    assert len(secret) == 32
    path.unlink()
    return secret


def test_the_programs_exception_is_the_cause_and_is_shown_and_does_not_show_it_either(runner: JobRunner) -> None:
    ended = runner.run(SANDBLASTER, "wrong.py", "raise", options=["--profile"], code=1)
    assert "worker 0/1" in ended.err
    assert "ValueError: a fault of the program" in ended.err
    assert 'raise ValueError("a fault of the program")' in ended.err
    assert ended.report["cause"]["who"] == "worker 0/1"
    assert not find(token_of(ended), runner.folder, ended.out, ended.err)


def test_the_search_would_find_it(runner: JobRunner, tmp_path: Path) -> None:
    secret = bytes(range(100, 132))
    for number, raw in enumerate((secret.hex().encode(), secret, base64.b64encode(secret), repr(secret).encode())):
        (tmp_path / f"{number}").write_bytes(b"words " + raw + b" words")
    assert len({text.split(" in ")[1] for text in find(secret, tmp_path)}) == 4


def test_a_server_that_unpickles_ends_the_job(runner: JobRunner) -> None:
    """The hook is in the servers of all jobs of this suite: this one's optimizer, which runs there, unpickles."""
    ended = runner.run(SANDBLASTER, "pickled.py", extra='import: "tests.programs.pickled"', code=1)
    said = ended.out + ended.err + "".join(path.read_text() for path in (ended.workspace / "logs").iterdir())
    assert "audit: a server unpickled fractions.Fraction" in said
