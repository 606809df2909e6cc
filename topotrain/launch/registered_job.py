"""A job whose units all run here, and which the user wants to see in a store all the same (`rendezvous:`).

Rule: its processes meet in that store, it stands in the store's list of jobs, and `topotrain jobs stop` ends it. When
the store is away, training goes on.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from topotrain.comm.security.secret import load_secret
from topotrain.comm.store import Store, StoreError, host_store, open_store, within
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry, stop_key
from topotrain.comm.store.store_url import parse
from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Failed
from topotrain.launch import JobOutcome
from topotrain.launch.launchers.submission import job_id
from topotrain.launch.multinode.node_info import with_job
from topotrain.launch.multinode.node_rendezvous import BEAT_S, forget

_BEAT_EVERY_S = 5.0
_LOOK_S = 0.25
_LEAVE_S = 1.0  # for the thread to see that the job is over; it may be waiting for a store that is away


class RegisteredJob:
    """See `run_loop.Company`; nobody else has a say in how this job ends.

    Args:
        root: the whole store.
        record: what the store's list says of the job.
        url: where the job's processes meet.
    """

    def __init__(self, root: Store, record: JobRecord, url: str) -> None:
        self.url, self.stopped = url, False
        self._urls = [url]
        self._root, self._record, self._id = root, record, record.id
        self._registry = Registry(root)
        self._told, self._teller = socket.socketpair()
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="listed", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """See `run_loop.Company`."""
        return self._told.fileno()

    @property
    def over(self) -> bool:
        """See `run_loop.Company`."""
        return self.stopped

    def tell(self, cause: Failed) -> None:
        """See `run_loop.Company`."""
        self._teller.send(b"!")

    @property
    def saves(self) -> bool:
        """See `run_loop.Company`; who ends a job of this machine is asked here."""
        return False

    def heard(self) -> None:
        """See `run_loop.Company`."""

    def save(self, number: int) -> None:
        """See `run_loop.Company`."""

    def signalled(self, number: int, more: str = "") -> None:
        """See `run_loop.Company`."""

    def cast_out(self) -> None:
        """See `run_loop.Company`; here are all units of the job."""

    def _watch(self) -> None:
        due = 0.0
        # No `watch` of the store: nothing would end it when the job ends.
        while not self._closed.wait(_LOOK_S):
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + _BEAT_EVERY_S
                    self._registry.keep(self._record)
                stop = self._root.get(stop_key(self._id)) is not None
            except StoreError:
                self._closed.wait(BEAT_S)
                continue
            with self._lock:
                if stop and not self._closed.is_set():
                    self.stopped = True
                    self._teller.send(b"!")
            if stop:
                return

    def again(self) -> None:
        """The whole job starts again: its processes meet where nobody has left an address of a former one."""
        self.url = with_job(self.url, f"{self._id}.{secrets.token_hex(4)}")
        self._urls.append(self.url)

    def ended(self, outcome: JobOutcome) -> None:
        """Note how the job ended."""
        state = "stopped" if self.stopped or outcome.code >= 128 else "failed" if outcome.code else "done"
        with suppress(StoreError):
            self._registry.keep(self._record)
            self._registry.end(self._id, state)

    def close(self) -> None:
        """Stop watching, and take away what the job's processes have said to each other."""
        with self._lock:
            self._closed.set()
            self._told.close()
            self._teller.close()
        self._thread.join(_LEAVE_S)
        with suppress(StoreError):
            for url in self._urls:
                forget(within(self._root, f"jobs/{parse(url).job}"))
        self._root.close()


@contextmanager
def listed(job: Job, environ: Mapping[str, str] = os.environ) -> Iterator[RegisteredJob | None]:
    """The job's place in the store of its `rendezvous`; None for a job that names none. Raises ConfigError."""
    if not job.rendezvous:
        yield None
        return
    with ExitStack() as stack:
        try:
            url, secret = parse(job.rendezvous), load_secret(environ)
            served = host_store(job.rendezvous, secret, environ)
            if served is not None:
                stack.callback(served.close)
            root = open_store(with_job(job.rendezvous, ""), secret)
            id = url.job or job_id(job)
            record = JobRecord(id, job.name, started=time.time(), units=1, hosts=(socket.gethostname(),))
            Registry(root).add(record)
        except StoreError as error:
            raise ConfigError("rendezvous", None, str(error)) from None
        place = RegisteredJob(root, record, with_job(job.rendezvous, f"{id}.{secrets.token_hex(4)}"))
        stack.callback(place.close)
        yield place
