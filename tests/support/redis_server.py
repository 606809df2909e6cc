"""Real redis-server processes for tests: with a password, and with TLS."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from free_ports import free_port

PASSWORD = "pass word/@"
MISSING = "" if shutil.which("redis-server") else "redis-server is not installed (Debian package redis-server)"


@contextmanager
def redis_server(folder: Path, tls: bool = False) -> Iterator[str]:
    """Run one at a free port; yields the URL of its database 0."""
    host, port = "127.0.0.1", free_port()
    lines = [f"bind {host}", f'requirepass "{PASSWORD}"', 'save ""', "appendonly no", f"dir {folder}", "daemonize no"]
    login = f":{quote(PASSWORD, safe='')}@{host}:{port}/0"
    if tls:
        certificate(folder)
        files = f"tls-cert-file {folder}/cert.pem\ntls-key-file {folder}/key.pem\ntls-ca-cert-file {folder}/cert.pem"
        lines += ["port 0", f"tls-port {port}", files, "tls-auth-clients no"]
        url = f"rediss://{login}?ca={quote(str(folder / 'cert.pem'))}"
    else:
        lines += [f"port {port}"]
        url = f"redis://{login}"
    (folder / "redis.conf").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["redis-server", str(folder / "redis.conf")], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while not _answers(host, port):
            assert process.poll() is None and time.monotonic() < until, "redis-server does not start"
            time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def redis_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """By scheme, the URL of a redis-server, started when it is first asked for."""
    urls: dict[str, str] = {}
    with ExitStack() as running:

        def url_of(scheme: str = "redis") -> str:
            pytest.importorskip("redis", reason="redis-py is not installed")
            if MISSING:
                pytest.skip(MISSING)
            if scheme == "rediss" and not shutil.which("openssl"):
                pytest.skip("openssl is not installed")
            if scheme not in urls:
                urls[scheme] = running.enter_context(redis_server(tmp_path_factory.mktemp(scheme), scheme == "rediss"))
            return urls[scheme]

        yield url_of


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def certificate(folder: Path) -> None:
    """key.pem and cert.pem, for 127.0.0.1 and two days."""
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *kind, *files, *names], check=True, capture_output=True, timeout=300)
