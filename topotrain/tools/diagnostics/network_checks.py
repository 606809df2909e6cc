"""Check the network before a job: its rendezvous, its hosts, and its ports."""

import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from topotrain.comm.store import StoreError, host_store, open_store
from topotrain.comm.store.discovery.environment import HOST
from topotrain.comm.store.store_url import RENDEZVOUS_VARIABLE, StoreUrl, parse
from topotrain.comm.store.tcp_store import AccessDenied
from topotrain.comm.transport.tcp_socket import LAST_PORT, InvalidHost, bind, is_loopback, resolve
from topotrain.tools.diagnostics.finding import Finding, failed, ok, warning
from topotrain.tools.diagnostics.folder_checks import clock_difference, clock_finding, nearest
from topotrain.tools.plan.layout_plan import SURVIVES

PATIENCE_S = 5.0
"""Seconds for which a store is tried."""
_TTL_S = 60.0  # of the value that is written for the check, in case this process is killed
_NAME = "rendezvous"


def rendezvous_findings(url: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about the store of a job. Raises StoreError for a bad URL."""
    if not url:
        yield ok(_NAME, "the processes meet in the workspace; another host needs --rendezvous")
        return
    address = parse(url)
    if address.scheme == "file":
        yield from _file_findings(address, environ)
    elif address.scheme == "env" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield ok(_NAME, "torchrun's own store, which is there while its job runs")
    else:
        yield _server_finding(url, address, environ)


def _file_findings(address: StoreUrl, environ: Mapping[str, str]) -> Iterator[Finding]:
    folder = nearest(Path(address.path))
    try:
        difference = clock_difference(folder)
        # Opening the store would make its folder, which is left to the job.
        if folder == Path(address.path):
            _round_trip(address.text, environ)
    except (OSError, StoreError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        advice = "name a folder that this user can write on every host of the job"
        yield failed(_NAME, f"{address.text}: {folder} cannot be used ({why})", advice)
        return
    made = "can be used" if folder == Path(address.path) else f"can be made in {folder}"
    yield ok(_NAME, f"{address.text} {made}")
    yield clock_finding("clock of the store", folder, difference)


def _server_finding(url: str, address: StoreUrl, environ: Mapping[str, str]) -> Finding:
    try:
        served = host_store(url, environ=environ)
        if served is not None:
            served.close()
            text = f"{served.url} is free, and unit 0 can serve the store here"
            return ok(_NAME, f"{text}; the job then ends when unit 0 is lost, which it does not with {SURVIVES}")
        took = _round_trip(url, environ)
    except AccessDenied as error:
        return failed(_NAME, str(error), "give all hosts the same TOPOTRAIN_TOKEN, or the same file of it")
    except (StoreError, TimeoutError) as error:
        if address.scheme == "tcp" and not _refers_here(address.host):
            advice = "start the job's unit 0 or `topotrain store` there before the others"
            return warning(_NAME, f"no store answers yet ({error})", advice)
        advice = "correct what this names, start that server, or open the port between the hosts"
        return failed(_NAME, str(error), advice)
    return ok(_NAME, f"{address.text} answers in {1000 * took:.1f} ms")


def _round_trip(url: str, environ: Mapping[str, str]) -> float:
    """Write, read and remove one value; return the seconds of the read."""
    key, value = f"doctor/{secrets.token_hex(8)}", b"1"
    with closing(open_store(url, patience=PATIENCE_S, environ=environ)) as store:
        store.set(key, value, _TTL_S)
        begin = time.monotonic()
        found = store.get(key)
        took = time.monotonic() - begin
        store.delete(key)
    if found != value:
        raise StoreError("a value that was written is not there")
    return took


def _refers_here(host: str) -> bool:
    """Whether a port of this address can be bound on this machine."""
    try:
        family, address = resolve(host, 0)
        bind(family, address, 0).close()
    except (OSError, InvalidHost):
        return False
    return True


def host_findings(url: str, hosts: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    names = dict.fromkeys([*hosts, *_named(url, environ)])
    for name in names:
        try:
            _, address = resolve(name, 0)
        except (OSError, InvalidHost) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            advice = "correct the name, or add it to DNS or /etc/hosts"
            yield failed("host", f"{name} is not found ({why})", advice)
        else:
            if is_loopback(address) and len(hosts) > 1:
                advice = "other hosts reach themselves there; give an address of the network"
                yield warning("host", f"{name} is the loopback", advice)
            else:
                yield ok("host", f"{name} is {address}" if name != address else f"{name} is an address")


def _named(url: str, environ: Mapping[str, str]) -> Iterator[str]:
    scheme = parse(url).scheme if url else ""
    named = environ.get(RENDEZVOUS_VARIABLE, "") if scheme == "env" else url
    if named and parse(named).host:
        yield parse(named).host
    elif scheme == "env" and environ.get("MASTER_ADDR"):
        yield environ["MASTER_ADDR"]
    if environ.get(HOST):
        yield environ[HOST]


def port_finding(start: int, wanted: int) -> Finding:
    wanted = min(wanted, LAST_PORT)
    taken: list[int] = []
    found: list[int] = []
    # A process takes the first free port from the start on, so those in between are only passed over.
    for port in range(start, LAST_PORT + 1):
        if len(found) == wanted:
            break
        (found if _is_free(port) else taken).append(port)
    if len(found) < wanted:
        text = f"{len(found)} ports from cluster.start_port = {start} on are free, {wanted} are needed"
        return failed("ports", text, "choose a smaller cluster.start_port, above 1023")
    passed = f"; {len(taken)} before are in use and passed over" if taken else ""
    return ok("ports", f"{found[0]} to {found[-1]} are known to be free here for {wanted} processes{passed}")


def _is_free(port: int) -> bool:
    try:
        bind(socket.AF_INET, "0.0.0.0", port).close()
    except OSError:
        return False
    return True
