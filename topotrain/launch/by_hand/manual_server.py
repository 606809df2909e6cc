"""Servers that somebody started by hand: they let the workers in that belong to them, and end with the job.

Rule: without a launcher nobody but the servers sees who is there. So they say whom they wait for, refuse whoever comes
twice, and when a worker is lost before its script came to its end they tell the others why the job cannot go on.
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
from topotrain.config.job import ConfigError, Job, OnFailure, Road
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.client.client import JobError
from topotrain.core.protocol import Fail
from topotrain.core.server.server import Server
from topotrain.launch.runtime.child_channel import threads
from topotrain.launch.runtime.process_host import HostedServers, flushing

QUIET_S, REPEAT_S = 5.0, 30.0
"""Waiting is told after so many seconds, and then again every so many."""
CAUSE_S = 1.0
"""How long servers listen for the cause when they have only heard what may follow from it."""
_MOST_WORDS = 40  # characters; the handshake has 64 for them and for a part of the digest
_DIGEST_DIGITS = 20
_TEXT = 500  # characters of somebody else's error


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What processes that are started by hand must have been told alike, in the words of their door.

    words: goes into the handshake, so that a refusal can show what differs; at most 40 ASCII characters. compare: the
    settings to look at then. patience_s: how long everybody waits for everybody else before training starts. name: what
    the door calls a worker or a server. apart: the setting by which two workers differ, and what it is here.
    """

    words: str = ""
    compare: str = "the job's settings"
    patience_s: float = 600.0
    name: Callable[[Address], str] = str
    apart: str = "each process needs a place of its own in the job"


def by_hand(job: Job) -> Job:
    """The job as such processes run it.

    Over TCP, since they share no folder in which memory could be shown; and a loss ends it, since nobody is there who
    could start a process again.
    """
    return replace(job, on_failure=OnFailure.kStop, cluster=replace(job.cluster, road=Road.kTcp))


def place_of(
    job: Job,
    store: Store,
    secret: bytes,
    terms: SharedSettings,
    host: str,
    port: int = 0,
    sockets: Path | None = None,
) -> RouterConfig:
    """The place of a process in a job, see `by_hand`.

    Raises:
        ConfigError: the job's counts do not fit together.
    """
    words = terms.words.encode("ascii", "replace").decode()[:_MOST_WORDS]
    digest = f"{words} {job.digest()[:_DIGEST_DIGITS]}".strip()
    identity = Identity(job.name, job_key(secret, "by hand", job.name), 0, 0, digest)
    meeting = ConnectTimeouts(terms.patience_s, True, WaitNotice(terms.name))
    return RouterConfig(job, layout(job.cluster), identity, store, sockets or Path(), host, port, meeting)


class WaitNotice:
    """Says on stderr whom this process waits for, when that takes long."""

    def __init__(self, name: Callable[[Address], str]) -> None:
        self._name = name
        self._due = time.monotonic() + QUIET_S

    def __call__(self, peer: Address, why: str) -> None:
        self.say(f"{self._name(peer)} ({why})")

    def say(self, whom: str) -> None:
        """Wait for `whom`; told now, or not yet."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REPEAT_S
            tell(f"waiting for {whom}")


def tell(text: str) -> None:
    """A line for the user."""
    print(f"topotrain: {text}", file=sys.stderr, flush=True)


def understandable(error: TransportError, terms: SharedSettings) -> TransportError:
    """The same error, with what the user can do about it."""
    if not isinstance(error, Refused):
        return error
    advice = {
        "CONFIG": f"{terms.compare} must be the same in all processes of the job",
        "AUTH": "the token must be the same in all processes of the job: TOPOTRAIN_TOKEN, or TOPOTRAIN_TOKEN_FILE",
        "JOB": f"compare {terms.compare}",
        "TWICE": terms.apart,
    }.get(error.code)
    return error if advice is None else Refused(error.code, f"{error.text}; {advice}")


# --- the servers -------------------------------------------------------------------------------------------------


class WorkerPresence:
    """Who has come to the servers of this process, who has gone too early, and so whether the job can succeed."""

    def __init__(self, topology: Topology, terms: SharedSettings, servers: Iterable[Address]) -> None:
        self.missing = {worker: None for server in sorted(servers) for worker in workers_of(topology, server)}
        self.failure: Fail | None = None  # why the job cannot go on
        self._name = terms.name
        self.change = threading.Condition()

    def came(self, server: Server, worker: Address) -> None:
        """See `process_host.ConnectionObserver`."""
        with self.change:
            self.missing.pop(worker, None)

    def gives_up(self, server: Server, worker: Address, why: Fail) -> None:
        """See `process_host.ConnectionObserver`."""
        self.fail(f"{self._name(worker)} failed: {why.text[:_TEXT]}", cause=why.cause)

    def lost(self, server: Server, peer: Address, reason: str) -> None:
        """See `process_host.ConnectionObserver`."""
        if peer.role is Role.SERVER:
            over = not server.running
        elif peer.group not in server.groups:
            over = True
        else:
            # The main worker still reads the result after its script has come to its end.
            is_main = (peer.group, peer.index) == (0, 0)
            over = server.has_finished(peer) and (server.done or not is_main)
        if not over:
            self.fail(f"{self._name(peer)} is gone, the job cannot go on: {reason}", cause=False)

    def fail(self, text: str, cause: bool = True) -> None:
        """The job cannot go on; the first cause counts, or what was heard first while none is known."""
        with self.change:
            if self.failure is None or (cause and not self.failure.cause):
                self.failure = Fail(text, cause=cause)
            self.change.notify_all()

    def trouble(self) -> None:
        """Called inside `except`: a server of ours cannot go on."""
        traceback.print_exc()
        self.fail(f"a server failed: {traceback.format_exc().strip().splitlines()[-1]}")


class ManualServers:
    """Servers that are reached at one address.

    Args:
        place: where, and how to find the others.
        addresses: the servers.
        attendance: hears who comes and goes.
    """

    def __init__(self, place: RouterConfig, addresses: Sequence[Address], attendance: WorkerPresence) -> None:
        self._place, self._attendance = place, attendance
        self._open = False
        self.roads = Router(place, ProcessMemory())
        self.roads.admit(self._admit)
        self.servers = HostedServers(place, self.roads, _zeros, addresses, attendance.trouble)
        for resident in self.servers.residents.values():
            resident.attendant = attendance

    def open(self) -> None:
        """Meet the other servers, then let workers in. Raises WireError."""
        self.servers.open(lambda me, urls: None)
        self._open = True

    def _admit(self, peer: Peer, there_already: bool) -> None:
        if peer.address.role is not Role.WORKER:
            return
        if there_already:
            twice = "is here already: two processes say that they are the same one"
            raise Refused("TWICE", f"{peer.address} {twice}")
        if not self._open:
            raise Refused("FULL", "the servers of the job have not all met yet")

    @property
    def done(self) -> bool:
        """The job has no more use for these servers."""
        return all(resident.done for resident in self.servers.residents.values())

    def tell(self, why: Fail) -> None:
        """Tell all workers that the job cannot go on, also those that are here and have said nothing yet."""
        for me in self.servers.residents:
            for worker in workers_of(self._place.topology, me):
                with suppress(TransportError):
                    self.roads.send(me, worker, why)


def workers_of(topology: Topology, server: Address) -> list[Address]:
    """Those that belong to a server's group."""
    groups = topology.worker_groups_of(server.group)
    return [worker for group in groups for worker in topology.workers(group)]


def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


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
    """Be these servers of a job until it has no more use for them. Ctrl-C ends them at once, and the job with them.

    Args:
        job: the job; every process of it must have the same one (`Job.digest`).
        servers: addresses of the layout.
        store: where processes find each other. With a `StaticStore` each server listens where the store says.
        secret: 32 bytes, see `rendezvous.secret.load_secret`.
        host, port: where to listen, for any other store; port 0: the first free one from the job's `start_port` on.
        terms: see `SharedSettings`.

    Raises:
        ConfigError: the job's counts do not fit together, or there is no such server.
        WireError: a port cannot be used, or another server cannot be reached or refuses us.
        JobError: the job cannot go on; all workers that are there have been told.
    """
    job, terms = by_hand(job), terms or SharedSettings()
    topology = layout(job.cluster)
    for me in servers:
        check_there(topology, me)
    before = torch.get_num_threads()  # the process is the user's, and may have other plans when we have left
    torch.set_num_threads(threads(os.environ))  # as under a launcher
    attendance = WorkerPresence(topology, terms, servers)
    houses: list[ManualServers] = []
    try:
        for (at_host, at_port), members in _houses(servers, store, host, port).items():
            place = place_of(job, store, secret, terms, at_host, at_port)
            houses.append(ManualServers(place, members, attendance))
            houses[-1].open()  # in the servers' order: each calls those before it
        tell(f"{', '.join(map(terms.name, servers))}: ready")
        _stay(houses, attendance, terms)
    except BaseException as error:
        for house in houses:
            house.tell(_farewell(error, attendance))
        if isinstance(error, TransportError):
            raise understandable(error, terms) from error
        raise
    finally:
        for house in houses:
            house.roads.close()
        torch.set_num_threads(before)


def check_there(topology: Topology, address: Address) -> None:
    """Raise ConfigError where the layout has nobody of that address."""
    try:
        topology.unit_of(address)
    except ValueError as error:
        raise ConfigError(f"the process's place, {address.role.name.lower()}", address[1:], str(error)) from None


def _houses(servers: Sequence[Address], store: Store, host: str, port: int) -> dict[tuple[str, int], list[Address]]:
    """The servers of this process by where they listen."""
    found: dict[tuple[str, int], list[Address]] = {}
    for me in sorted(servers):
        where = store.place(me.group, me.index) if isinstance(store, StaticStore) else (host, port)
        found.setdefault(where, []).append(me)
    return found


def _stay(houses: Sequence[ManualServers], attendance: WorkerPresence, terms: SharedSettings) -> None:
    """Return when the job has no more use for the houses. Raises JobError."""
    waiting = WaitNotice(terms.name)
    until, end = time.monotonic() + terms.patience_s, 0.0
    while not all(house.done for house in houses):
        with attendance.change:
            attendance.change.wait(0.1)
            failure, missing = attendance.failure, ", ".join(map(terms.name, attendance.missing))
        if failure is not None:
            now = time.monotonic()
            end = end or now + CAUSE_S
            if failure.cause or now >= end:
                raise JobError(failure.text, failure.config)
        if missing and time.monotonic() > until:
            raise JobError(f"{missing} did not come within {terms.patience_s:g} s", True)
        if missing:
            waiting.say(missing)


def _farewell(error: BaseException, attendance: WorkerPresence) -> Fail:
    if isinstance(error, JobError):
        return attendance.failure or Fail(str(error), error.config, cause=True)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Fail("the servers were stopped", cause=True)
    return Fail(f"the servers cannot go on: {error}", cause=True)
