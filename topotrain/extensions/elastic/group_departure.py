"""Worker groups that leave a job while others train, and may come back.

The reply to the next step of a group contains the request to leave. Once all processes of the group have ended, the
coordinator decrees the departure, and no other group waits for this one.
"""

from dataclasses import replace

from topotrain.config.topology import Address
from topotrain.core.protocol import Applied, Commit, Message, StepDecision
from topotrain.core.server.consistency import AWAY
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, ServerExtension
from topotrain.extensions.elastic.membership import GroupRestarts, first_text, regroup_refusal
from topotrain.extensions.elastic.membership_messages import GroupLeaveRequest, GroupLeft, RestartRequest


class GroupDeparture(ServerExtension):
    """The departures of worker groups from one server.

    Args:
        server: the server.
        restarts: the incarnations of its groups.
    """

    STATE = ("_leaving",)

    messages = (GroupLeaveRequest, GroupLeft)
    # The processes may end before the script has prepared a model. The departure must not wait for one.
    before_model = (GroupLeft,)
    decrees = (AWAY,)

    def __init__(self, server: Server, restarts: GroupRestarts) -> None:
        self._server, self._restarts = server, restarts
        self._leaving: set[int] = set()  # groups that are to leave after their next step

    def may_change(self, group: int, request: str) -> str:
        """Why a group cannot leave now ("leave"), be given up ("lose"), or join ("join").

        Empty: it can. Only the coordinator knows.
        """
        groups, ours, hooks = self._server.worker_groups, self._server.groups, self._server.hooks
        why = regroup_refusal(self._server)
        if why:
            return why
        if request == "join":
            return "the job is coming to its end" if any(map(groups.ended, ours)) else ""
        if groups.ended(group):
            return "its scripts have come to their end"
        why = first_text(extension.refuses_leave() for extension in hooks.refuses_leave)
        if why:
            return why
        others = [each for each in ours if each != group and groups.runs(each)]
        return "" if others else "no other group trains that could read what it leaves"

    def handle(self, sender: Address, message: Message) -> Outbox:
        if isinstance(message, GroupLeaveRequest):
            self._start_leaving(message)
        elif isinstance(message, GroupLeft):
            self.leave(message.group, message.incarnation)
        return ()

    def _start_leaving(self, message: GroupLeaveRequest) -> None:
        # The request concerns processes that have been replaced since. The new ones were started on purpose.
        if message.incarnation < self._restarts.members.newest(message.group):
            return
        self._leaving.add(message.group)
        for extension in self._server.hooks.group_leaves:
            self._server.queue.send_all(extension.group_leaves(message.group))

    def amend_reply(self, group: int, applied: Applied, first: Commit) -> Applied:
        return replace(applied, leaves=True) if group in self._leaving else applied

    def leave(self, group: int, incarnation: int) -> None:
        """Decree the departure: all processes before this incarnation have ended."""
        if self._restarts.members.is_empty(group, incarnation):
            # After the restart is decreed, nothing of the ended processes is applied any more.
            self._restarts.request_restart(RestartRequest(group, incarnation))
            self._server.decisions.decree(group, incarnation, AWAY)

    def on_decree(self, decision: StepDecision) -> Outbox:
        """As `ServerExtension.on_decree`: continue without the group."""
        group = decision.group
        # Workers of this incarnation have connected between the request and the decree: the group has come back.
        if not self._restarts.members.is_empty(group, decision.step):
            return ()
        server = self._server
        server.worker_groups.leave(group)
        server.shutdown.away(group)
        server.exchange.end_group(group)
        # The departed group may have been the last one that trained here.
        if server.state.model is not None:
            server.exchange.drain()
        return ()

    def reset_group(self, group: int, ended: bool) -> None:
        # A restarted group consists of new processes, which nothing has asked to leave.
        self._leaving.discard(group)
