"""Simulated workers that train alone between rounds of an outer optimizer.

A worker here is the product's own `Worker` with its inner optimizer, and a model of cells. Each batch has a cell of its
own in each parameter for each worker of the group that reads it, and the gradient of that worker is -1 there. The
inner SGD has rate 1, and so has the outer one. Gradients and differences are added up. So a step that counts once makes
its cells 1.

Invariants, for each process of a worker at each of its steps:

* Its own value is the received value plus what it has learned and the received value does not contain.
* Each of its steps is in its own values, once. The same holds for each step of others that it has seen.
* Behind each step it has the values of the other workers of its group.

And for the servers after each decision: every cell is 0 or 1, and none is 1 that no worker has made. So of every step
that was made one of these holds: the servers have counted it, or the worker has not told it or is telling it, or the
worker is dead.

One worker of a group may die, lag, or lose a connection alone. Then the launcher ends the others of its group, a little
later, and starts the group again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from batch_counts import InvariantViolated
from cell_model import cell_model, outer_plan
from cell_observers import GroupReplicas, IslandObserver
from fault_schedule import Fault, FaultKind
from fault_trial import Trial, TrialScript
from faulty_cluster import SimWorker, parameters
from faulty_network import SimClock
from reports import FunctionSender
from sim_disks import passes_of
from sim_processes import Killed, PeerSender, SimPeers, WorkerProcess
from torch import nn

from topotrain.config.job import ChangeMethod, Job, LRGen, Updater, UpdaterType
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.client.value_pull import ValueObserver
from topotrain.core.model.schema import Schema
from topotrain.extensions.outer_optimizer.groups.group_optimizer import GroupOptimizer
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.extensions.resume.pass_states import PassStates
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.training.data.data_client import DataClient
from topotrain.training.parameters.device_parameters import ParameterHolder
from topotrain.training.worker import Worker

FRAGMENTS = 4
"""The number of parameters of the model. With more fragments there are 8."""


OUTER = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
"""The outer optimizer adds what it gets."""


def trains_alone(job: Job) -> bool:
    """Whether workers make steps of their own between two rounds."""
    return job.cluster.outer is not None and job.cluster.sync_freq > 1


class ReceivedValues(ValueObserver):
    """Knows whether new values of a worker are under way, and tells its pace when they are taken."""

    def __init__(self, observer: ValueObserver, pace: "RoundPace") -> None:
        self._observer, self._pace = observer, pace
        self.under_way = False

    def before_values(self) -> None:
        self._observer.before_values()
        self.under_way = True

    def after_values(self) -> None:
        self._observer.after_values()
        self.under_way = False
        self._pace.taken()


class RoundPace:
    """The number of pushes of one process, and of all others in the job."""

    def __init__(self, trial: "IslandTrial", process: WorkerProcess) -> None:
        self._trial, self._process = trial, process
        self.pushes, self.ended = 0, False

    def end(self) -> None:
        """The worker has read all its batches. The others do not wait for it any more."""
        self.ended = True

    def push(self) -> None:
        """The worker pushes a fragment."""
        self.pushes += 1

    def taken(self) -> None:
        """The worker has new values. Raises InvariantViolated."""
        # While a worker is away the others have rounds without it, and it counts from 0 when it is back.
        if not self._trial.in_lock_step or not self.pushes or self._trial.had_losses:
            return
        for worker, process in self._trial.worker_processes.items():
            behind = self._trial.paces.get(process)
            count = 0 if behind is None else behind.pushes
            if count < self.pushes and not process.over and (behind is None or not behind.ended):
                raise InvariantViolated(
                    f"{self._process.me} has the values of its round {self.pushes}, and {worker} has pushed {count}"
                )


class WatchedOptimizer(InnerOptimizer):
    """The product's inner optimizer, observed at pushes and received values."""

    _pace: RoundPace
    received: ReceivedValues

    def watch(self, pace: RoundPace) -> None:
        """Tell this object of pushes and received values."""
        self._pace, self.received = pace, ReceivedValues(ValueObserver(), pace)

    def observer(self, holder: ParameterHolder) -> ValueObserver:
        self.received = ReceivedValues(super().observer(holder), self._pace)
        return self.received

    @contextmanager
    def sum_as_gradient(self) -> Iterator[None]:
        self._pace.push()
        with super().sum_as_gradient():
            yield


class WatchedGroupOptimizer(WatchedOptimizer, GroupOptimizer):
    """The same of a worker that shares its replica with its group."""


class IslandScript(TrialScript):
    """The script of one simulated process that trains alone between rounds."""

    def __init__(self, trial: Trial, worker: SimWorker, process: WorkerProcess) -> None:
        super().__init__(trial, worker, process)
        assert isinstance(trial, IslandTrial)
        self._islands, self._saved = trial, 0

    def run(self) -> None:
        """Read all batches, with one step for each."""
        trial, process, client = self._islands, self._process, self._worker.client
        pace = trial.paces[process] = RoundPace(trial, process)
        model = cell_model(trial.schema.parameters)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        inner = self._inner(model, plain)
        inner.watch(pace)
        worker = self._trained(model, plain, inner)
        # Not the time of this machine, which would make two runs of a seed differ.
        client.channel.measure_waits(SimClock(trial.sim))
        worker.start()
        # In this order, as in a job: when a worker goes on, all of its group know where they begin.
        rest = self._rest(client)
        if isinstance(inner, GroupOptimizer):
            sender = PeerSender(FunctionSender(partial(trial.say, process)))
            trial.peers.join(process, client, inner.channel(client, sender))
        name = f"{process.me} of incarnation {process.incarnation}"
        observer = IslandObserver(name, worker, trial.batches * trial.epochs * self._workers)
        self._accounting, states = worker, PassStates(client.extension(WorkerStateClient), worker)
        for epoch in rest:
            begins = True
            for stream, seq, number in self._batches(epoch, False):
                # A real worker stores its state at the begin of an epoch, and where a snapshot needs it.
                states.save()
                if begins and not states.holds:
                    states.begin(epoch, passes_of(epoch))
                begins = False
                self._save(worker, epoch)
                self._compute()
                observer.check_own(inner.received.under_way)
                batch = epoch * trial.batches + number
                cells = range(batch * self._workers, (batch + 1) * self._workers)
                self._train(worker, cells, (stream, seq))
                observer.made(cells)
                observer.check_own(inner.received.under_way)
                trial.replicas.check(process, worker.tally.steps, worker.parts.tensors)
                trial.committed(process.me)
                if worker.leaves:
                    trial.leave(process)
            if client.extension(DataClient).leaves:
                trial.leave(process)
        pace.end()
        inner.leave()
        worker.finish()
        observer.check_own(inner.received.under_way)
        self._save(worker, trial.epochs)
        self._take_final(worker)
        trial.peers.end(process)

    def _inner(self, model: nn.Module, plain: torch.optim.SGD) -> WatchedOptimizer:
        """The inner optimizer, as `tt.prepare` makes it."""
        trial, clock = self._islands, SimClock(self._islands.sim)
        wanted = plain, trial.job.cluster, model.named_parameters(), ()
        if self._workers == 1:
            return WatchedOptimizer(*wanted, clock)
        return WatchedGroupOptimizer(*wanted, GroupReduction(self._process.me, trial.job, trial.topology), clock)

    def _compute(self) -> None:
        """Compute a gradient. Raises Killed."""
        lag = self._islands.lags.get(self._process.me, 0.0)
        self._worker.sleep(lag, lag + self._islands.jitter)
        # It may have been killed while it computed.
        if self._process.over:
            raise Killed

    def _rest(self, client: Client) -> range:
        """The epochs that are left for this process.

        If an earlier process of the group has left a state, they begin with the epoch in this state.
        """
        states = client.extension(WorkerStateClient).load_group() if self._process.incarnation else []
        known = [int(left.view(torch.int64)) for left in states if left is not None]
        return range(max(known), self._trial.epochs) if known else self._epochs

    def _train(self, worker: Worker, cells: range, place: tuple[int, int]) -> None:
        """Make the step of one batch.

        The gradient of this worker is -1 in its own one of these cells.
        """
        for cell in cells:
            self._islands.made(cell, self._process)
        worker.drawn(*place, 1.0, 1)
        worker.optimizers[0].zero_grad()
        mine = cells[self._process.me.index]
        torch.autograd.backward([-tensor[mine] for tensor in worker.parts.tensors])
        worker.step()

    def _save(self, worker: Worker, epoch: int) -> None:
        """Store the state for the newest snapshot, once."""
        if worker.snapshot > self._saved:
            self._saved = worker.snapshot
            first = worker.first_uncounted(epoch)
            worker.client.extension(WorkerStateClient).save(worker.snapshot, passes_of(first))


class IslandTrial(Trial):
    """A trial with workers that train alone between rounds."""

    script_class = IslandScript
    jitter = 0.004
    """Seconds by which a step may be longer than another one."""

    def _prepare(self, job: Job, before: Trial | None) -> None:
        cluster = job.cluster
        # Workers that could start again alone may be behind. With leases one may have no batch left in an epoch.
        self.in_lock_step = not cluster.quorum and cluster.fragments > 1 and self.schedule.mode == "static"
        self.paces: dict[WorkerProcess, RoundPace] = {}
        self._makers: dict[int, set[WorkerProcess]] = {}  # cell -> processes of this start
        self._made_before = before.made_cells if isinstance(before, IslandTrial) else set[int]()
        self._left_before = before.left_cells if isinstance(before, IslandTrial) else set[int]()
        self._changed = False
        self.replicas = GroupReplicas(cluster.nworkers_per_group)
        self.lags: dict[Address, float] = dict(before.lags) if isinstance(before, IslandTrial) else {}
        """By worker: seconds by which each of its steps is longer."""

    def _open(self) -> None:
        self.peers = SimPeers(self.sim, self.transport, self.topology, self._notice_time)
        self.transport.observers.append(self._observe)
        super()._open()

    def _describe(self, schema: tuple[Parameter, ...]) -> tuple[Schema, SliceMap]:
        """As `FaultyCluster._describe`, with other lengths and the outer optimizers."""
        cells = schema[0].count
        # Of two fragments each has a long and a short parameter. Then the first server has the cells of the long ones,
        # and the second server those of the short ones.
        long, short = max(cells, 256), max(cells, 64)
        counts = (long, long, short, short) if self.job.cluster.fragments <= FRAGMENTS else (cells,) * 8
        return outer_plan(self.job, self.topology, parameters(*counts))

    @property
    def made_cells(self) -> set[int]:
        """The cells of all steps that were made, also in earlier starts of the job."""
        return self._made_before | self._makers.keys()

    @property
    def _left_groups(self) -> set[int]:
        """The groups that have left, or were given up. They may be back."""
        return {fault.group for fault in self.moves if fault.what is not FaultKind.JOIN}

    @property
    def left_cells(self) -> set[int]:
        """The cells of steps that such a group has made, also before a restart."""
        left = self._left_groups
        made = {cell for cell, makers in self._makers.items() if any(process.me.group in left for process in makers)}
        return self._left_before | made

    def may_be_lost(self, cell: int) -> bool:
        left = self._left_groups
        makers = self._makers.get(cell, set())
        return cell in self.left_cells and all(process.dead or process.me.group in left for process in makers)

    def made(self, cell: int, process: WorkerProcess) -> None:
        """A process makes the step of this cell."""
        self._makers.setdefault(cell, set()).add(process)

    # --- faults of one worker of a group ---------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Execute a fault now."""
        worker = Address(Role.WORKER, fault.group, fault.index)
        if fault.what is FaultKind.LAG and fault in self._faults:
            self._faults.remove(fault)
            self.log.append((self.sim.now, fault))
            self.lags[worker] = fault.away
        elif fault.what is FaultKind.CUT and fault.peer >= 0 and fault in self._faults:
            self._faults.remove(fault)
            process = self.worker_processes[worker]
            if self.peers.cut(process, fault.peer):
                self.log.append((self.sim.now, fault))
                for each in (process, self.worker_processes[worker._replace(index=fault.peer)]):
                    self._aways[each] = fault.away
        else:
            super().inject(fault)

    @property
    def had_losses(self) -> bool:
        """Whether a worker has died, or has lost a connection and will."""
        return bool(self.deaths or self._aways)

    def kill(self, group: int, away: float, index: int | None = 0) -> None:
        """Kill one process, and soon after it the others of its group; see `Trial.kill`."""
        process = None if index is None else self.worker_processes[Address(Role.WORKER, group, index)]
        if process is None or process.over or self.topology.workers_per_group == 1:
            super().kill(group, away, index)
            return
        turn = self._whole.get(group, 0)
        self.deaths.append((self.sim.now, group))
        self._end_one(process)
        self.peers.end(process)

        def others() -> None:
            # The launcher ends them when it knows of the death, if nothing else has ended or replaced them.
            if self._whole.get(group, 0) == turn and self.worker_processes[process.me] is process:
                self._kill(self.topology.workers(group), away)

        self.sim.at(self._notice_time(), others)

    def leave(self, process: WorkerProcess) -> None:
        """End a worker of a group that was asked to leave."""
        self.peers.end(process)
        super().leave(process)

    # --- what the servers have -----------------------------------------------------------------------------------

    def _observe(self, sender: Address, to: Address, message: m.Message) -> None:
        # Before the delivery: the effects of the last decision are there.
        if self._changed:
            self._check_servers()
        self._changed = isinstance(message, m.StepDecision)

    def _check_servers(self) -> None:
        """Check what the servers have counted. Raises InvariantViolated."""
        made = self.made_cells
        for me, sim_server in self.sim_servers.items():
            model = sim_server.server.state.model
            for segment in self.map.segments if model is not None else ():
                if segment.shard != me.index:
                    continue
                part = sim_server.server.state.known.flats.segment("values", segment)
                for at in part.nonzero()[:, 0].tolist():
                    cell, value = segment.start + at, float(part[at])
                    if value != 1 or cell not in made:
                        raise InvariantViolated(f"{me} has counted cell {cell} of p{segment.parameter} {value:g} times")

    def wrong(self) -> list[tuple[int, int, float]]:
        """As `Trial.wrong`.

        With several fragments a batch enters fragment by fragment, so that what a dead process had not told of one
        fragment may be missing there. And of a group that has left no process comes back to an epoch that all others
        have read.
        """
        found = super().wrong()
        if found and found[0][0] < 0:
            return found
        return [(parameter, cell, value) for parameter, cell, value in found if value or not self._may_miss(cell)]

    def _may_miss(self, cell: int) -> bool:
        """Whether a cell may be 0 in some fragments, or in all."""
        if self.may_be_lost(cell):
            return True
        makers = self._makers.get(cell, set())
        there = [float(part[cell]) for part in self.final]
        # Otherwise no fragment has told the batch, and another worker would have read it.
        lost = all(process.dead for process in makers) and (makers or cell in self._made_before)
        return bool(lost) and self.job.cluster.fragments > 1 and 1.0 in there
