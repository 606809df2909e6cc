"""The registry of jobs: one record each, in a store that all of them use.

`registry/ID` holds the record of a job, as JSON. `alive/ID` holds a value that its unit of rank 0 renews, and that
expires when it is not renewed. `summary/ID` holds the state of its training, as the job has told it last. A job watches
`jobs/ID/stop` for a request to end.

* A record changes by compare-and-set only.
* A record expires KEEP_S seconds after its last change or heartbeat.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from topotrain.comm.store.key_validation import StoreError, check_key
from topotrain.comm.store.store_base import KEEP_S, Store, is_foreign

BEAT_TTL = 30.0
"""Seconds after which a job without a heartbeat counts as lost."""
RUNNING, LOST = "running", "lost"
ENDED = ("done", "failed", "stopped")
SUMMARY_BYTES = 16 << 10
"""Limit of the state of a job's training, as JSON."""
_LONG = 120  # characters of a name
_MOST_UNITS = 1 << 20
_LATEST = 1e11  # seconds since 1970, which `time.localtime` can show


class UnknownJob(StoreError):
    """No job has this ID; the text lists the known ones."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The record of a job."""

    id: str  # a part of a key, [a-z0-9_-][a-z0-9_.-]*
    name: str
    state: str = RUNNING  # on reading also lost: a running job without a heartbeat
    started: float = 0.0  # seconds since 1970 by the clock of the job's host
    units: int = 1  # how many
    hosts: tuple[str, ...] = ()  # their addresses
    heartbeat: float = 0.0  # the latest one, as `started`; 0 before the first
    summary: Mapping[str, Any] | None = None  # of `view`: the state of its training; None: unknown

    def as_data(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return {**asdict(self), "hosts": list(self.hosts)}


class Registry:
    """The jobs of a store (the whole one, not a view of one job).

    Every method may raise StoreError.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, record: JobRecord, ttl: float = BEAT_TTL) -> None:
        """Register a job, which counts as alive for `ttl` seconds.

        Raises:
            StoreError: a job that is alive has its ID.
            ValueError: the ID is invalid.
        """
        _check_id(record.id)
        entry = replace(record, started=record.started or time.time(), heartbeat=0.0)
        while True:
            old = self._store.get(_key(record.id))
            if old is not None and self._read(record.id, old).state == RUNNING:
                raise StoreError(f"job {record.id!r} runs already: choose another id or stop it")
            # Before the record: a running job without a heartbeat counts as lost.
            self._store.set(_alive(record.id), repr(time.time()).encode(), ttl)
            if self._store.compare_and_set(_key(record.id), old, _dumped(entry), KEEP_S):
                break
        # Last: the request was meant for an earlier job of this ID.
        self._store.delete(stop_key(record.id))
        self._store.delete(_summary(record.id))

    def list(self) -> "list[JobRecord]":
        """Return all jobs, the latest start first."""
        found = []
        for key in self._store.keys("registry/"):
            raw = self._store.get(key)
            if raw is not None:  # it may have expired since the keys were listed
                found.append(self._read(key.partition("/")[2], raw))
        return sorted(found, key=lambda record: (-record.started, record.id))

    def view(self, id: str) -> JobRecord:
        """Return one job, with the state of its training. Raises UnknownJob."""
        record = self._read(id, self._raw(id))
        return replace(record, summary=_loaded_summary(self._store.get(_summary(id)), record.state))

    def report(self, id: str, summary: Mapping[str, Any]) -> None:
        """Note the state of a job's training. One that is too large is left out."""
        raw = json.dumps(summary, separators=(",", ":")).encode()
        if len(raw) <= SUMMARY_BYTES:
            self._store.set(_summary(id), raw, KEEP_S)

    def beat(self, id: str, ttl: float = BEAT_TTL) -> None:
        """Renew the heartbeat for `ttl` seconds. Raises UnknownJob without a record."""
        raw = self._raw(id)
        self._store.compare_and_set(_key(id), raw, raw, KEEP_S)  # if it loses against a change, that has renewed it
        self._store.set(_alive(id), repr(time.time()).encode(), ttl)

    def keep(self, record: JobRecord, ttl: float = BEAT_TTL) -> None:
        """Renew the heartbeat as `beat`; register the job again if its record is gone."""
        if self._store.get(_key(record.id)) is None:
            self._store.set(_alive(record.id), repr(time.time()).encode(), ttl)  # before the record, as in `add`
            self._store.compare_and_set(_key(record.id), None, _dumped(record), KEEP_S)
        self.beat(record.id, ttl)

    def end(self, id: str, state: str) -> None:
        """Record how a job ended: done, failed or stopped. Raises UnknownJob, ValueError."""
        if state not in ENDED:
            raise ValueError(f"state = {state!r}: must be {', '.join(ENDED)}")
        # Until it is read again: a store may have lost the write.
        while (entry := _loaded(id, raw := self._raw(id))).state != state:
            self._store.compare_and_set(_key(id), raw, _dumped(replace(entry, state=state)), KEEP_S)
        # An ended job needs no heartbeat, and a lost one is recognized by its absence.
        self._store.delete(_alive(id))

    def stop(self, id: str) -> JobRecord:
        """Ask a job to end as after SIGTERM; return its record. Raises UnknownJob."""
        record = self.view(id)
        if record.state not in ENDED:
            self.check_secret(id)
            while self._store.get(stop_key(id)) is None:
                self._store.set(stop_key(id), b"stop", KEEP_S)
        return record

    def check_secret(self, id: str) -> None:
        """Raise StoreError where the job would not believe what this process writes."""
        if is_foreign(self._store, f"jobs/{id}/run"):
            accepted = "TOPOTRAIN_TOKEN or TOPOTRAIN_TOKEN_FILE must be as for its units"
            raise StoreError(f"job {id!r} has another secret than this process: {accepted}")

    def _raw(self, id: str) -> bytes:
        try:
            _check_id(id)
            raw = self._store.get(_key(id))
        except ValueError:
            raw = None
        if raw is None:
            known = ", ".join(record.id for record in self.list())
            raise UnknownJob(f"no job {id!r}, " + (f"known jobs: {known}" if known else "no job is registered"))
        return raw

    def _read(self, id: str, raw: bytes) -> JobRecord:
        record = _loaded(id, raw)
        alive = self._store.get(_alive(id))
        if record.state == RUNNING and alive is None:
            return replace(record, state=LOST)
        with suppress(ValueError):
            return replace(record, heartbeat=min(max(0.0, float(alive or 0)), _LATEST))
        return record


def stop_key(id: str) -> str:
    """Return the key that a job watches for a request to end."""
    return f"jobs/{id}/stop"


def _key(id: str) -> str:
    return f"registry/{id}"


def _alive(id: str) -> str:
    return f"alive/{id}"


def _summary(id: str) -> str:
    return f"summary/{id}"


def _loaded_summary(raw: bytes | None, state: str) -> Mapping[str, Any] | None:
    """Return a job's summary of its training, with the state that the registry knows."""
    try:
        data = json.loads(raw or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    return data | {"state": "ended" if state in ENDED else state}


def _check_id(id: str) -> None:
    check_key(id, "id")
    if "/" in id:
        raise ValueError(f"id = {id!r}: must not contain a slash")


def _dumped(record: JobRecord) -> bytes:
    data = {**record.as_data(), "name": record.name[:_LONG]}
    del data["heartbeat"], data["summary"]
    return json.dumps(data).encode()


def _loaded(id: str, raw: bytes) -> JobRecord:
    """Return a record; one that cannot be read is a lost job's, and hides no other."""
    types: dict[str, tuple[type, ...]] = {
        "id": (str,),
        "name": (str,),
        "state": (str,),
        "started": (int, float),
        "units": (int,),
        "hosts": (list,),
    }
    names = {field.name for field in fields(JobRecord)} - {"heartbeat", "summary"}
    try:
        data = {name: value for name, value in json.loads(raw).items() if name in names}
        right = all(isinstance(data[name], kinds) for name, kinds in types.items())
        right = right and 0 <= data["started"] <= _LATEST and 0 <= data["units"] <= _MOST_UNITS
        if not right or data["id"] != id or data["state"] not in (RUNNING, *ENDED):
            raise ValueError
        hosts = tuple(str(address)[:_LONG] for address in data["hosts"][:_MOST_UNITS])
        return JobRecord(**{**data, "name": data["name"][:_LONG], "hosts": hosts})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return JobRecord(id, "its record in the store cannot be read", LOST)
