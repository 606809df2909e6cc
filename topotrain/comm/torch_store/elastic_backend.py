"""torch's elastic rendezvous over Redis (`torchrun --rdzv-backend=redis`).

torch decides which agents belong to a round (DynamicRendezvousHandler). This module only keeps the state, and replaces
it by compare-and-set. The value itself serves as the fencing token, so an agent that has seen an older one is refused.

A server outlives the jobs. So the state expires: agents write it anew with each heartbeat, and once all of them have
gone it is deleted. A new state gets a name, and the values of its rounds are kept under that name.
"""

import logging
import os
import secrets
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from topotrain.comm.store import Store, StoreError, open_store, within
from topotrain.comm.store.store_url import RENDEZVOUS_VARIABLE
from topotrain.comm.torch_store.c10d_store import TorchStore, encode

SHORTEST_LIFE = 60.0
"""Seconds for which a state stays at least after the last heartbeat."""
DAY = 86_400.0
"""Seconds after which the values of a round expire; agents read them in its first and its last minutes only."""
_NAME = 16  # characters, in front of the state
_SETTINGS = (("read_timeout", 60), ("keep_alive_interval", 5), ("keep_alive_max_attempt", 3))

logger = logging.getLogger(__name__)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory that torchrun finds as entry point `torchrun.handlers`."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make the rendezvous of one agent.

    Raises:
        ValueError: the endpoint is invalid.
        RendezvousConnectionError: the server cannot be reached, or refuses this agent; says where and why.
    """
    read_timeout, beat, misses = (_seconds(params, *setting) for setting in _SETTINGS)
    waits = {name: params.get_as_int(f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat")}
    try:
        store = within(open_store(address(params.endpoint)), f"torchrun/{encode(params.run_id)}")
    except StoreError as error:
        raise ValueError(f"--rdzv-endpoint: {error}") from None
    # Several times longer than torch takes to give an agent up, so a state expires only when all have gone.
    backend = StoreBackend(store, max(SHORTEST_LIFE, 4.0 * beat * misses))
    backend.get_state()  # a wrong address or password fails here, before anything is waited for
    values = _RoundStore(store, backend)
    values.set_timeout(timedelta(seconds=read_timeout))
    found: RendezvousHandler = _Handler.from_backend(
        params.run_id,
        values,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(**{name: timedelta(seconds=wait) for name, wait in waits.items() if wait is not None}),
        keep_alive_interval=beat,
        keep_alive_max_attempt=misses,
    )
    return found


def address(endpoint: str) -> str:
    """Return the URL of HOST[:PORT][/DB], redis://…, rediss://…, or the environment.

    Raises:
        ValueError: another kind of URL, or nothing at all.
    """
    endpoint = endpoint.strip() or os.environ.get(RENDEZVOUS_VARIABLE, "")
    if not endpoint:
        raise ValueError(
            f"--rdzv-backend=redis needs --rdzv-endpoint=HOST:PORT, or a redis:// URL in {RENDEZVOUS_VARIABLE}"
        )
    scheme, found, _ = endpoint.partition("://")
    if found and scheme not in ("redis", "rediss"):
        raise ValueError(f"--rdzv-endpoint with {scheme}://: must be HOST[:PORT][/DB], redis://… or rediss://…")
    return endpoint if found else f"redis://{endpoint}"


def _seconds(params: RendezvousParameters, name: str, default: int) -> int:
    value = params.get_as_int(name, default)
    if value is None or value <= 0:
        raise ValueError(f"--rdzv-conf {name}={value}: must be a whole number above 0")
    return value


class _Handler(DynamicRendezvousHandler):
    """torch's handler, with a new store for the workers in each round."""

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler`."""
        # torch keeps one store over all rounds. The workers of a new round would read there the address of a process
        # that was killed, and Gloo tries to connect to it until its timeout.
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()


class StoreBackend(RendezvousBackend):
    """The state of one rendezvous: a value that expires `ttl` seconds after a write."""

    def __init__(self, store: Store, ttl: float) -> None:
        self._store, self._ttl = store, ttl
        self._last: bytes | None = None
        self._away = False

    @property
    def name(self) -> str:
        """The name as in `--rdzv-backend`."""
        return "redis"

    @property
    def born(self) -> str:
        """The name that the state got when it was first written; "none" before that."""
        return "none" if self._last is None else self._last[:_NAME].decode()

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; while the server is away, those read last."""
        try:
            self._last, self._away = self._store.get("state"), False
        except StoreError as error:
            # An outage that a training job would not notice must not end it. Only an agent that starts fails.
            if self._last is None:
                raise RendezvousConnectionError(str(error)) from None
            if not self._away:
                logger.warning("%s; going on without it", error)
            self._away = True
        return self._pair()

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state of `token` (None: no state yet).

        Returns the state after that, its token, and whether it is the new one.
        """
        seen = token if isinstance(token, bytes) else None
        # The name stays over all states of one rendezvous. A state after an end gets a new one.
        value = (seen[:_NAME] if seen else secrets.token_hex(_NAME // 2).encode()) + state
        try:
            ours = self._store.compare_and_set("state", seen, value, self._ttl)
            self._last = value if ours else self._store.get("state")
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from None
        pair = self._pair()
        return None if pair is None else (*pair, ours)

    def _pair(self) -> tuple[bytes, Token] | None:
        return None if self._last is None else (self._last[_NAME:], self._last)


class _RoundStore(TorchStore):
    """The store that agents share in a round, under the name of the state."""

    def __init__(self, store: Store, backend: StoreBackend) -> None:
        super().__init__(store, ttl=DAY)
        self._backend = backend

    def where(self) -> str:
        """See `TorchStore`."""
        # torch adds the number of the round to each key.
        return f"rounds/{self._backend.born}/"

    def clone(self) -> TorchStore:
        """See `TorchStore`."""
        other = _RoundStore(self._store, self._backend)
        other.set_timeout(self.timeout)
        return other
