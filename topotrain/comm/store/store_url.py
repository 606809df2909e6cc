"""Parse the URL of a store. Errors show it without its password."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from topotrain.comm.store.key_validation import StoreError, check_key

RENDEZVOUS_VARIABLE = "TOPOTRAIN_RENDEZVOUS"
"""The environment variable with the URL of a job's store."""
ACCEPTED: Mapping[str, str] = MappingProxyType(
    {
        "file": "file:///ABSOLUTE/DIRECTORY",
        "tcp": "tcp://HOST:PORT",
        "redis": "redis://[USER:PASSWORD@]HOST[:PORT][/DB]",
        "rediss": "rediss://[USER:PASSWORD@]HOST[:PORT][/DB][?ca=FILE]",
        "env": "env://",
    }
)
QUERY = {"rediss": frozenset({"ca", "job"})}
"""Query parameters that a kind of URL accepts; all other kinds accept `job` alone."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a store's URL."""

    scheme: str
    text: str  # without password
    host: str = ""
    port: int = 0  # 0: none is given
    path: str = ""
    job: str = ""  # "": the whole store
    ca: str = ""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def fail(self, why: str) -> StoreError:
        """Return an error that shows this URL."""
        return StoreError(f"rendezvous {self.text!r}: {why}")


def parse(url: str) -> StoreUrl:
    """Parse a URL. Raises StoreError, which lists what is accepted."""
    text = _without_password(url)
    try:
        parts = urlsplit(url)
        port = parts.port
        # Strict parsing refuses an empty query.
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        # The parser's error may quote any part, such as a password.
        why = str(error) if "@" not in url else "a part of it cannot be read"
        raise StoreError(f"rendezvous {text!r}: {why}") from None
    if parts.scheme not in ACCEPTED:
        kinds = ", ".join(ACCEPTED.values())
        why = f"unknown kind {parts.scheme!r}, accepted: {kinds}; each may end with ?job=NAME"
        raise StoreError(f"rendezvous {text!r}: {why}")
    whole = StoreUrl(
        parts.scheme,
        text,
        parts.hostname or "",
        port or 0,
        unquote(parts.path),
        query.get("job", ""),
        query.get("ca", ""),
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )
    _check(whole, parts, query)
    return whole


def _check(url: StoreUrl, parts: SplitResult, query: Mapping[str, str]) -> None:
    accepted = f"must be {ACCEPTED[url.scheme]}"
    known = QUERY.get(url.scheme, frozenset({"job"}))
    for name, value in query.items():
        if name not in known or not value:
            raise url.fail(f"{accepted}; after the question mark only {' and '.join(sorted(known))} can be given")
    if url.job:
        try:
            check_key(url.job, "job")
        except ValueError as error:
            raise url.fail(str(error)) from None
        if "/" in url.job:
            raise url.fail(f"job = {url.job!r}: must not contain a slash")
    logs_in = bool(parts.username or parts.password)
    right = {
        "file": not parts.netloc and parts.path.startswith("/"),
        "tcp": bool(url.host and url.port) and not logs_in and parts.path in ("", "/"),
        "redis": bool(url.host) and _is_database(url.path),
        "rediss": bool(url.host) and _is_database(url.path),
        "env": not parts.netloc and not parts.path,
    }
    if parts.fragment or not right[url.scheme]:
        raise url.fail(accepted)


def _is_database(path: str) -> bool:
    return path in ("", "/") or (path[1:].isascii() and path[1:].isdecimal() and len(path) < 8)


def _without_password(url: str) -> str:
    """Return the URL with its password replaced."""
    # Not by the parser: the URL may be one that it refuses.
    scheme, found, rest = url.partition("://")
    # The last one: a password may contain the character.
    at = rest.rfind("@")
    if not found or at < 0:
        return url
    user, colon, _ = rest[:at].partition(":")
    return f"{scheme}://{user}{':***' if colon else ''}@{rest[at + 1 :]}"
