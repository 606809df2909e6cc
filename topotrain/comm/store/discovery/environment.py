"""Find, and where needed serve, the store that the environment names (env://).

TOPOTRAIN_RENDEZVOUS, a URL, comes first. Else MASTER_ADDR and MASTER_PORT, as most launchers set them, name a tcp://
store of topotrain. Under torchrun (TORCHELASTIC_USE_AGENT_STORE) torch's own store has that port. It then holds one
value, the URL of topotrain's store, which the unit of rank 0 serves at a free port. Its address is TOPOTRAIN_HOST, if
that is set; else the loopback if all processes are on one machine, else MASTER_ADDR.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from topotrain.comm.security.secret import load_secret
from topotrain.comm.store.key_validation import StoreError
from topotrain.comm.store.store_base import Store
from topotrain.comm.store.store_url import ACCEPTED, RENDEZVOUS_VARIABLE, StoreUrl, parse
from topotrain.comm.store.tcp_store import AccessDenied, TcpStore
from topotrain.comm.transport.tcp_socket import LAST_PORT, InvalidHost, is_loopback, resolve, url_of

if TYPE_CHECKING:
    from topotrain.comm.store.tcp_store_server import TcpServer

HOST = "TOPOTRAIN_HOST"
PUBLISHED = "topotrain/store"
"""The key in torch's store."""
RENDEZVOUS_S = 60.0  # for torch's store to answer
_PROBE_S = 2.0  # for a store to answer
_PAUSE = 0.25


@dataclass(frozen=True, slots=True)
class Meeting:
    """How to wait for the store of rank 0.

    seconds: for how long. notice: called again and again with what is waited for.
    """

    seconds: float = RENDEZVOUS_S
    notice: Callable[[str], None] = lambda what: None


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """The values of MASTER_ADDR and MASTER_PORT."""

    host: str
    port: int
    torch: bool  # the port is that of torch's own store, of this attempt
    attempt: str
    alone: bool  # all processes are on this machine
    reach: str  # the address at which others reach this machine, if it is set


def find(
    url: StoreUrl, environ: Mapping[str, str], secret: bytes | None, patience: float, meeting: Meeting | None = None
) -> Store:
    """Open the store at MASTER_ADDR, where env:// stands for that. Raises StoreError."""
    master = _master(url, environ)
    secret = load_secret(environ) if secret is None else secret
    if not master.torch:
        return TcpStore(master.host, master.port, secret, patience)
    return _find_published(master, secret, patience, meeting or Meeting())


def host(url: StoreUrl, environ: Mapping[str, str], secret: bytes | None) -> "TcpServer | None":
    """See `topotrain.comm.store.host_store`."""
    if url.scheme == "env":
        named = named_url(url, environ)
        if named:
            return host(parse(named), environ, secret)
        master = _master(url, environ)
        if master.torch:
            return _serve_published(master, load_secret(environ) if secret is None else secret)
        return _serve(master.host, master.port, load_secret(environ) if secret is None else secret)
    if url.scheme != "tcp":
        return None
    return _serve(url.host, url.port, load_secret(environ) if secret is None else secret)


def _serve(name: str, port: int, secret: bytes) -> "TcpServer | None":
    from topotrain.comm.store.tcp_store_server import AddressElsewhere, AddressInUse, TcpServer

    try:
        return TcpServer(name, port, secret)
    except AddressElsewhere:
        return None
    except AddressInUse as error:
        store = TcpStore(name, port, secret, 0.0)
        try:
            store.keys("no-such-key")  # it answers: a store of topotrain is served there already
        except StoreError as other:
            raise StoreError(f"{error}; what listens there is not a topotrain store: {other}") from None
        finally:
            store.close()
        return None


def named_url(url: StoreUrl, environ: Mapping[str, str]) -> str:
    """Return the URL of TOPOTRAIN_RENDEZVOUS, or "". Raises StoreError."""
    named = environ.get(RENDEZVOUS_VARIABLE, "")
    if named and parse(named).scheme == "env":
        raise url.fail(
            f"{RENDEZVOUS_VARIABLE} = {named!r} leads back to itself: must be {', '.join(list(ACCEPTED.values())[:-1])}"
        )
    return named


def _master(url: StoreUrl, environ: Mapping[str, str]) -> MasterAddress:
    name, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not name or not port:
        raise url.fail(f"set {RENDEZVOUS_VARIABLE} to a URL, or both MASTER_ADDR and MASTER_PORT")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= LAST_PORT):
        raise url.fail(f"MASTER_PORT = {port!r}: must be 1 to {LAST_PORT}")
    here, all_of = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    return MasterAddress(
        name,
        int(port),
        environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        bool(here) and here == all_of,
        environ.get(HOST, ""),
    )


def _serve_published(master: MasterAddress, secret: bytes) -> "TcpServer":
    """Serve a store at the master's address, and publish its URL in torch's store."""
    from topotrain.comm.store.tcp_store_server import TcpServer

    store = _torch_store(master)
    server = TcpServer(master.reach or ("127.0.0.1" if _is_local(master) else master.host), 0, secret)
    try:
        with _torch_errors(master):
            store.set(_key(master), server.url)
    except BaseException:
        server.close()
        raise
    return server


def _is_local(master: MasterAddress) -> bool:
    try:
        return master.alone or is_loopback(resolve(master.host, 0)[1])
    except (OSError, InvalidHost):
        raise StoreError(f"MASTER_ADDR = {master.host!r}: no such host") from None


def _find_published(master: MasterAddress, secret: bytes, patience: float, meeting: Meeting) -> Store:
    """Open the store at the URL that torch's store holds, once it answers."""
    store, until, problem = _torch_store(master), time.monotonic() + meeting.seconds, "it has not said where"
    while True:
        with _torch_errors(master):
            # Not `get`, which waits in C++: Ctrl-C would have no effect.
            url = parse(store.get(_key(master)).decode()) if store.check([_key(master)]) else None
        if url is not None:
            # The URL may be that of a store that has ended with an earlier start, and be replaced any moment.
            with closing(TcpStore(url.host, url.port, secret, _PROBE_S)) as found:
                try:
                    found.keys("no-such-key")
                    return TcpStore(url.host, url.port, secret, patience)
                except AccessDenied:  # another secret: a later try would be refused, too
                    raise
                except StoreError as error:
                    problem = str(error)
        if time.monotonic() > until:
            raise StoreError(f"the unit of rank 0 has served no store within {meeting.seconds:g} s: {problem}")
        meeting.notice("the store of unit 0")
        time.sleep(_PAUSE)


def _torch_store(master: MasterAddress) -> Any:
    import torch.distributed as dist

    make: Any = vars(dist)["TCPStore"]  # re-exported without being declared in its type stubs
    deadline = timedelta(seconds=RENDEZVOUS_S)
    with _torch_errors(master):
        # A client: torchrun's agent serves this store, and counts no workers there.
        return make(master.host, master.port, None, False, deadline, wait_for_workers=False)


def _key(master: MasterAddress) -> str:
    # torch's store outlives a restart of the workers, and would still have the URL of the attempt before.
    return f"{PUBLISHED}/{master.attempt}"


@contextmanager
def _torch_errors(master: MasterAddress) -> Iterator[None]:
    """Raise StoreError for an error of torch's store."""
    try:
        yield
    except RuntimeError as error:
        where = url_of(master.host, master.port)
        raise StoreError(f"torch's store at {where} does not answer: {str(error).splitlines()[0]}") from None
