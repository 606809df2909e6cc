"""Which jobs there are: one record each, in a store that all of them use.

Under `registry/ID` lies what is known of a job, as JSON; under `alive/ID` a value that its unit of rank 0 writes anew
all the time and that goes by itself when nobody does. `jobs/ID/stop` is what a job watches to be told to end.

Rule: a record changes by compare-and-set only, and is forgotten KEEP seconds after its last change or sign of life.
"""

import json
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from topotrain.comm.store.key_validation import StoreError, check_key
from topotrain.comm.store.store_base import Store

KEEP = 7 * 86_400.0
BEAT_TTL = 30.0
"""Seconds after which a job that gives no sign of life counts as lost."""
RUNNING, LOST = "running", "lost"
ENDED = ("done", "failed", "stopped")
_LONG = 120  # characters of a name


class UnknownJob(StoreError):
    """No job has this ID; the text names those that there are."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What is known of a job.

    id: a part of a key, [a-z0-9_-][a-z0-9_.-]*. state: running, done, failed or stopped; when it is read also lost,
    for one that says it runs and gives no sign of life. started, heartbeat (the latest sign of life, 0 for none):
    seconds since 1970 by the clock of the job's host. units: how many. hosts: their addresses.
    """

    id: str
    name: str
    state: str = RUNNING
    started: float = 0.0
    units: int = 1
    hosts: tuple[str, ...] = ()
    heartbeat: float = 0.0

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "hosts": list(self.hosts)}


class Registry:
    """The jobs of a store (the whole one, not a view of one job). Every method may raise StoreError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, record: JobRecord, ttl: float = BEAT_TTL) -> None:
        """Enter a job, which counts as alive for `ttl` seconds. Raises StoreError when a living one has its ID.

        Raises:
            ValueError: the ID is none.
        """
        _check_id(record.id)
        entry = replace(record, started=record.started or time.time(), heartbeat=0.0)
        while True:
            old = self._store.get(_key(record.id))
            if old is not None and self._read(record.id, old).state == RUNNING:
                raise StoreError(f"job {record.id!r} runs already: choose another id or stop it")
            # Before the record: one that says it runs and gives no sign of life counts as lost.
            self._store.set(_alive(record.id), repr(time.time()).encode(), ttl)
            if self._store.compare_and_set(_key(record.id), old, _dumped(entry), KEEP):
                break
        self._store.delete(stop_key(record.id))

    def list(self) -> "list[JobRecord]":
        """All jobs, the latest start first."""
        found = []
        for key in self._store.keys("registry/"):
            raw = self._store.get(key)
            if raw is not None:  # forgotten between the two looks
                found.append(self._read(key.partition("/")[2], raw))
        return sorted(found, key=lambda record: (-record.started, record.id))

    def view(self, id: str) -> JobRecord:
        """One job. Raises UnknownJob."""
        return self._read(id, self._raw(id))

    def beat(self, id: str, ttl: float = BEAT_TTL) -> None:
        """Give a sign of life, to be repeated within `ttl` seconds. Raises UnknownJob when the record is gone."""
        raw = self._raw(id)
        self._store.compare_and_set(_key(id), raw, raw, KEEP)  # lost against a change: then that has renewed it
        self._store.set(_alive(id), repr(time.time()).encode(), ttl)

    def keep(self, record: JobRecord, ttl: float = BEAT_TTL) -> None:
        """Give a sign of life as `beat` does; a job whose record is gone, as from a wiped store, is entered again."""
        if self._store.get(_key(record.id)) is None:
            self._store.set(_alive(record.id), repr(time.time()).encode(), ttl)  # before the record, as in `add`
            self._store.compare_and_set(_key(record.id), None, _dumped(record), KEEP)
        self.beat(record.id, ttl)

    def end(self, id: str, state: str) -> None:
        """Note how a job ended: done, failed or stopped. Raises UnknownJob, ValueError."""
        if state not in ENDED:
            raise ValueError(f"state = {state!r}: must be {', '.join(ENDED)}")
        while True:
            raw = self._raw(id)
            entry = replace(_loaded(id, raw), state=state)
            if self._store.compare_and_set(_key(id), raw, _dumped(entry), KEEP):
                break
        self._store.delete(_alive(id))

    def stop(self, id: str) -> JobRecord:
        """Ask a job to end, if it has not; returns what was known of it then. Raises UnknownJob."""
        record = self.view(id)
        if record.state not in ENDED:
            self._store.set(stop_key(id), b"stop", KEEP)
        return record

    def _raw(self, id: str) -> bytes:
        try:
            _check_id(id)
            raw = self._store.get(_key(id))
        except ValueError:
            raw = None
        if raw is None:
            known = ", ".join(record.id for record in self.list())
            raise UnknownJob(f"no job {id!r}, " + (f"there are: {known}" if known else "there are none"))
        return raw

    def _read(self, id: str, raw: bytes) -> JobRecord:
        record = _loaded(id, raw)
        alive = self._store.get(_alive(id))
        if record.state == RUNNING and alive is None:
            return replace(record, state=LOST)
        try:
            return replace(record, heartbeat=float(alive or 0))
        except ValueError:
            raise StoreError(f"{_alive(id)} in the store is no time") from None


def stop_key(id: str) -> str:
    """What a job watches to be told to end; within `jobs/ID` it is `stop`."""
    return f"jobs/{id}/stop"


def _key(id: str) -> str:
    return f"registry/{id}"


def _alive(id: str) -> str:
    return f"alive/{id}"


def _check_id(id: str) -> None:
    check_key(id, "id")
    if "/" in id:
        raise ValueError(f"id = {id!r}: must not contain a slash")


def _dumped(record: JobRecord) -> bytes:
    data = {**record.as_data(), "name": record.name[:_LONG]}
    del data["heartbeat"]
    return json.dumps(data).encode()


def _loaded(id: str, raw: bytes) -> JobRecord:
    types: dict[str, tuple[type, ...]] = {
        "id": (str,),
        "name": (str,),
        "state": (str,),
        "started": (int, float),
        "units": (int,),
        "hosts": (list,),
    }
    names = {field.name for field in fields(JobRecord)}
    try:
        data = {name: value for name, value in json.loads(raw).items() if name in names}
        right = all(isinstance(data[name], kinds) for name, kinds in types.items())
        if not right or data["id"] != id or data["state"] not in (RUNNING, *ENDED):
            raise ValueError
        return JobRecord(**{**data, "hosts": tuple(str(address) for address in data["hosts"])})
    except (ValueError, KeyError, AttributeError, TypeError):
        raise StoreError(f"registry/{id} in the store is no record of a job") from None
