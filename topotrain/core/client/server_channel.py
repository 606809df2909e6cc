"""A worker's messages to its servers, its waits for replies, and its failure."""

from collections.abc import Callable
from contextlib import suppress

from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.client.client_types import JobError, PeerLost, Waiter
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.transport_contract import TransportError

Send = Callable[[Address, m.Message], None]
Clock = Callable[[], float]


class ServerChannel:
    """Sends for one worker, and waits for it.

    Args:
        me: the worker.
        topology: the job's layout.
        send: send(to, message). It never blocks on the receiver.
        waiter: how to wait.
    """

    def __init__(self, me: Address, topology: Topology, send: Send, waiter: Waiter) -> None:
        self.me = me
        self.servers = topology.servers(topology.server_group_of(me.group))
        self.first_server = Address(Role.SERVER, 0, 0)
        """The server that has the data service and the store of worker states."""
        self.group_size = topology.workers_per_group
        self.waiter = waiter
        self.spans: Recorder = SILENT
        self.waited = 0.0
        """Seconds that the worker has waited for others, if `measure_waits` was called."""
        self.exits = 0
        """How often the script has left a loop over the loader before its end."""
        self._send = send
        self._clock: Clock | None = None
        self._unsent_exits: list[m.LoopExited] = []
        self._failure: Exception | None = None
        self._reasons: list[m.Fail] = []
        self._lost: set[Address] = set()
        self._leaving = False

    def record_spans(self, spans: Recorder) -> None:
        """Record from here on what the worker sends and waits for."""
        self.spans = spans

    def measure_waits(self, clock: Clock) -> None:
        """Add up in `waited` the seconds by this clock."""
        self._clock = clock

    # --- sending -------------------------------------------------------------------------------------------------

    def send(self, to: Address, message: m.Message) -> None:
        """Send a message, after all loop exits that the servers do not know yet."""
        # An exit is sent with the next message: leaving a loop must not wait, also not for a full connection.
        while self._unsent_exits:
            left = self._unsent_exits.pop(0)
            for server in self.servers:
                self.try_send(server, left)
        self._send(to, message)

    def try_send(self, to: Address, message: m.Message) -> None:
        """Send a message that is dropped if the connection is closed.

        It may be sent while an iterator is collected, which can happen after the job's end.
        """
        with suppress(TransportError):
            self._send(to, message)

    def exit_loop(self, step: int, backwards: int) -> None:
        """The script left a loop over the loader early, after `backwards` of a step.

        This never waits.

        The servers learn it before the next message of this worker. A script that an error ends leaves its loops before
        the error is known here. It sends no more, so no server takes that exit for the cause.
        """
        if self._leaving or self._failure is not None:
            return
        self.exits += 1
        if self.group_size > 1:
            self._unsent_exits.append(m.LoopExited(self.exits, step, backwards))

    # --- waiting -------------------------------------------------------------------------------------------------

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for a reply. Raises JobError or PeerLost if the job cannot go on."""
        before = 0.0 if self._clock is None else self._clock()
        # Any failure ends every wait, because the reply may never come.
        self.waiter.wait(lambda: self._failure is not None or ready())
        if self._clock is not None:
            self.waited += self._clock() - before
        if self._failure is not None:
            raise self._failure

    # --- failures ------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        """The first reason that this worker learned why the job cannot go on."""
        return self._failure

    def on_failure(self, sender: Address, message: m.Fail) -> None:
        """A server refuses to go on."""
        self._reasons.append(message)
        # The first failure stays: later ones are mostly consequences of it.
        self._failure = self._failure or JobError(message.text, message.config, message.quarantine)

    def on_lost(self, peer: Address, reason: str, expected: bool) -> None:
        """A connection ended.

        That ends the job, unless it was expected or the worker is leaving.
        """
        self._lost.add(peer)
        if not expected and not self._leaving:
            self._failure = self._failure or PeerLost(f"{self.me} lost {peer}: {reason}")

    def await_cause(self, late: Callable[[], bool]) -> str:
        """Why the job cannot go on; "" if no server has said so.

        A reason that a server knows to be the cause comes before the first reason.

        Waits for a cause until `late` returns true, or the connections to all servers have ended.
        """
        servers = {*self.servers, self.first_server}
        self.waiter.wait(lambda: any(known.cause for known in self._reasons) or self._lost >= servers or late())
        causes = [known for known in self._reasons if known.cause]
        return next((known.text for known in (*causes, *self._reasons)), "")

    def report_failure(self, text: str, cause: bool = True) -> None:
        """Tell the servers why this worker cannot go on; `cause` as in `message.Fail`."""
        for server in self.servers:
            self.try_send(server, m.Fail(text, cause=cause))
        self.leave()

    def leave(self) -> None:
        """From here on, connections may end."""
        self._leaving = True
