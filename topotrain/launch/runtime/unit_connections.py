"""The connections between the workers of a unit, to add up its gradients."""

import threading
from collections.abc import Sequence

from topotrain.comm.router import Router
from topotrain.comm.transport import PeerUnreachable, TransportError
from topotrain.config.topology import Address
from topotrain.core.protocol import Message
from topotrain.extensions.host_sums.host_reduction import HostReduction, UnitLinks

_KIND = "unit-worker"
_PAUSE_S = 0.2


class UnitConnections(UnitLinks):
    """Connects one worker to the others of its unit, in the background.

    Nothing waits for these connections: a unit without them works as if each worker were alone.

    Args:
        router: of the process.
        me: the worker.
        incarnation: of the worker. The workers of one incarnation connect with each other.
    """

    def __init__(self, router: Router, me: Address, incarnation: int) -> None:
        self._router, self._me = router, me
        self._kind = f"{_KIND}-{incarnation}"  # addresses of former processes are of no use
        self._sender = router.sender(me)
        self._urls: tuple[str, ...] = ()
        self._closed = threading.Event()

    def reach_at(self, urls: Sequence[str]) -> None:
        """Set the URLs at which the others reach this worker."""
        self._urls = tuple(urls)

    def begin(self, workers: Sequence[Address], reduction: HostReduction) -> None:
        self._router.publish(self._kind, self._me, self._urls)
        target = self._connect
        threading.Thread(target=target, args=(workers, reduction), name=f"unit of {self._me}", daemon=True).start()

    def _connect(self, workers: Sequence[Address], reduction: HostReduction) -> None:
        for worker in workers:
            if not self._reach(worker):
                return
            reduction.connected(worker)

    def _reach(self, worker: Address) -> bool:
        """Connect to a worker. Whether that was possible."""
        while not self._closed.is_set():
            try:
                self._router.connect(self._me, worker, self._kind)
                return True
            except PeerUnreachable:
                # Its script may take long before it prepares, and it publishes its address only then.
                self._closed.wait(_PAUSE_S)
            except (TransportError, TimeoutError):
                return False  # the other one has ended, or this one is about to
        return False

    def send(self, to: Address, message: Message) -> None:
        self._sender.send(to, message)

    def close(self) -> None:
        self._closed.set()
