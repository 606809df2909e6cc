"""A store on a Redis server.

Every write is one script on the server, which compares, writes, and publishes on the channel of the key. So no other
write falls in between, and a watching client need not poll. A script that is sent twice, because a reply was lost,
finds the outcome that it noted the first time. Keys begin with "topotrain/" there; nothing else is touched.

The server does not know the job's secret, so each value is sealed with it. A value without the seal of its key counts
as none. The list of jobs is not sealed: it is for every user of the server.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from topotrain.comm.security.secret import job_key
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix, check_ttl, check_value, is_key
from topotrain.comm.store.store_url import StoreUrl

MISSING = "redis:// needs the package redis: pip install 'topotrain[redis]'"
PORT = 6379
SECONDS = 10.0
"""For connecting, and for each reply."""
# A `watch` also looks so often: its connection may have died silently, and other programs publish no writes.
LOOK = 15.0
_GLANCE = 0.5  # seconds in which a `watch` notices that the store was closed
_PAUSE = 0.1  # seconds before the one retry of a command whose connection was lost
_REMEMBERED = 60_000  # milliseconds for which a script's outcome is kept
_SPACE = "topotrain/"
_PAGE = 1000  # keys at a time
_LISTED = ("registry/", "alive/", "summary/")  # no process of a job relies on these keys of the whole store
_SEAL = 65  # characters: a line of hexadecimal digits, so that a text stays one for other programs

_WRITE = """
local done = redis.call('GET', KEYS[2])
if done then return tonumber(done) end
local answer = 1
if ARGV[1] ~= 'any' then
  local present = redis.call('GET', KEYS[1])
  if ARGV[1] == 'none' and present or ARGV[1] == 'same' and present ~= ARGV[2] then answer = 0 end
end
if answer == 1 then
  if ARGV[3] == 'drop' then redis.call('DEL', KEYS[1])
  elseif ARGV[5] == '0' then redis.call('SET', KEYS[1], ARGV[4])
  else redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5]) end
  redis.call('PUBLISH', KEYS[1], '')
end
redis.call('SET', KEYS[2], answer, 'PX', ARGV[6])
return answer
"""


class RedisStore:
    """A `Store` on a Redis server, at redis:// or rediss:// (TLS).

    The URL is redis://[user:password@]host[:port][/db]. It connects at its first use.

    With TLS the server must have a certificate for its name, signed by `ca` (a file) or by an authority that this
    system trusts. Errors name host and port, never the password.

    secret: 32 bytes, the same in all clients that read each other's values.

    Raises:
        StoreError: redis-py is not installed.
    """

    def __init__(self, url: StoreUrl, secret: bytes) -> None:
        try:
            import redis
            from redis.backoff import ConstantBackoff
            from redis.retry import Retry
        except ImportError:
            raise StoreError(MISSING) from None
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._lock = threading.Lock()
        self._closed = False
        self._under_way = 0  # operations, of all threads
        self._key, self._password = job_key(secret, "sealed values of a store"), url.password
        self._where = f"{url.scheme}://{url.host}:{url.port or PORT}"
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": url.ca or None} if url.scheme == "rediss" else {}
        self._client: Any = redis.Redis(
            host=url.host,
            port=url.port or PORT,
            db=int(url.path.strip("/") or 0),
            username=url.user or None,
            password=url.password or None,
            socket_timeout=SECONDS,
            socket_connect_timeout=SECONDS,
            # A command may be sent twice: the script on the server finds that it has run already.
            retry=Retry(ConstantBackoff(_PAUSE), 1),
            **tls,
        )

    def get(self, key: str) -> bytes | None:
        check_key(key)
        return self._opened(key, self._read(key))

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        self._write(key, "any", b"", "put", value, ttl)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        when, there = ("none", b"") if expected is None else ("same", self._sealed(key, expected))
        while not self._write(key, when, there, "put", value, ttl):
            found = None if expected is not None else self._read(key)
            if found is None or self._opened(key, found) is not None:
                return False
            when, there = "same", found  # a value without the seal is replaced
        return True

    def delete(self, key: str) -> None:
        self._write(key, "any", b"", "drop", b"", None)

    def keys(self, prefix: str = "") -> list[str]:
        check_prefix(prefix)
        with self._as_store_errors():
            # No character of a key has a meaning in a pattern. A scan may show a key twice.
            names = set(self._client.scan_iter(match=f"{_SPACE}{prefix}*", count=_PAGE))
        found = (name.decode("ascii", "replace").removeprefix(_SPACE) for name in names)
        return sorted(key for key in found if is_key(key))  # another program may have written under any name

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        until = time.monotonic() + timeout
        value = self.get(key)
        if value is not None and value != known:
            return value
        with self._as_store_errors(), closing(self._client.pubsub()) as channel:
            channel.subscribe(_SPACE + key)
            due = time.monotonic() + LOOK
            while (left := until - time.monotonic()) > 0:
                # The first message confirms the subscription: every later write sends a message.
                message = channel.get_message(timeout=min(left, _GLANCE))
                self._check_open()
                if message is None and time.monotonic() < min(due, until):
                    continue
                due = time.monotonic() + LOOK
                value = self.get(key)
                if value is not None and value != known:
                    return value
        foreign = value is None and self._read(key) is not None
        why = "; its value is not of this process's secret (TOPOTRAIN_TOKEN)" if foreign else ""
        raise TimeoutError(f"nothing new under {key!r} in {self._where} within {timeout} s{why}")

    def close(self) -> None:
        """Close idle connections now, and others after their operation."""
        with self._lock:
            self._closed = True
        self._close_unused()

    def _read(self, key: str) -> bytes | None:
        with self._as_store_errors():
            value: bytes | None = self._client.get(_SPACE + key)
            return value

    def _sealed(self, key: str, value: bytes) -> bytes:
        if key.startswith(_LISTED):
            return value
        # Keys contain no zero byte, so no other pair of key and value has this text.
        return hmac.new(self._key, key.encode() + b"\0" + value, hashlib.sha256).hexdigest().encode() + b"\n" + value

    def _opened(self, key: str, raw: bytes | None) -> bytes | None:
        """Return the value if it has the seal of this key, else None."""
        if raw is None or key.startswith(_LISTED):
            return raw
        value = raw[_SEAL:]
        return value if hmac.compare_digest(self._sealed(key, value), raw) else None

    def _write(self, key: str, when: str, expected: bytes, what: str, value: bytes, ttl: float | None) -> bool:
        check_key(key)
        check_value(value)
        sealed, life, name = self._sealed(key, value), check_ttl(ttl), _SPACE + key
        # The braces keep both keys on one node of a cluster.
        once = f"{{{name}}}once/{secrets.token_hex(16)}"
        with self._as_store_errors():
            return bool(self._client.eval(_WRITE, 2, name, once, when, expected, what, sealed, life, _REMEMBERED))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"store {self._where}: was closed")

    def _close_unused(self) -> None:
        """Close the connections of a closed store that no thread uses any more."""
        # redis-py's own `close` also closes connections that other threads use.
        with self._lock:
            idle = self._closed and not self._under_way
        if idle:
            self._client.close()

    @contextmanager
    def _as_store_errors(self) -> Iterator[None]:
        """Run one operation; every error of Redis becomes StoreError."""
        with self._lock:
            self._check_open()
            self._under_way += 1
        try:
            with self._translated():
                yield
        finally:
            with self._lock:
                self._under_way -= 1
            self._close_unused()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:  # ours, of `watch`; redis-py has one of its own
            raise
        except self._errors as error:
            text = str(error).split("\n")[0]
            if self._password:
                text = text.replace(self._password, "***")
            if text.startswith("HELLO must be called"):  # the server's text for a missing password names its protocol
                text = "authentication required: give a password, as in redis://:PASSWORD@HOST"
            raise StoreError(f"store {self._where}: {text or type(error).__name__}") from None
