"""Give every start of the same job its own prefix in a store.

A store outlives the jobs that use it.

* Rank 0 decides. Each rank writes a number that no other process has.
* Rank 0 proposes a prefix (the "room" of the records) together with the numbers that it has read.
* A rank agrees when its own number is among them, and rank 0 opens the prefix once every rank has agreed.
* So values of earlier starts, and ranks that died while they waited, never share a prefix with live ranks.
"""

import json
import secrets
import time
from typing import Any

from topotrain.comm.store.store_base import Store

_ROUND = "round"


def join(store: Store, rank: int, size: int, timeout: float) -> str:
    """Wait until all `size` ranks are there; return the name of their prefix.

    No other start has the same prefix.

    Raises:
        TimeoutError: they were not all there after `timeout` seconds. The text names one that is missing.
        StoreError: the store cannot be used.
    """
    until = time.monotonic() + timeout
    return _propose(store, size, until) if rank == 0 else _agree(store, rank, size, until)


def _propose(store: Store, size: int, until: float) -> str:
    ranks = range(1, size)
    while True:
        # A number may be that of a process that has died; it then never agrees, and the next round reads a newer one.
        values = {rank: _watch_rank(store, rank, until) for rank in ranks}
        name = f"room-{secrets.token_hex(8)}"
        proposal = {"room": name, "numbers": {str(rank): _read(value)["number"] for rank, value in values.items()}}
        store.set(_ROUND, json.dumps(proposal | {"open": False}).encode())
        if all(_agrees(store, rank, values[rank], name, until) for rank in ranks):
            store.set(_ROUND, json.dumps(proposal | {"open": True}).encode())
            return name


def _watch_rank(store: Store, rank: int, until: float, known: bytes | None = None) -> bytes:
    try:
        return store.watch(_rank_key(rank), _left(until), known)
    except TimeoutError:
        raise TimeoutError(f"rank {rank} has not come in time") from None


def _agrees(store: Store, rank: int, values: bytes, name: str, until: float) -> bool:
    """Whether the rank agrees to the prefix; False when it was restarted."""
    number = _read(values)["number"]
    while True:
        value = _read(values)
        # A process that was started again has drawn another number.
        if value["number"] != number:
            return False
        if value["room"] == name:
            return True
        values = _watch_rank(store, rank, until, values)


def _agree(store: Store, rank: int, size: int, until: float) -> str:
    number = secrets.token_hex(8)
    store.set(_rank_key(rank), _record(number, ""))
    known: bytes | None = None
    while True:
        try:
            known = store.watch(_ROUND, _left(until), known)
        except TimeoutError:
            raise TimeoutError(f"rank {rank} of {size} was not called by rank 0 in time") from None
        proposal = _read(known)
        # Of an earlier start, or made before this process had written its number.
        if proposal["numbers"].get(str(rank)) != number:
            continue
        name: str = proposal["room"]
        if proposal["open"]:
            # The next start of the job should not find this number. Only its own process deletes it: rank 0 could
            # delete that of a process which has started again meanwhile.
            store.delete(_rank_key(rank))
            return name
        store.set(_rank_key(rank), _record(number, name))


def _record(number: str, name: str) -> bytes:
    return json.dumps({"number": number, "room": name}).encode()


def _rank_key(rank: int) -> str:
    return f"ranks/{rank}"


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _read(value: bytes) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(value)
    return whole
