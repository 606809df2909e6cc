"""Servers that the user starts by hand: they admit workers, and end with the job.

They print which workers they wait for, and refuse a second process for the same worker. When a worker is lost before
the end of its script, they send the others the reason why the job cannot go on.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from topotrain.comm.router import ConnectTimeouts, Router, RouterConfig
from topotrain.comm.security.handshake import Identity, Peer
from topotrain.comm.security.secret import job_key
from topotrain.comm.store import Store
from topotrain.comm.store.discovery.static_addresses import StaticStore
from topotrain.comm.transport import Refused, TransportError
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError, Job, OnFailure, TransportChoice
from topotrain.config.plain_text import printable
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.client.client import JobError
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.protocol import Fail
from topotrain.core.server.server import Server
from topotrain.launch.runtime.child_channel import threads
from topotrain.launch.runtime.process_host import HostedServers, HostObserver, HostOptions, flushing

QUIET_S, REPEAT_S = 5.0, 30.0
"""Seconds of waiting before the first notice, and between later ones."""
CAUSE_S = 1.0
"""Seconds for which servers wait for the cause after an error that may only be a consequence."""
_MOST_WORDS = 40  # characters; the handshake has 64 for these words and a part of the digest
_DIGEST_DIGITS = 20
_TEXT = 500  # characters of another process's error


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Settings that all manually started processes of a job must share.

    Errors use the terms of the API by which the process was started.

    words: part of the handshake, so that a refusal can show the difference; at most 40 ASCII characters.
    compare: the settings to compare after a refusal.
    patience_s: seconds for which processes wait for each other before training starts.
    name: returns the name of a worker or a server in that API.
    apart: the setting by which two workers differ, and its value here.
    """

    words: str = ""
    compare: str = "the job's settings"
    patience_s: float = 600.0
    name: Callable[[Address], str] = str
    apart: str = "each process needs an index of its own in the job"


def by_hand(job: Job) -> Job:
    """Return the job as manually started processes run it."""
    # TCP: the processes share no folder for shared memory. kStop: without a launcher nothing restarts.
    return replace(job, on_failure=OnFailure.kStop, cluster=replace(job.cluster, transport=TransportChoice.kTcp))


def place_of(
    job: Job,
    store: Store,
    secret: bytes,
    terms: SharedSettings,
    host: str,
    port: int = 0,
) -> RouterConfig:
    """Return the router's settings for a process of a job. Raises ConfigError."""
    words = terms.words.encode("ascii", "replace").decode()[:_MOST_WORDS]
    # A part of the digest is enough to notice another job, and leaves room for the words.
    digest = f"{words} {job.digest()[:_DIGEST_DIGITS]}".strip()
    identity = Identity(job.name, job_key(secret, "by hand", job.name), 0, 0, digest)
    meeting = ConnectTimeouts(terms.patience_s, True, WaitNotice(terms.name))
    return RouterConfig(job, layout(job.cluster), identity, store, Path(), host, port, meeting)


class WaitNotice:
    """Prints to stderr which process this one waits for, when that takes long."""

    def __init__(self, name: Callable[[Address], str]) -> None:
        self._name = name
        self._due = time.monotonic() + QUIET_S

    def __call__(self, peer: Address, reason: str) -> None:
        """Print the peer that this process waits for."""
        self.show(f"{self._name(peer)} ({reason})")

    def show(self, name: str) -> None:
        """Print that this process waits for another, unless a notice came recently."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REPEAT_S
            tell(f"waiting for {name}")


def tell(text: str) -> None:
    """Print a line for the user."""
    print(f"topotrain: {printable(text)}", file=sys.stderr, flush=True)


def understandable(error: TransportError, terms: SharedSettings) -> TransportError:
    """Return the error with advice for the user."""
    if not isinstance(error, Refused):
        return error
    advice = {
        "CONFIG": f"{terms.compare} must be the same in all processes of the job",
        "AUTH": "the token must be the same in all processes of the job: TOPOTRAIN_TOKEN, or TOPOTRAIN_TOKEN_FILE",
        "JOB": f"compare {terms.compare}",
        "TWICE": terms.apart,
    }.get(error.code)
    return error if advice is None else Refused(error.code, f"{error.text}; {advice}")


# Without a launcher only the servers see which workers are present.
class WorkerPresence(HostObserver):
    """The workers that have joined the servers of this process, and the first failure.

    It implements `process_host.ConnectionObserver`.
    """

    def __init__(self, topology: Topology, terms: SharedSettings, servers: Iterable[Address]) -> None:
        self.connections = self
        self.missing = {worker: None for server in sorted(servers) for worker in workers_of(topology, server)}
        self.failure: Fail | None = None  # why the job cannot go on
        self._name = terms.name
        self.change = threading.Condition()

    def on_joined(self, server: Server, worker: Address) -> None:
        """Record a worker that has joined."""
        with self.change:
            self.missing.pop(worker, None)

    def on_failed(self, server: Server, worker: Address, why: Fail) -> None:
        """Record a failed worker."""
        self.fail(f"{self._name(worker)} failed: {why.text[:_TEXT]}", cause=why.cause)

    def on_lost(self, server: Server, peer: Address, reason: str) -> None:
        """Record a lost connection."""
        if peer.role is Role.SERVER:
            over = not server.running
        elif peer.group not in server.groups:
            over = True
        else:
            # The main worker still reads the result after the end of its script.
            is_main = (peer.group, peer.index) == (0, 0)
            over = server.has_finished(peer) and (server.done or not is_main)
        if not over:
            self.fail(f"{self._name(peer)} is gone, the job cannot go on: {reason}", cause=False)

    def fail(self, text: str, cause: bool = True) -> None:
        """Record that the job cannot go on."""
        with self.change:
            # The first cause counts; a lost connection without one may only follow from it.
            if self.failure is None or (cause and not self.failure.cause):
                self.failure = Fail(text, cause=cause)
            self.change.notify_all()

    def on_failure(self) -> None:
        """Record the failure of a server of this process. Call it inside `except`."""
        traceback.print_exc()
        self.fail(f"a server failed: {traceback.format_exc().strip().splitlines()[-1]}")


class ManualServers:
    """Servers that listen at one address.

    Args:
        place: the address, and how to find the others.
        addresses: the servers.
        presence: records workers that join and leave.
    """

    def __init__(self, place: RouterConfig, addresses: Sequence[Address], presence: WorkerPresence) -> None:
        self._place, self._presence = place, presence
        self._open = False
        self.router = Router(place, ProcessMemory())
        self.router.set_admission(self)
        self.servers = HostedServers(place, self.router, PrivateMemory(), addresses, HostOptions(presence))

    def open(self) -> None:
        """Connect to the other servers, then admit workers. Raises TransportError."""
        self.servers.open()
        self._open = True

    def admit(self, peer: Peer, connected: bool) -> None:
        """Refuse a second process of one worker, and all before the servers are connected."""
        if peer.address.role is not Role.WORKER:
            return
        if connected:
            twice = "is here already: two processes claim to be the same one"
            raise Refused("TWICE", f"{peer.address} {twice}")
        if not self._open:
            raise Refused("FULL", "the servers of the job are not all connected yet")

    @property
    def done(self) -> bool:
        """Whether the job needs these servers no more."""
        return all(endpoint.done for endpoint in self.servers.endpoints.values())

    def fail(self, why: Fail) -> None:
        """Send all workers the reason why the job cannot go on."""
        for me in self.servers.endpoints:
            # Also those that have sent nothing yet: they would wait for the first step.
            for worker in workers_of(self._place.topology, me):
                with suppress(TransportError):
                    self.router.send(me, worker, why)


def workers_of(topology: Topology, server: Address) -> list[Address]:
    """Return the workers of a server's group."""
    groups = topology.worker_groups_of(server.group)
    return [worker for group in groups for worker in topology.workers(group)]


@flushing()
def serve(
    job: Job,
    servers: Sequence[Address],
    store: Store,
    secret: bytes,
    host: str = "127.0.0.1",
    port: int = 0,
    terms: SharedSettings | None = None,
) -> None:
    """Run these servers of a job until it needs them no more.

    Ctrl-C ends them at once, and the job with them.

    Args:
        job: the job. Every process of it must have the same one (`Job.digest`).
        servers: addresses of the layout.
        store: where processes find each other. With a `StaticStore` each server listens at its address in the store.
        secret: 32 bytes, see `comm.security.secret.load_secret`.
        host, port: where to listen, for any other store. Port 0: the first free one from the job's `start_port` on.
        terms: see `SharedSettings`.

    Raises:
        ConfigError: the job's counts do not fit together, or there is no such server.
        TransportError: a port cannot be used, or another server cannot be reached or refuses the connection.
        JobError: the job cannot go on; all connected workers have received the reason.
    """
    job, terms = by_hand(job), terms or SharedSettings()
    topology = layout(job.cluster)
    for me in servers:
        check_there(topology, me)
    before = torch.get_num_threads()  # the process belongs to the user: restore its setting at the end
    torch.set_num_threads(threads(os.environ))  # as under a launcher
    presence = WorkerPresence(topology, terms, servers)
    hosts: list[ManualServers] = []
    try:
        for (at_host, at_port), members in _hosts(servers, store, host, port).items():
            place = place_of(job, store, secret, terms, at_host, at_port)
            hosts.append(ManualServers(place, members, presence))
            hosts[-1].open()  # in the servers' order: each connects to those before it
        tell(f"{', '.join(map(terms.name, servers))}: ready")
        _wait(hosts, presence, terms)
    except BaseException as error:
        for each in hosts:
            each.fail(_failure(error, presence))
        if isinstance(error, TransportError):
            raise understandable(error, terms) from error
        raise
    finally:
        for each in hosts:
            each.router.close()
        torch.set_num_threads(before)


def check_there(topology: Topology, address: Address) -> None:
    """Raise ConfigError where the layout has no process of that address."""
    try:
        topology.unit_of(address)
    except ValueError as error:
        raise ConfigError(f"the process's place, {address.role.name.lower()}", address[1:], str(error)) from None


def _hosts(servers: Sequence[Address], store: Store, host: str, port: int) -> dict[tuple[str, int], list[Address]]:
    """Return the servers of this process by their listening address."""
    found: dict[tuple[str, int], list[Address]] = {}
    for me in sorted(servers):
        where = store.place(me.group, me.index) if isinstance(store, StaticStore) else (host, port)
        found.setdefault(where, []).append(me)
    return found


def _wait(hosts: Sequence[ManualServers], presence: WorkerPresence, terms: SharedSettings) -> None:
    """Return when the job needs these servers no more. Raises JobError."""
    waiting = WaitNotice(terms.name)
    until, end = time.monotonic() + terms.patience_s, 0.0
    while not all(each.done for each in hosts):
        with presence.change:
            # With a limit: not every change of `done` notifies this condition, and the time limits must be noticed.
            presence.change.wait(0.1)
            failure, missing = presence.failure, ", ".join(map(terms.name, presence.missing))
        if failure is not None:
            now = time.monotonic()
            # An error may be the consequence of a cause that is reported a moment later.
            end = end or now + CAUSE_S
            if failure.cause or now >= end:
                raise JobError(failure.text, failure.config)
        if missing and time.monotonic() > until:
            raise JobError(f"{missing} did not come within {terms.patience_s:g} s", True)
        if missing:
            waiting.show(missing)


def _failure(error: BaseException, presence: WorkerPresence) -> Fail:
    if isinstance(error, JobError):
        return presence.failure or Fail(str(error), error.config, cause=True)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Fail("the servers were stopped", cause=True)
    return Fail(f"the servers cannot go on: {error}", cause=True)
