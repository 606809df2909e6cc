"""A job on one host that is listed in a store, because it names a `rendezvous:`.

Its processes rendezvous in that store, the store's list of jobs has an entry for it, and `topotrain jobs stop` ends it.
Training continues while the store is unavailable.
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
from topotrain.comm.store.store_base import leave
from topotrain.comm.store.store_url import parse
from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Failed
from topotrain.launch import JobOutcome, JobWatch
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.job_shutdown import OtherUnits
from topotrain.launch.launchers.submission import job_id
from topotrain.launch.multinode.node_info import with_job
from topotrain.launch.multinode.node_rendezvous import BEAT_S, forget
from topotrain.launch.recovery.recovery_actions import StopJob
from topotrain.launch.store_requests import StoreRequests

_BEAT_EVERY_S = 5.0
_LOOK_S = 0.25
_LEAVE_S = 1.0  # for the thread to end; it may be waiting for an unavailable store


class RegisteredJob(OtherUnits):
    """The store entry of a local job, all units of which run here.

    Args:
        root: the whole store.
        record: the job's entry in the store's list.
        url: the rendezvous of the job's processes.
        watch: knows the state of the job.
    """

    def __init__(self, root: Store, record: JobRecord, url: str, watch: JobWatch | None = None) -> None:
        self.url = url
        self._urls = [url]
        self._root, self._record, self._id = root, record, record.id
        self._registry, self._watched = Registry(root), watch or JobWatch()
        self.requests = JobRequests()
        self._asked_in_store = StoreRequests(within(root, f"jobs/{self._id}"), self.requests)
        self._state = ""
        self._told, self._teller = socket.socketpair()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="listed", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when the end of the job is decided."""
        return self._told.fileno()

    def tell(self, cause: Failed) -> None:
        """Decide the end of the job."""
        # There are no other units to ask, so the end is decided at once.
        self._teller.send(b"!")

    def _watch(self) -> None:
        due = 0.0
        # Poll instead of `watch`: nothing would end a watch when the job ends.
        while not self._closed.wait(_LOOK_S):
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + _BEAT_EVERY_S
                    self._registry.keep(self._record)
                    self._report()
                self._asked_in_store.look()
                if self._root.get(stop_key(self._id)) is not None:
                    # Again and again, because a restart of the whole job drops the requests before it.
                    self.requests.add(StopJob(), lambda said: None)
            except StoreError:
                # Training goes on without the store.
                self._closed.wait(BEAT_S)

    def _report(self) -> None:
        """Write the state of the job to the store. Raises StoreError."""
        found = self._watched.summary()
        if found is not None:
            self._registry.report(self._id, found)

    def again(self) -> None:
        """Choose a new rendezvous for the next attempt of the whole job."""
        # It has no addresses of processes of the former attempt.
        self.url = with_job(self.url, f"{self._id}.{secrets.token_hex(4)}")
        self._urls.append(self.url)

    def ended(self, outcome: JobOutcome) -> None:
        """Note how the job ended, for the store."""
        self._state = "stopped" if outcome.code >= 128 else "failed" if outcome.code else "done"

    def close(self) -> None:
        """Stop watching, record how the job ended, and delete its rendezvous data."""
        self._closed.set()
        self._told.close()
        self._teller.close()
        self._thread.join(_LEAVE_S)
        leave(self._leave, "the list of jobs does not say how this one ended")
        self._root.close()

    def _leave(self) -> None:
        if self._state:
            with suppress(StoreError):
                # The store may have lost the entry since.
                self._registry.keep(self._record)
                self._report()
                self._registry.end(self._id, self._state)
        self._asked_in_store.write()
        for url in self._urls:
            # Stores outlive jobs, so the job removes what it has written.
            forget(within(self._root, f"jobs/{parse(url).job}"))


@contextmanager
def listed(
    job: Job, environ: Mapping[str, str] = os.environ, watch: JobWatch | None = None
) -> Iterator[RegisteredJob | None]:
    """Register the job in the store of its `rendezvous` for the length of the block.

    watch: knows the state of the job, which the store then has, too.
    Yields None for a job without a rendezvous. Raises ConfigError if the store cannot be used.
    """
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
        place = RegisteredJob(root, record, with_job(job.rendezvous, f"{id}.{secrets.token_hex(4)}"), watch)
        stack.callback(place.close)
        yield place
