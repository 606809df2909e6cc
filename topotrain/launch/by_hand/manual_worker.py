"""A process that the user starts by hand and that becomes a worker of a job.

The process belongs to the user, and its script runs as before. At its end, or at `leave`, the worker signs off, and
worker (0,0) delivers the result.
"""

import atexit
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from topotrain.comm.router import RouterConfig
from topotrain.comm.store import Store, StoreError
from topotrain.comm.store.discovery.static_addresses import StaticStore, as_data
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.interrupt_guard import between_frames
from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import dumps
from topotrain.config.private_files import make_folder
from topotrain.config.topology import Address
from topotrain.core.client.client import JobError, PeerLost
from topotrain.core.events import Event, Failed, Final, Metrics, Notice, Notifier
from topotrain.launch import own_python
from topotrain.launch.agent.orphans import end
from topotrain.launch.agent.remaining_threads import RemainingThreads
from topotrain.launch.by_hand.manual_server import (
    CAUSE_S,
    SharedSettings,
    by_hand,
    check_there,
    place_of,
    tell,
    understandable,
)
from topotrain.launch.runtime.child_channel import end_process
from topotrain.launch.runtime.prepare_composition import prepare_extensions
from topotrain.launch.runtime.process_exit import ProcessExitHook
from topotrain.launch.runtime.process_host import HostObserver, HostOptions
from topotrain.launch.runtime.worker_connections import WorkerConnections
from topotrain.training import context as process
from topotrain.training.context import Connector, Context, ProcessOwner
from topotrain.training.finish_job import close, finish, is_complete

__all__ = ["StaticStore", "SharedSettings", "join", "leave"]

END_S = 30.0
"""Seconds for the servers next to a worker to end after it."""
REASON_S = CAUSE_S + 0.5
"""Seconds for which a failing worker waits for the cause that servers report."""


@dataclass(frozen=True, slots=True)
class ColocatedServers:
    """Servers in a process beside a worker.

    url: the URL of the store, for that process. A `StaticStore` needs none.
    """

    servers: Sequence[Address]
    url: str = ""


def join(
    job: Job,
    me: Address,
    store: Store,
    secret: bytes,
    host: str = "127.0.0.1",
    *,
    beside: ColocatedServers | None = None,
    terms: SharedSettings | None = None,
    gpus: bool = True,
) -> Context:
    """Make this process worker `me` of a job; `tt.prepare` then connects the script.

    Args:
        job: the job. Every process of it must have the same one (`Job.digest`).
        me: a worker of its layout.
        store: where processes find each other.
        secret: 32 bytes, see `comm.security.secret.load_secret`.
        host: the address of this host that others can reach.
        beside: servers next to this worker. They get a process of their own, which ends with this one, and which
            imports the function `terms.name`.
        terms: see `SharedSettings`.
        gpus: whether `tt.device` may name a GPU.
    Raises:
        ConfigError: the job's counts do not fit together, there is no such worker, this process has a job already, or
            it has called `tt.prepare` without a job.
    """
    if process.current() is not None:
        raise ConfigError("this process", str(me), "belongs to a job already")
    if process.prepared():
        accepted = "was called before this process joined a job: tt.init, or tt.train.Server, must come first"
        raise ConfigError("tt.prepare", None, accepted)
    job, terms = by_hand(job), terms or SharedSettings()
    place = place_of(job, store, secret, terms, host)
    for address in (me, *(() if beside is None else beside.servers)):
        check_there(place.topology, address)
    workspace = Path(job.workspace).absolute()
    if (me.group, me.index) == (0, 0):
        # Only worker (0,0) writes files; the others may run where the folder cannot be made.
        make_folder(workspace)
    here = Context(place, me, workspace, _Console(), _Connector(terms), prepare_extensions(), gpus=gpus)
    # The servers start before the worker connects, which would wait for them.
    joined = _Joined(here, _start_servers(job, beside, store, secret, host, terms) if beside is not None else None)
    here.owned_by(joined)
    process.enter(here)
    joined.watch()
    return here


def leave() -> None:
    """End this process's part in the job; the script continues as an ordinary one.

    The end of the script does the same. Nothing happens where a launcher runs the script. An ordinary process may call
    `tt.prepare` again.

    Raises:
        ConfigError: `tt.prepare` was never called.
        JobError, PeerLost: the job has failed.
    """
    here = process.current()
    if here is None:
        process.forget()
    else:
        for adopted in here.adopted.values() if here.owner.by_hand else ():
            adopted.keep_state()
        here.owner.leave()


@dataclass(frozen=True)
class _WaitObserver(HostObserver):
    """Prints long waits of a worker for the user."""

    name: str

    def on_long_wait(self, seconds: float) -> None:
        tell(f"{self.name}: has waited {seconds:.0f} s for the others, and waits on")


@dataclass(frozen=True, slots=True)
class _Connector(Connector):
    """Opens a worker's connections; errors use the terms of the user's interface."""

    terms: SharedSettings

    def connect(self, place: RouterConfig, me: Address) -> WorkerConnections:
        """Open the connections; see `context.Connector`."""
        try:
            return WorkerConnections(place, me, HostOptions(_WaitObserver(self.terms.name(me))))
        except TransportError as error:
            raise understandable(error, self.terms) from error


class _Console:
    """Prints the events that a launcher would show of this worker."""

    def emit(self, event: Event) -> None:
        if isinstance(event, Metrics):
            for name, value in event.values.items():
                print(f"{name}: {value:.6g}", flush=True)
        elif isinstance(event, Notice | Failed):
            tell(f"{event.who}: {event.text}")
        elif isinstance(event, Final):
            tell(f"the result is in {event.path}")


class _Joined(ProcessOwner, Notifier):
    """The worker in this process, until it leaves the job."""

    by_hand = True

    def __init__(self, here: Context, servers: "subprocess.Popen[bytes] | None") -> None:
        self._here, self._servers = here, servers
        self._pid = os.getpid()
        self._over = False
        self._failed: BaseException | None = None
        self._said = False
        self._exit, self._hook = sys.exit, sys.excepthook
        # Ctrl-C inside a frame would leave a connection that cannot send the reason any more.
        self._usual_interrupts = between_frames()
        self._own_end = ProcessExitHook(self)

    def watch(self) -> None:
        """Install hooks for the end of the script."""
        _install(self._uncaught, self._leaving)  # functions at exit do not get the exit code
        atexit.register(self._at_exit)
        self._own_end.watch()
        RemainingThreads(self).watch_after_main()

    def notify(self, text: str) -> None:
        if not self._over:  # after the job the process is an ordinary one
            tell(f"{self._here.me}: {text}")

    def is_complete(self) -> bool:
        """Whether no work is under way that other processes would miss."""
        return is_complete(self._here)

    def end(self) -> int:
        """Leave the job, and return the exit code."""
        try:
            self.leave()
        except BaseException as error:
            self._uncaught(type(error), error, error.__traceback__)
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def leave(self) -> None:
        """Leave the job. Errors are raised after everything is closed."""
        # A process that the script has forked is no worker.
        if self._over or os.getpid() != self._pid:
            return
        try:
            finish(self._here)
        except BaseException as error:
            self._abort(error)
            raise
        self._close(finished=True)
        if self._servers is not None:
            self._await(self._servers)

    def _await(self, servers: "subprocess.Popen[bytes]") -> None:
        try:
            code = servers.wait(END_S)
        except subprocess.TimeoutExpired:
            servers.kill()
            text = f"the servers beside {self._here.me} did not end within {END_S:g} s after it, and were killed"
            raise JobError(text, False) from None
        if code:
            raise JobError(f"the servers beside {self._here.me} ended with code {code}", False)

    def _close(self, finished: bool) -> None:
        self._over = True
        atexit.unregister(self._at_exit)
        _install(self._hook, self._exit)
        self._usual_interrupts()
        self._own_end.forget()
        process.enter(None)
        close(self._here, finished)

    def _abort(self, error: BaseException) -> None:
        """Leave at once, and send the servers the reason."""
        # A script that fails waits for no other process, and the other workers get the reason.
        self._give_up(error)
        self._close(finished=False)
        if self._servers is not None:
            end(self._servers)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a process that the script has forked
            self._hook(kind, error, trace)
            return
        self._failed = error
        if isinstance(error, JobError | PeerLost | TransportError):
            # These are consequences, so the user gets the reason from the servers.
            tell(f"error: {self._reason(error)}")
        elif isinstance(error, ConfigError | StoreError):
            tell(f"error: {error}")  # the traceback would only show code of topotrain
        else:
            self._give_up(error)  # at once: the other workers may already see its consequences
            self._hook(kind, error, trace)

    def _give_up(self, error: BaseException) -> None:
        if isinstance(self._here.connections, WorkerConnections) and not self._said:
            # Once: an error may pass both the hook and the end of the script.
            self._said = True
            self._here.connections.exchange.give_up(
                _words(error), cause=not isinstance(error, JobError | PeerLost | TransportError)
            )

    def _reason(self, error: JobError | PeerLost | TransportError) -> str:
        """Return the cause, if a server knows it; otherwise the first reported error."""
        if not isinstance(self._here.connections, WorkerConnections) or (isinstance(error, JobError) and error.config):
            return str(error)
        exchange, until = self._here.connections.exchange, time.monotonic() + REASON_S
        return exchange.channel.await_cause(lambda: time.monotonic() >= until) or str(exchange.channel.failure or error)

    def _leaving(self, code: Any = None) -> None:
        if code not in (None, 0) and os.getpid() == self._pid:
            # Kept for `_at_exit`: functions at exit do not get the code.
            self._failed = SystemExit(code)
        raise SystemExit(code)

    def _at_exit(self) -> None:
        if self._over or os.getpid() != self._pid:
            return
        if self._failed is not None:
            self._abort(self._failed)
            return
        code = self.end()
        # Python would end with 0: an exception at exit is printed and ignored.
        if code:
            end_process(code)


def _install(hook: Any, leave: Any) -> None:
    """Replace the functions that see how a script ends."""
    sys.excepthook, sys.exit = hook, leave


def _words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"its script left with exit code {error.code}"
    if isinstance(error, JobError | PeerLost):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip()


def _start_servers(
    job: Job, beside: ColocatedServers, store: Store, secret: bytes, host: str, terms: SharedSettings
) -> "subprocess.Popen[bytes]":
    """Start the servers in a process of their own."""
    if not isinstance(store, StaticStore) and not beside.url:
        raise ConfigError("url", beside.url, "servers beside a worker need the store's URL")
    spec = {
        "job": dumps(job),
        "servers": [[server.group, server.index] for server in beside.servers],
        "store": as_data(store) if isinstance(store, StaticStore) else beside.url,
        "secret": secret.hex(),  # through the pipe: other users can read command lines and, at times, environments
        "host": host,
        "terms": [terms.words, terms.compare, terms.patience_s],
        "name": f"{terms.name.__module__}:{terms.name.__qualname__}",
    }
    command = own_python("topotrain.launch.by_hand.colocated_server")
    # Not threads of this process: other processes wait for the servers, and a script may hold the interpreter.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, bufsize=0)
    assert child.stdin is not None
    child.stdin.write(json.dumps(spec).encode() + b"\n")  # stays open: the child ends at the end of the pipe
    return child
