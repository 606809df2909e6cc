"""Check folders and the network before a job, on this machine.

A folder must be writable, not in use, with enough space and the same clock. A check leaves no file and makes no folder:
a folder that is missing is checked at its nearest parent. Of the network its rendezvous, hosts and ports are checked.
"""

import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from topotrain.comm.store import StoreError, host_store, open_store
from topotrain.comm.store.discovery.environment import HOST
from topotrain.comm.store.store_url import RENDEZVOUS_VARIABLE, StoreUrl, parse
from topotrain.comm.store.tcp_store import AccessDenied
from topotrain.comm.transport.tcp_socket import LAST_PORT, InvalidHost, bind, is_loopback, resolve
from topotrain.launch.agent.file_locks import LockTaken, locked
from topotrain.tools.diagnostics.finding import Finding, failed, ok, warning
from topotrain.tools.plan.layout_plan import SURVIVES

LITTLE_BYTES = 1_000_000_000
"""Free space below which a warning comes: a snapshot and the final parameters of a small model."""
CLOCK_S = 2.0
"""Seconds that the clock of a file system may differ from that of this machine."""
_OF_ONE_HOST = frozenset(["btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])
_TICK_S = 0.05  # the kernel stamps files with a clock of coarse steps
PATIENCE_S = 5.0
"""Seconds for which a store is tried."""
_TTL_S = 60.0  # of the value that is written for the check, in case this process is killed
_NAME = "rendezvous"


def workspace_findings(workspace: Path) -> Iterator[Finding]:
    folder = nearest(workspace)
    try:
        difference = clock_difference(folder)
    except OSError as error:
        advice = "choose another cluster.workspace, or change the mode of this folder"
        yield failed("workspace", f"{folder} cannot be written ({error.strerror})", advice)
        return
    taken = _in_use(workspace)
    made = "can be written" if folder == workspace.absolute() else f"can be made in {folder}"
    yield failed("workspace", str(workspace), taken) if taken else ok("workspace", f"{workspace} {made}")
    yield space_finding(folder, shutil.disk_usage(folder).free)
    yield clock_finding("clock", folder, difference)


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    # Not `Path.exists`, which raises for a folder that this user may not enter.
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def clock_difference(folder: Path) -> float:
    """Return by how many seconds a new file's time is ahead of this machine's.

    0 within the steps of the clock. Raises OSError where no file can be written.
    """
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".topotrain-doctor-") as file:
        file.write(b"1")
        file.flush()
        stamped, after = os.fstat(file.fileno()).st_mtime, time.time()
    if before - _TICK_S <= stamped <= after + _TICK_S:
        return 0.0
    return stamped - (before if stamped < before else after)


def clock_finding(name: str, folder: Path, difference: float) -> Finding:
    if abs(difference) <= CLOCK_S:
        return ok(name, f"files in {folder} have this machine's time")
    order = "ahead of" if difference > 0 else "behind"
    text = f"files in {folder} are {abs(difference):.1f} s {order} this machine's clock"
    return warning(name, text, "set the clocks by NTP; else the list of jobs and the logs have wrong times")


def space_finding(folder: Path, free: int) -> Finding:
    text = f"{free / 1e9:,.1f} GB are free in {folder}"
    if free >= LITTLE_BYTES:
        return ok("free space", text)
    advice = "the final parameters and up to three snapshots must fit; free some, or choose another cluster.workspace"
    return warning("free space", text, advice)


def sharing_finding(folder: Path, mounts: Path = Path("/proc/mounts")) -> Finding:
    """Return the finding about the folder that several hosts need as one."""
    longest, kind = 0, "an unknown file system"
    for _, mounted, named, *_ in map(str.split, mounts.read_text().splitlines()):
        # A later mount at the same place hides the earlier one.
        if folder.is_relative_to(mounted) and len(mounted) >= longest:
            longest, kind = len(mounted), named
    if kind not in _OF_ONE_HOST:
        return ok("shared folder", f"{folder} is on {kind}")
    advice = "use a folder that all hosts see; else the job cannot go on from its snapshots"
    return warning("shared folder", f"{folder} is on {kind}, of this machine alone", advice)


def _in_use(workspace: Path) -> str:
    """Return why another job excludes this one, or ""."""
    lock = workspace / "lock"
    # Opening it would make it.
    if not lock.is_file():
        return ""
    try:
        with locked(lock, fcntl.LOCK_EX):
            return ""
    except LockTaken as taken:
        return str(taken)
    except OSError as error:
        return f"{lock} cannot be locked ({error.strerror})"


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
