"""Where the secret of a job comes from, and what is made of it."""

import os

import pytest

from topotrain.comm.security.secret import job_key, load_secret
from topotrain.comm.store import StoreError

DIGITS = "ab" * 32


def test_the_variable_comes_first_then_the_file_then_home(tmp_path):
    named, home = tmp_path / "named", tmp_path / "home"
    named.touch(mode=0o600)
    named.write_text("cd" * 32 + "\n")
    environ = {"TOPOTRAIN_TOKEN": DIGITS, "TOPOTRAIN_TOKEN_FILE": str(named), "HOME": str(home)}
    assert load_secret(environ) == b"\xab" * 32
    del environ["TOPOTRAIN_TOKEN"]
    assert load_secret(environ) == b"\xcd" * 32
    del environ["TOPOTRAIN_TOKEN_FILE"]
    made = load_secret(environ)
    path = home / ".config" / "topotrain" / "token"
    assert made == bytes.fromhex(path.read_text().strip()) and len(made) == 32
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert load_secret(environ) == made
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["ab" * 31, "ab" * 33, "xy" * 32, DIGITS[:-1] + "é", " "])
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path, text):
    with pytest.raises(StoreError, match="TOPOTRAIN_TOKEN: must be 64 hexadecimal digits") as caught:
        load_secret({"TOPOTRAIN_TOKEN": text})
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(StoreError, match=f"TOPOTRAIN_TOKEN_FILE = '{file}': must be 64") as again:
        load_secret({"TOPOTRAIN_TOKEN_FILE": str(file)})
    assert text not in f"{caught.value}{again.value}".replace(" ", "") or text == " "


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o601])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
    file = tmp_path / "token"
    file.write_text(DIGITS)
    file.chmod(mode)
    with pytest.raises(StoreError, match=rf"others can use it \(mode {mode:04o}\), must have mode 0600"):
        load_secret({"TOPOTRAIN_TOKEN_FILE": str(file)})


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"cannot be read \(No such file"):
        load_secret({"TOPOTRAIN_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(StoreError, match=r"must be a file|Is a directory"):
        load_secret({"TOPOTRAIN_TOKEN_FILE": str(tmp_path)})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(StoreError, match="must be a file"):
        load_secret({"TOPOTRAIN_TOKEN_FILE": str(tmp_path / "pipe")})
    (tmp_path / "flat").touch()
    with pytest.raises(StoreError, match="set TOPOTRAIN_TOKEN or TOPOTRAIN_TOKEN_FILE"):
        load_secret({"HOME": str(tmp_path / "flat")})


def test_whoever_was_faster_wins(tmp_path, monkeypatch):
    """Another process's secret appears between our look and our own."""
    path = tmp_path / ".config" / "topotrain" / "token"
    link = os.link

    def late(source, target):
        path.touch(mode=0o600)
        path.write_text(DIGITS)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert load_secret({"HOME": str(tmp_path)}).hex() == DIGITS
    assert list(path.parent.iterdir()) == [path]


def test_keys_differ_by_purpose_and_reveal_nothing():
    secret = bytes(32)
    keys = {job_key(secret, *words) for words in ((), ("a",), ("a", "b"), ("ab",), ("", "ab"), ("b", "a"))}
    assert len(keys) == 6 and all(len(key) == 32 for key in keys)
    assert job_key(secret, "a") == job_key(secret, "a") != job_key(bytes([1] * 32), "a")
    with pytest.raises(ValueError, match="secret of 4 bytes"):
        job_key(b"abcd", "a")
