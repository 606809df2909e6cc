"""Requests of the launcher to servers: groups leave, restart, or join.

Requests come on the thread of the channel, in their order, some before the servers exist. The coordinator of the
group's servers replies with an event, since only it knows the state of the job.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from topotrain.core.events import Agreed, EventSink
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.extensions.elastic.membership_messages import GroupLeaveRequest, GroupLeft, RestartRequest

REQUESTS = ("leave", "lose", "join")
AWAY = "away"
REPLACED = "replaced"


class LocalServer(Protocol):
    """A server in this process, as the launcher addresses it."""

    @property
    def server(self) -> Server: ...

    def handle_own(self, message: Message) -> None:
        """Handle a message of the launcher, with the server itself as its sender."""
        ...

    def may_change(self, group: int, request: str) -> str: ...


class ServerProcess(Protocol):
    """The servers of a process."""

    def coordinator(self, group: int) -> LocalServer | None:
        """The server that decides for a worker group, or None if it is not here (yet)."""
        ...


class ResizeRequests:
    """The requests to the servers of one process.

    Args:
        sink: gets the answers as events.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._pending: list[Mapping[str, Any]] = []
        self._servers: ServerProcess | None = None

    def on_command(self, command: Mapping[str, Any]) -> None:
        """Execute a request now, or once its server is here. Other commands are ignored."""
        if command.get("command") not in (*REQUESTS, AWAY, REPLACED):
            return
        # Behind the requests that still wait, so that the order stays.
        with self._lock:
            self._pending.append(command)
            self._execute_pending()

    def open(self, servers: ServerProcess) -> None:
        """The process has servers, or one more."""
        with self._lock:
            self._servers = servers
            self._execute_pending()

    def _execute_pending(self) -> None:
        pending, self._pending = self._pending, []
        self._pending = [command for command in pending if not self._execute(command)]

    def _execute(self, command: Mapping[str, Any]) -> bool:
        request, group = command["command"], command["group"]
        coordinator = None if self._servers is None else self._servers.coordinator(group)
        # No server is here yet, or a replicated coordinator is about to move here. The request waits for it.
        if coordinator is None:
            return False
        # A fact, not a request: the processes have ended already, so nothing is to be agreed upon.
        if request == AWAY:
            coordinator.handle_own(GroupLeft(group, command["incarnation"]))
            return True
        if request == REPLACED:
            coordinator.handle_own(RestartRequest(group, command["incarnation"], command["index"]))
            return True
        why = coordinator.may_change(group, request)
        if request == "leave" and not why:
            coordinator.handle_own(GroupLeaveRequest(group, command["incarnation"]))
        self._sink.emit(Agreed(str(coordinator.server.me), group, request, why))
        return True
