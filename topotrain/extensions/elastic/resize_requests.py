"""What the launcher says to the servers of a process: that a worker group is to leave the job, has left, or may come.

Rule: commands come on the channel's own thread, some before there are servers; then they are kept, in their order. A
wish is looked at by the coordinator of the group's servers, who alone knows what the job has come to, and its answer
is an event. Where servers have second copies, the coordinator may be about to move here: then they wait for it.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from topotrain.core.events import Agreed, Event
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.extensions.elastic.membership_messages import GroupLeaveRequest, GroupLeft

WISHES = ("leave", "lose", "join")
AWAY = "away"


class LocalServer(Protocol):
    """A server, as its launcher speaks to it."""

    @property
    def server(self) -> Server: ...

    def told(self, message: Message) -> None:
        """The launcher has something to say to it, which comes in its own name."""
        ...

    def may_change(self, group: int, wish: str) -> str:
        """See `ElasticGroups.may_change`."""
        ...


class ServerProcess(Protocol):
    """The servers of a process."""

    def coordinator(self, group: int) -> LocalServer | None:
        """The one that decides for a worker group; None: it is not here (yet)."""
        ...


class ResizeRequests:
    """See above. `emit` tells the unit; `on_command` takes a command, `open` the servers."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._kept: list[Mapping[str, Any]] = []
        self._servers: ServerProcess | None = None

    def on_command(self, command: Mapping[str, Any]) -> None:
        """Do it, or keep it; commands of others are none of ours."""
        if command.get("command") not in (*WISHES, AWAY):
            return
        with self._lock:
            self._kept.append(command)
            self._look()

    def open(self, servers: ServerProcess) -> None:
        """The servers are there, or one more is."""
        with self._lock:
            self._servers = servers
            self._look()

    def _look(self) -> None:
        kept, self._kept = self._kept, []
        self._kept = [command for command in kept if not self._done(command)]

    def _done(self, command: Mapping[str, Any]) -> bool:
        wish, group = command["command"], command["group"]
        home = None if self._servers is None else self._servers.coordinator(group)
        if home is None:
            return False
        if wish == AWAY:
            home.told(GroupLeft(group, command["incarnation"]))
            return True
        why = home.may_change(group, wish)
        if wish == "leave" and not why:
            home.told(GroupLeaveRequest(group, command["incarnation"]))
        self._emit(Agreed(str(home.server.me), group, wish, why))
        return True
