"""What the launcher says to the servers of a process: that a worker group is to leave the job, has left, or may come.

Rule: commands come on the channel's own thread, some before there are servers; then they are kept, in their order. A
wish is looked at by the coordinator of the group's servers, who alone knows what the job has come to, and its answer
is an event.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from topotrain.events import Agreed, Event
from topotrain.host import Servers
from topotrain.message import Away, Leave

WISHES = ("leave", "lose", "join")
AWAY = "away"


class Orders:
    """See above. `emit` tells the unit; `hear` takes a command, `open` the servers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Mapping[str, Any]] = []
        self._servers: Servers | None = None
        self.emit: Callable[[Event], None] = lambda event: None

    def hear(self, command: Mapping[str, Any]) -> None:
        """Do it, or keep it; commands of others are none of ours."""
        if command.get("command") not in (*WISHES, AWAY):
            return
        with self._lock:
            if self._servers is None:
                self._kept.append(command)
            else:
                self._do(self._servers, command)

    def open(self, servers: Servers) -> None:
        """The servers are there."""
        with self._lock:
            self._servers = servers
            for command in self._kept:
                self._do(servers, command)
            self._kept.clear()

    def _do(self, servers: Servers, command: Mapping[str, Any]) -> None:
        wish, group = command["command"], command["group"]
        me, home = next((me, r) for me, r in servers.residents.items() if me.index == 0 and group in r.server.groups)
        if wish == AWAY:
            home.told(Away(group, command["incarnation"]))
            return
        why = home.may_change(group, wish)
        if wish == "leave" and not why:
            home.told(Leave(group, command["incarnation"]))
        self.emit(Agreed(str(me), group, wish, why))
