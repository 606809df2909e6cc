"""Real redis-server processes for tests: with a password, and with TLS."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from free_ports import free_port

PASSWORD = "pass word/@"
MISSING = "" if shutil.which("redis-server") else "redis-server is not installed (Debian package redis-server)"


@contextmanager
def redis_server(folder: Path, tls: bool = False, port: int = 0) -> Iterator[str]:
    """Run one, at a free port where none is given; yields the URL of its database 0."""
    port = port or free_port()
    lines = ["bind 127.0.0.1", f'requirepass "{PASSWORD}"', 'save ""', "appendonly no", f"dir {folder}", "daemonize no"]
    login = f":{quote(PASSWORD, safe='')}@127.0.0.1:{port}/0"
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
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, "redis-server does not start"
                time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


def certificate(folder: Path) -> None:
    """key.pem and cert.pem, for 127.0.0.1 and two days."""
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *kind, *files, *names], check=True, capture_output=True, timeout=60)
