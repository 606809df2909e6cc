"""Requests to a running job over its store.

`topotrain jobs join URL --job NAME` sends one. `requests/ID` has a request, and `answers/ID` its answer. A
request that is taken stays until it is answered, so that the next leader answers those that a lost one has taken.
`asked` changes with each request, because a list of keys costs much in a large store. The job looks for requests now
and then, on the thread that looks for `topotrain jobs stop`.
"""

import json
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from topotrain.comm.security.secret import load_secret
from topotrain.comm.store import Store, StoreError, open_existing, within
from topotrain.comm.store.discovery.job_registry import ENDED, LOST, RUNNING, JobRecord, Registry, UnknownJob
from topotrain.comm.store.store_url import parse
from topotrain.config.job import ConfigError
from topotrain.launch.agent.workspace import STORE
from topotrain.launch.control_socket import NotHere, ask, checked
from topotrain.launch.job_requests import LEADER_LOST, JobRequest, JobRequests, from_text, to_data
from topotrain.launch.launchers.submission import LAUNCH
from topotrain.launch.multinode.node_info import with_job

KEEP_S = 600.0
"""Seconds for which a request and an answer stay in the store."""
_REQUESTS, _ANSWERS, _MARK = "requests/", "answers/", "asked"
_TAKEN = b"taken"
_LOOK_S = 2.0
_PATIENCE_S = 5.0


class StoreRequests:
    """The requests to one job in its store.

    Args:
        store: the keys of the job.
        requests: gets the requests.
    """

    def __init__(self, store: Store, requests: JobRequests) -> None:
        self._store, self._requests = store, requests
        self._lock, self._mark = threading.Lock(), b""
        self._answers: dict[str, dict[str, Any]] = {}
        # Requests that were taken, with their answers: a store that has lost a write must not cause a request twice.
        self._taken: dict[str, dict[str, Any] | None] = {}
        self._read: dict[str, bytes] = {}  # requests that are not marked as taken yet, as far as is known

    def put(self, id: str, said: dict[str, Any]) -> None:
        """Add an answer, which `look` writes."""
        with self._lock:
            self._answers[id] = self._taken[id] = said

    def look(self) -> None:
        """Take new requests, and write the answers since the last call. Raises StoreError."""
        mark = self._store.get(_MARK) or b""
        for key in self._store.keys(_REQUESTS) if mark != self._mark else []:
            id = key.removeprefix(_REQUESTS)
            # The mark may be in the store although writing it failed.
            raw = self._read.get(id) or self._store.get(key)
            if raw is None or id in self._taken:
                said = self._taken.get(id)
                if said is not None:  # the store has lost the answer, and its client has asked again
                    self.put(id, said)
                continue
            if raw == _TAKEN:
                # Whether it was carried out is not known, and some requests must not be carried out twice.
                self.put(id, {"error": LEADER_LOST})
                continue
            self._read[id] = raw
            self._store.set(key, _TAKEN, KEEP_S)
            self._taken[id] = None
            del self._read[id]
            try:
                self._requests.add(from_text(raw), partial(self.put, id))
            except ValueError as error:
                self.put(id, {"error": f"the request cannot be read: {error}"})
        # Only now: after an error the next call looks again.
        self._mark = mark
        self.write()

    def write(self) -> None:
        """Write the answers since the last call. Raises StoreError."""
        with self._lock:
            answers = dict(self._answers)
        for id, said in answers.items():
            self._store.set(f"{_ANSWERS}{id}", json.dumps(said).encode(), KEEP_S)
            self._store.delete(f"{_REQUESTS}{id}")
            with self._lock:
                self._answers.pop(id)


def ask_over_store(url: str, job: str, wish: JobRequest, environ: Mapping[str, str]) -> dict[str, Any]:
    """Send a request to a job over its store, and return its answer.

    The answers are those of `control_socket.ask`.

    Raises:
        ConfigError: the store cannot be used, or the job refuses the request. Nothing has changed.
        UnknownJob: the store has no such job.
        StoreError: the store was lost while the job was to answer.
    """
    with _opened(url, environ) as root:
        registry, id = Registry(root), secrets.token_hex(8)
        try:
            _check_runs(registry, job)
            registry.check_secret(job)
        except UnknownJob as error:
            raise UnknownJob(f"{error} (store {parse(url).text})") from None
        except StoreError as error:
            raise ConfigError("URL", None, str(error)) from None
        store = within(root, f"jobs/{job}")
        try:
            text = json.dumps(to_data(wish)).encode()
            return checked(wish, json.loads(_answer(store, id, text, registry, job)))
        finally:
            with suppress(StoreError):  # the keys expire
                for key in (_ANSWERS, _REQUESTS):
                    store.delete(f"{key}{id}")


def ask_anywhere(workspace: Path, wish: JobRequest, environ: Mapping[str, str]) -> dict[str, Any]:
    """Send a request to the job of a workspace, also to one that runs elsewhere.

    Answers and errors are those of `control_socket.ask` and of `ask_over_store`.
    """
    try:
        return ask(workspace, wish)
    except NotHere:
        found = launched_job(workspace)
        if found is None:
            raise
    url, record = found
    if record.state != RUNNING:
        last = f"the last one launched there, {record.id}, is over: {record.state}"
        raise ConfigError("WORKSPACE", str(workspace), f"must be the workspace of a job that runs; {last}")
    return ask_over_store(url, record.id, wish, environ)


def _answer(store: Store, id: str, text: bytes, registry: Registry, job: str) -> bytes:
    """Send a request, and wait for the answer. Raises ConfigError if there is none."""
    until = time.monotonic() + KEEP_S
    while time.monotonic() < until:
        # Again while the job has not taken it: a store may lose a write. In this order, as it goes with its answer.
        if store.get(f"{_REQUESTS}{id}") != _TAKEN and store.get(f"{_ANSWERS}{id}") is None:
            store.set(f"{_REQUESTS}{id}", text, KEEP_S)
            # Last: the job looks for the request when it sees another value.
            store.set(_MARK, secrets.token_hex(8).encode(), KEEP_S)
        try:
            return store.watch(f"{_ANSWERS}{id}", _LOOK_S)
        except TimeoutError:
            _check_runs(registry, job)
    raise ConfigError("--job", job, f"has not answered within {KEEP_S:g} s")


def _opened(url: str, environ: Mapping[str, str]) -> "closing[Store]":
    """Open the whole store of a job. Raises ConfigError."""
    try:
        secret = load_secret(environ)
    except StoreError as error:
        raise ConfigError("", None, str(error)) from None
    try:
        return closing(open_existing(with_job(url, ""), secret, _PATIENCE_S, environ))
    except StoreError as error:
        raise ConfigError("URL", None, str(error)) from None


def _check_runs(registry: Registry, job: str) -> None:
    """Raise ConfigError for a job that does not run."""
    state = registry.view(job).state
    if state in (*ENDED, LOST):
        accepted = "must be a job that runs, and this one " + ("is lost" if state == LOST else f"has ended: {state}")
        raise ConfigError("--job", job, accepted)


def launched_job(workspace: Path) -> tuple[str, JobRecord] | None:
    """Return the store and the entry of the last job launched in a workspace.

    A job that runs comes before all others. None: `topotrain launch` has started no job there, or its units met in
    another store than that of the launch.
    """
    found = []
    for folder in workspace.glob(f"{LAUNCH}/*/{STORE}"):
        url = folder.absolute().as_uri()
        # Each start of a job that a launcher repeats has a name of its own there.
        with suppress(StoreError), closing(open_existing(url)) as root:
            found += [(url, record) for record in Registry(root).list()]
    return max(found, key=lambda each: (each[1].state == RUNNING, each[1].started), default=None)
