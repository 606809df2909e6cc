"""The rendezvous of `Parallelize` shards, over a directory or a Redis server.

A store outlives the jobs that use it. So every shard claims its `shard_id` (`discovery.rank_claims`), and every start
of all shards gets a prefix of its own in the store (`discovery.generations`). No value of an earlier start is read
again.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from topotrain.comm.store import Store, StoreError, open_store
from topotrain.comm.store.discovery import generations, rank_claims
from topotrain.comm.store.discovery.rank_claims import RankClaim, RankTaken
from topotrain.comm.store.discovery.static_addresses import interface_address
from topotrain.comm.store.store_base import PrefixStore, leave
from topotrain.comm.torch_store.c10d_store import encode
from topotrain.config.job import ConfigError, Engine
from topotrain.config.topology import Address, Role
from topotrain.extensions.collectives.torch_backend import check_engine
from topotrain.launch.by_hand.manual_server import WaitNotice

_DEFAULT = "parallelize"
# Beats of a claim.
_LINGER = 4


class FileStoreHandler:
    """A rendezvous in a directory that all shards see: `FileStoreHandlerCreate`.

    Args:
        path: the directory; it is made (mode 0700) if it is missing, and must belong to this user alone.
        prefix: name of the run, for a directory that several runs use at the same time.
    """

    def __init__(self, path: str | Path, prefix: str = "") -> None:
        if not isinstance(path, str | Path):
            raise ConfigError("FileStoreHandler path", path, "must be the path of a directory")
        self.prefix = _text("FileStoreHandler prefix", prefix)
        self._url = f"file://{quote(str(Path(path).absolute()))}"

    def url(self, job: str) -> str:
        return f"{self._url}?job={job}"


class RedisStoreHandler:
    """A rendezvous on a Redis server: `RedisStoreHandlerCreate`.

    Args:
        host, port: of the server.
        prefix: name of the run, for a server that several runs use at the same time.
        user, password: the login. Read the password from a private place, as any other secret.
        tls: the server speaks TLS. ca: file with the authority that has signed its certificate ("": the system's).
    """

    def __init__(
        self,
        host: str,
        port: int = 6379,
        prefix: str = "",
        *,
        user: str = "",
        password: str = "",
        tls: bool = False,
        ca: str = "",
    ) -> None:
        for field, value in (("host", host), ("user", user), ("password", password), ("ca", ca)):
            _text(f"RedisStoreHandler {field}", value)
        self.prefix = _text("RedisStoreHandler prefix", prefix)
        try:
            port = int(port)
        except (TypeError, ValueError):
            port = 0
        if not 0 < port < 1 << 16:
            raise ConfigError("RedisStoreHandler port", port, "must be 1 to 65535")
        # An IPv6 address needs brackets before its port.
        at = f"[{host}]" if ":" in host else host
        login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
        self._url = f"{'rediss' if tls else 'redis'}://{login}{at}:{port}"
        self._more = f"&ca={quote(ca)}" if tls and ca else ""

    def url(self, job: str) -> str:
        """Return the store's URL for the keys of one job, with the password."""
        return f"{self._url}?job={job}{self._more}"


StoreHandler = FileStoreHandler | RedisStoreHandler


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        # A wrong type of password may still hold the password, and errors are printed.
        shown = type(value).__name__ if field.endswith("password") else value
        raise ConfigError(field, shown, "must be a text")
    return value


class ShardStart:
    """The rendezvous of all shards of one start, with a store that only they use.

    Raises:
        ConfigError: another process is this shard, or has another `num_shards`.
        StoreError: the store cannot be used, or not all shards came in time.
    """

    def __init__(self, handler: StoreHandler, shard_id: int, num_shards: int, patience_s: float) -> None:
        # A prefix is any text, and the name of a job in a store's URL is not.
        job = encode(handler.prefix) if handler.prefix else _DEFAULT
        self._whole = open_store(handler.url(job))
        self._opened: Store | None = None
        try:
            # Before the rendezvous: a live process with the same `shard_id` must be found and not be met.
            self._claim = RankClaim(self._whole, shard_id, str(num_shards))
        except RankTaken:
            why = "must be another number in each process: a live process is this shard already"
            raise ConfigError("shard_id", shard_id, why) from None
        try:
            prefix = self._meet(shard_id, num_shards, patience_s)
        # Also after Ctrl-C: the claim's thread would go on renewing it.
        except BaseException as error:
            if isinstance(error, ConfigError):
                # The claim stays readable for some beats, so that the processes that do not match see it, too.
                time.sleep(_LINGER * rank_claims.BEAT_S)
            self.close()
            raise
        # A part of the store for this start alone: no value of an earlier start is read again.
        self.url = handler.url(f"{job}.{prefix}")
        self._opened = open_store(self.url)

    @property
    def store(self) -> Store:
        """The store that only the shards of this start use."""
        assert self._opened is not None
        return self._opened

    def _meet(self, shard_id: int, num_shards: int, patience_s: float) -> str:
        here = _ShardStore(self._whole, self._claim, num_shards)
        try:
            return generations.join(here, shard_id, num_shards, patience_s)
        except TimeoutError:
            missing = ", ".join(map(shard_name, here.missing)) or "shard 0"
            raise StoreError(f"{missing} did not come within {patience_s:g} s") from None

    def close(self) -> None:
        """Leave. Shard 0 deletes the values that this start has written."""
        leave(self._leave, f"a start within {rank_claims.LIFE_S:g} s finds this shard there")
        for store in (self._opened, self._whole):
            if store is not None:
                store.close()

    def _leave(self) -> None:
        self._claim.close()
        # The job is over, and values that stay behind are under a name that is not used again.
        if self._opened is not None and self._claim.number == 0:
            for key in self._opened.keys(""):
                self._opened.delete(key)


def shard_name(shard: Address | int) -> str:
    """Return the name of a worker, or of the server beside it, for messages."""
    if isinstance(shard, int):
        return f"shard {shard}"
    return f"shard {shard.index}" if shard.role is Role.WORKER else f"the server of shard {shard.index}"


class _ShardStore(PrefixStore):
    """The store in which shards wait for each other, and check that they match."""

    def __init__(self, store: Store, claim: RankClaim, num_shards: int) -> None:
        # By size: shards with another `num_shards` never meet, and see the difference in the claims.
        super().__init__(store, f"lobby/{num_shards}")
        self._own, self._size, self._waiting = claim, num_shards, WaitNotice(shard_name)
        self.missing = [number for number in range(num_shards) if number != claim.number]

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """See `Store`. Every BEAT_S seconds it checks that the shards match."""
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            try:
                return super().watch(key, max(0.0, min(left, rank_claims.BEAT_S)), known)
            except TimeoutError:
                if left <= rank_claims.BEAT_S:
                    raise TimeoutError(f"nothing new under {key!r} within {timeout:g} s") from None
            self._check(self._own.others())

    def _check(self, others: dict[int, str]) -> None:
        for number, value in sorted(others.items()):
            if value != str(self._size):
                why = f"must be the same in all processes, and shard {number} has {value}"
                raise ConfigError("num_shards", self._size, why)
        self.missing = [number for number in self.missing if number not in others]
        if self.missing:
            self._waiting.show(", ".join(map(shard_name, self.missing)))


# --- the dictionary --------------------------------------------------------------------------------------------


ENGINES = {"GLOO": Engine.kGloo, "NCCL": Engine.kNccl}


class ShardRendezvous:
    NAMES = ("kv_handler", "shard_id", "num_shards", "engine", "exit_nets", "interface", "transport")

    def __init__(self, given: Mapping[str, Any]) -> None:
        if not isinstance(given, Mapping):
            raise ConfigError("rendezvous", given, f"must be a dictionary with {', '.join(self.NAMES)}")
        # A mistyped key must not fall back to a default.
        for name in given:
            if name not in self.NAMES:
                raise ConfigError("rendezvous", name, f"its keys must be among {', '.join(self.NAMES)}")
        self.handler = given.get("kv_handler")
        if not isinstance(self.handler, FileStoreHandler | RedisStoreHandler):
            kinds = "FileStoreHandler(path) or RedisStoreHandler(host, port, prefix)"
            raise ConfigError("rendezvous['kv_handler']", self.handler, f"must be a {kinds} of tt.data_parallel")
        self.num_shards = _whole(given, "num_shards", 1, None)
        self.shard_id = _whole(given, "shard_id", 0, self.num_shards - 1)
        word = given.get("engine", "GLOO")
        if word not in ENGINES:
            raise ConfigError("rendezvous['engine']", word, f"must be {' or '.join(ENGINES)}")
        self.engine = ENGINES[word]
        check_engine(self.engine)
        if str(given.get("transport") or "tcp").lower() != "tcp":
            raise ConfigError("rendezvous['transport']", given["transport"], 'must be "tcp"')
        self.exit_nets = _callables(given.get("exit_nets"))
        # Only this machine by default. Shards on others need an interface that those can reach.
        interface = str(given.get("interface") or "lo")
        try:
            self.host = interface_address(interface)
        except StoreError as error:
            raise ConfigError("rendezvous['interface']", interface, str(error)) from None


def _whole(given: Mapping[str, Any], name: str, least: int, most: int | None) -> int:
    value = given.get(name)
    if type(value) is not int or value < least or (most is not None and value > most):
        bound = f">= {least}" if most is None else f"from {least} to num_shards - 1 = {most}"
        raise ConfigError(f"rendezvous['{name}']", value, f"must be a whole number {bound}")
    return value


def _callables(given: Any) -> list[Callable[[], object]]:
    if given is None:
        return []
    if not isinstance(given, list | tuple) or not all(callable(net) for net in given):
        raise ConfigError("rendezvous['exit_nets']", given, "must be None or a list of functions without arguments")
    return list(given)
