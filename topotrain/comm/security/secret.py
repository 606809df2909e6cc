"""Load the secret that all processes of a job know, and derive keys from it.

* A secret comes from the environment or from a file that only its owner can read, never from a command line.
* No error message shows any part of it.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from topotrain.comm.store.key_validation import StoreError
from topotrain.config.private_files import make_folder

SECRET_BYTES = 32
VARIABLE, FILE_VARIABLE = "TOPOTRAIN_TOKEN", "TOPOTRAIN_TOKEN_FILE"
DEFAULT_FILE = Path(".config/topotrain/token")
"""Below the home directory; made at first use."""

_ACCEPTED = f"must be {2 * SECRET_BYTES} hexadecimal digits"
_HEX = re.compile(rf"[0-9a-fA-F]{{{2 * SECRET_BYTES}}}")
_MOST = 1024  # bytes read of a file that may be anything


def load_secret(environ: Mapping[str, str]) -> bytes:
    """Load the job's secret: 32 bytes from the environment or a file.

    Its source is TOPOTRAIN_TOKEN, or the file TOPOTRAIN_TOKEN_FILE, or ~/.config/topotrain/token, which is made with
    mode 0600 if it is missing.

    Raises:
        StoreError: names the variable or the file, and what would be accepted.
    """
    given = environ.get(VARIABLE, "")
    if given:
        return _parsed(given, VARIABLE)
    named = environ.get(FILE_VARIABLE, "")
    if named:
        return _read(Path(named), f"{FILE_VARIABLE} = {named!r}")
    home = environ.get("HOME", "")
    path = (Path(home) if home else _home()) / DEFAULT_FILE
    if not path.exists():
        _make(path)
    return _read(path, str(path))


def job_key(secret: bytes, *words: str) -> bytes:
    """Derive 32 bytes for one purpose, by HMAC-SHA256 as in HKDF (RFC 5869, step 2).

    They reveal nothing of the secret or of the keys for other words.

    Raises:
        ValueError: a secret of another length than 32 bytes.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret of {len(secret)} bytes: must have {SECRET_BYTES}")
    # With their lengths, so that ("ab", "c") and ("a", "bc") have different keys.
    label = b"".join(len(word.encode()).to_bytes(4, "big") + word.encode() for word in words)
    return hmac.digest(secret, b"topotrain key" + label + b"\x01", hashlib.sha256)


def _parsed(text: str, source: str) -> bytes:
    if not _HEX.fullmatch(text.strip()):
        raise StoreError(f"{source}: {_ACCEPTED}, got {len(text.strip())} characters")
    return bytes.fromhex(text.strip())


def _read(path: Path, source: str) -> bytes:
    try:
        # Without O_NONBLOCK opening a named pipe would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            # Of the open file: the name may lead to another file by now.
            info = os.fstat(descriptor)
            _check(info, source)
            raw = file.read(_MOST)
    except OSError as error:
        raise StoreError(f"{source}: cannot be read ({error.strerror}); a file of 64 hexadecimal digits") from None
    return _parsed(raw.decode("ascii", "replace"), source)


def _check(info: os.stat_result, source: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise StoreError(f"{source}: must be a file")
    if info.st_uid not in (os.geteuid(), 0):
        raise StoreError(f"{source}: must belong to this user, belongs to user {info.st_uid}")
    if info.st_mode & 0o077:
        raise StoreError(f"{source}: others can use it (mode {info.st_mode & 0o777:04o}), must have mode 0600")


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise StoreError(f"no home directory to keep a secret in: set {VARIABLE} or {FILE_VARIABLE}") from None


def _make(path: Path) -> None:
    """Write a new secret; the first of several processes wins."""
    # Under a name that is only linked when the file is complete: a reader must never find half a secret.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        make_folder(path.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            with suppress(FileExistsError):
                os.link(temporary, path)  # a rename would replace the one that another process has read already
        finally:
            os.unlink(temporary)
    except OSError as error:
        what = f"cannot be made ({error.strerror}): set {VARIABLE} or {FILE_VARIABLE}"
        raise StoreError(f"{path}: {what}") from None
