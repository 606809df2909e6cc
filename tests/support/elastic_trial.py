"""Elastic worker groups in a simulation: groups leave, are given up, and join.

It simulates the launcher's part (`launch.recovery`). The servers are asked before any change, as in a job. A leaving
group gets a request and a grace period. It is gone when it has no process left, and then the servers are informed.
Other faults in the meantime only make it leave sooner. Every batch still counts exactly once.
"""

from functools import partial

from fault_schedule import MOVES, Fault, FaultKind
from fault_trial import Trial
from sim_processes import Killed, WorkerProcess

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message
from topotrain.extensions.elastic.group_departure import GroupDeparture
from topotrain.extensions.elastic.membership_messages import GroupLeaveRequest, GroupLeft

_COORDINATOR = Address(Role.SERVER, 0, 0)


class ElasticTrial(Trial):
    """A trial with groups that leave and join."""

    left_at = -1.0
    """The time at which the last process of a group that left had ended."""

    def _prepare(self, job: Job, before: Trial | None) -> None:
        self._leaving: dict[int, Fault] = {}

    @property
    def away(self) -> set[int]:
        # A group that was leaving at a crash has no process any more.
        return self.absent | self._leaving.keys()

    @property
    def moves(self) -> list[Fault]:
        """The changes of groups in their order, without those that the servers refused."""
        return [fault for _, fault in self.log if fault.what in MOVES]

    def inject(self, fault: Fault) -> None:
        """Execute a fault now."""
        if fault.what not in MOVES:
            super().inject(fault)
        elif fault in self._faults:
            # Before the refusals: a refused change is not tried again.
            self._faults.remove(fault)
            away = fault.group in self.absent
            joins = fault.what is FaultKind.JOIN
            # Only absent groups join and only present ones leave; the servers may refuse, as in a job.
            if fault.group in self._leaving or away is not joins or self._refused(fault):
                return
            self.log.append((self.sim.now, fault))
            if joins:
                self.absent.discard(fault.group)
                workers = self.topology.workers(fault.group)
                self._restart(workers, self._next_incarnation(workers))
            else:
                self._leave(fault)

    def _refused(self, fault: Fault) -> str:
        return self.server(0, 0).extension(GroupDeparture).may_change(fault.group, fault.what.value)

    def _leave(self, fault: Fault) -> None:
        self._leaving[fault.group] = fault
        if fault.what is FaultKind.LOSE:
            self._end_all(fault.group)
            return
        worker_processes = self._worker_processes(fault.group)
        again = all(process.dead for process in worker_processes)  # the request is for the processes about to start
        self._send(GroupLeaveRequest(fault.group, self._newest(fault.group) + again))

        def late() -> None:
            # The group may have left, joined and been asked again meanwhile.
            if self._leaving.get(fault.group) is fault:
                self._end_all(fault.group)

        self.sim.at(self.sim.now + fault.away, late)

    # --- groups that leave ---------------------------------------------------------------------------------------

    def _worker_processes(self, group: int) -> list[WorkerProcess]:
        return [self.worker_processes[worker] for worker in self.topology.workers(group)]

    def _newest(self, group: int) -> int:
        """Return the incarnation of the last start of a process of a group."""
        started = max(process.incarnation for process in self._worker_processes(group))
        return max(started, self._numbers.get(group, 0))

    def _send(self, message: Message) -> None:
        sim_server = self.sim_servers[_COORDINATOR]
        self.transport.when_resumed(lambda: sim_server.handle(_COORDINATOR, message), _COORDINATOR)

    def _end_all(self, group: int) -> None:
        # A worker that is about to restart alone does not start any more.
        self._whole[group] = self._whole.get(group, 0) + 1
        known = self._worker_processes(group)
        if all(process.dead for process in known):  # about to restart: the new processes end before they start
            new = (WorkerProcess(process.me, process.incarnation + 1, over=True, dead=True) for process in known)
            self.worker_processes |= {process.me: process for process in new}
        for process in self._worker_processes(group):
            if not process.over:
                self._end_one(process)
        self._emptied(group)

    def _end_one(self, process: WorkerProcess) -> None:
        """End one process of a leaving group."""
        process.kill()
        # The messages that a pause holds back must not wait for a process that has ended.
        self.transport.resume(process.me)
        client = self.clients[process.me]
        # Each server notices the end of its connection at a time of its own.
        for server in sorted({*client.channel.servers, client.channel.first_server}):
            self.sim.at(self._notice_time(), partial(self._end, process, server))

    def _emptied(self, group: int) -> None:
        """Inform the servers once a leaving group has no process left."""
        worker_processes = self._worker_processes(group)
        if group not in self._leaving or not all(process.over for process in worker_processes):
            return
        del self._leaving[group]
        if any(process.dead for process in worker_processes):  # else its scripts have finished meanwhile
            self.absent.add(group)
            self.left_at = self.sim.now
            # It may arrive before or after the servers notice the ends of connections.
            self.sim.at(self._notice_time(), partial(self._send, GroupLeft(group, self._newest(group) + 1)))

    def leave(self, process: WorkerProcess) -> None:
        """End a worker of a group that was asked to leave."""
        if not process.over:
            self._end_one(process)
            self._emptied(process.me.group)
        # The script of this worker must not run on, as nothing runs after the end of a real process.
        raise Killed

    def _kill(self, workers: tuple[Address, ...], away: float) -> None:
        group = workers[0].group
        if group in self._leaving:
            self._end_all(group)
        elif group not in self.absent:
            super()._kill(workers, away)

    def _start(self, me: Address) -> None:
        if me.group not in self.absent:
            super()._start(me)

    def run(self) -> "ElasticTrial":
        """See `Trial`."""
        for group in sorted(self.absent):
            for process in self._worker_processes(group):
                process.kill()
            # The launcher informs the coordinator as soon as it runs.
            self.sim.at(self._opens[_COORDINATOR], partial(self._send, GroupLeft(group, 0)))
        super().run()
        return self
