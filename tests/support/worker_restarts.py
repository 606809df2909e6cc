"""A job whose workers' processes end and begin again, in one process: real loaders, feeds, lease book and deposits.

What is pretended is the training: a step is a random number of the script, and is applied once all workers of a
group have taken it. Each worker has a generator of its own, as a process has.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from divided_loaders import LeaseServer, LoaderClient, flat
from torch.utils.data import DataLoader

from topotrain.config.job import Job as Conf
from topotrain.config.topology import Address
from topotrain.core.profiling.spans import SILENT
from topotrain.extensions.resume.script_resume import ScriptResume
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE, WorkerStateStore, cut
from topotrain.training.context import ProcessOwner
from topotrain.training.data import batch_ranges
from topotrain.training.data.data_messages import Lease, LeaseRequest
from topotrain.training.data.distributed_loader import STATIC, DataPlan, ShardedLoader
from topotrain.training.rng_state import RngState
from topotrain.training.worker_stats import WorkerStats


@dataclass(frozen=True)
class Shape:
    """A layout, and how its loader's batches are divided."""

    workers: int = 1
    groups: int = 1
    mode: str = "broadcast"
    per_worker: bool = False
    backup: int = 0

    @property
    def unit(self) -> int:
        return self.workers if self.per_worker and self.workers > 1 else 1


@dataclass
class Past:
    """What a snapshot holds; `base` is the one that its job was continued from."""

    blobs: dict[tuple[int, int], bytes]
    done: dict[int, batch_ranges.Runs]

    @property
    def workers(self) -> list[tuple[int, int]]:
        return list(self.blobs)

    def worker(self, group: int, index: int) -> bytes | None:
        return self.blobs.get((group, index))

    @property
    def first_epoch(self) -> int | None:
        return None

    @property
    def closed(self) -> int:
        return 0

    def runs(self, epoch: int) -> batch_ranges.Runs:
        return self.done.get(epoch, ())


@dataclass
class Step:
    """What a script saw in one step."""

    who: Address
    epoch: int
    samples: list[int]
    rng: tuple[float, ...]
    rates: tuple[float, ...]
    marks: tuple[int, int] = (0, 0)


@dataclass
class Script:
    """The user's part; `make` builds its loader, `schedule` a scheduler and when it steps ("step" or "epoch").

    ahead: so many batches more than it uses are drawn by the library whose loop it is; -1: the loop is the script's.
    """

    make: Callable[[], DataLoader[Any]]
    epochs: int = 3
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    per: str = "step"
    plain_range: bool = False
    kept: Callable[[], dict[str, Any]] = dict
    ahead: int = -1


class RestartableClient(LoaderClient):
    """A worker's client, as far as data and deposits need it."""

    spans, leaves = SILENT, False

    def __init__(self, run: "JobRun", who: Address) -> None:
        super().__init__(run.lease_server, who)
        self.run = run
        self.dead = False
        self.channel = self.values = self

    def settle(self) -> None:
        """Nothing is committed lazily."""

    def extension(self, kind: type) -> "RestartableClient":
        return self

    def lease(
        self, epoch: int, ordinal: int, total: int, digest: int, passed: int, wait: bool, uncounted: int = -1
    ) -> tuple[int, int, int]:
        self.lease_server.tell(self.who, LeaseRequest(epoch, ordinal, total, digest, passed, wait, uncounted))
        self.run.waiting.add(self.who.group)
        while self.lease_server.replies[self.who].empty() and any(
            self.run.step(group) for group in range(self.run.shape.groups) if group not in self.run.waiting
        ):
            pass
        self.run.waiting.discard(self.who.group)
        reply = self.lease_server.replies[self.who].get(timeout=1)
        assert isinstance(reply, Lease), reply
        self.done_by_others = reply.done_by_others
        if reply.first < reply.last:
            self.run.leases[(epoch << 32) | reply.lease] = reply.first
        return reply.lease, reply.first, reply.last

    def free(self, epoch: int, ordinal: int, first: int) -> None:
        if not self.dead:  # a process that is killed takes no leave
            super().free(epoch, ordinal, first)

    def applied(self, stream: int) -> int:
        return self.run.taken.get(self.who.group, 0) if stream < 0 else super().applied(stream)

    def save(self, number: int, data: torch.Tensor) -> None:
        for part in cut(self.who, number, data):
            body = self.run.deposits.place(self.who, part, False).copy_(part.body)
            assert self.run.deposits.handle(self.who, replace(part, body=body)) == []

    def load(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        kept = self.run.deposits._states.get(self.who._replace(index=index))
        return (None, None) if kept is None else (kept.kept.get(EPOCH), kept.kept.get(SINCE))


class JobRun:
    """One run of a job's servers, in which the processes of its groups may start again."""

    def __init__(self, shape: Shape, script: Script, past: Past | None = None) -> None:
        self.shape, self.script, self.past = shape, script, past
        self.lease_server = LeaseServer(shape.groups, shape.workers)
        self.deposits = WorkerStateStore()
        self.taken: dict[int, int] = {}
        self.incarnation = dict.fromkeys(range(shape.groups), 0)
        self.seen: list[Step] = []
        self.runs: dict[Address, Iterator[Step]] = {}
        self.rng: dict[Address, RngState] = {}
        self.worlds: dict[Address, Any] = {}
        self.notices: list[str] = []
        self.leases: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.clients: dict[Address, RestartableClient] = {}
        for group in range(shape.groups):
            self.start(group)

    def group(self, number: int) -> list[Address]:
        return [who for who in self.lease_server.workers if who.group == number]

    def start(self, group: int) -> None:
        for who in self.group(group):
            self.rng[who] = RngState(3)
            self.runs[who] = self._process(who)

    def restart(self, group: int) -> None:
        """The processes of a group die, and new ones come."""
        for who in self.group(group):
            if who in self.clients:
                self.clients[who].dead = True
            del self.runs[who]
            self.worlds.pop(who, None)
            self.lease_server.replies[who] = type(self.lease_server.replies[who])()
        self.lease_server.post(self.lease_server.book.group_restarted(group, self.lease_server.applied, False))
        self.incarnation[group] += 1
        self.start(group)

    # --- one process ---------------------------------------------------------------------------------------------

    def _process(self, who: Address) -> Iterator[Step]:
        client, script, shape = RestartableClient(self, who), self.script, self.shape
        self.clients[who] = client
        cluster = SimpleNamespace(backup=shape.backup, n_push=1, local_steps=1)
        conf = SimpleNamespace(on_failure=Conf(on_failure="kContinue").on_failure, cluster=cluster)
        place = SimpleNamespace(
            job=conf,
            topology=SimpleNamespace(regroups=lambda group: True, workers_per_group=shape.workers),
            identity=SimpleNamespace(incarnation=self.incarnation[who.group]),
        )
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scheduler = script.schedule(optimizer) if script.schedule else None
        buffer = torch.zeros(2)
        described = SimpleNamespace(name="count")
        parts = SimpleNamespace(buffers=(described,), buffer_tensors=(buffer,), parameters=(), tensors=())
        worker: Any = SimpleNamespace(
            leaves=False,
            me=who,
            client=client,
            device=torch.device("cpu"),
            tally=WorkerStats(),
            snapshot=0,
            lazy=False,
            parts=parts,
            mirror=SimpleNamespace(own=()),
            optimizers=(optimizer,),
            rejoin=lambda taken: None,
            first_uncounted=lambda epoch: epoch,
        )
        here: Any = SimpleNamespace(
            me=who,
            place=place,
            kept=script.kept(),
            alike=set(),
            superseded=set(),
            loader=None,
            resumed=self.past,
            owner=ProcessOwner(),
            emit=lambda event: self.notices.append(event.text),
        )
        main = (who.group, who.index) == (0, 0)
        named = (who.group, shape.groups, who.index, shape.workers)
        plan = DataPlan(*named, (), shape.mode, shape.per_worker, 5, 1, main)  # type: ignore[arg-type]
        loader = here.loader = ShardedLoader(script.make(), plan, client, client)
        continuing = ScriptResume(here, worker)
        loader.resume_with(continuing)
        if script.ahead >= 0:
            continuing.read_ahead()
        self.worlds[who] = SimpleNamespace(
            worker=worker, here=here, buffer=buffer, optimizer=optimizer, loader=loader, continuing=continuing
        )
        left = list(continuing.remaining(script.epochs))
        numbers = iter(range(script.epochs)) if script.plain_range else continuing.epochs(script.epochs)
        for epoch in numbers:
            assert script.plain_range or epoch == left.pop(0)
            for batch, (stream, seq, weight_, _) in self._drawn(loader, client, continuing):
                rng = (float(torch.rand(1)), random.random(), float(numpy.random.rand()))
                rates = (optimizer.param_groups[0]["lr"], float(buffer[0]))
                yield Step(who, epoch, flat(batch) if weight_ else [], rng, rates, (stream, seq))
                buffer += 1
                worker.tally.steps += 1
                for thing in here.kept.values():
                    if hasattr(thing, "step"):
                        thing.step()
                if scheduler is not None and script.per == "step":
                    scheduler.step()
            if scheduler is not None and script.per == "epoch":
                scheduler.step()
        continuing.finish()
        self.lease_server.end(who)

    def _drawn(
        self, loader: ShardedLoader, client: RestartableClient, position: ScriptResume
    ) -> Iterator[tuple[Any, tuple[int, int, float, int]]]:
        """The batches, each when it is used, and what was noted when it was drawn."""
        queue: deque[tuple[Any, tuple[int, int, float, int]]] = deque()
        batches = iter(loader)
        while True:
            while len(queue) <= self.script.ahead and (batch := next(batches, None)) is not None:
                queue.append((batch, client.drawn_[-1]))
            if self.script.ahead < 0 and (batch := next(batches, None)) is not None:
                queue.append((batch, client.drawn_[-1]))
            if not queue:
                return
            if self.script.ahead >= 0:
                position.use()
            yield queue.popleft()

    # --- all of them ---------------------------------------------------------------------------------------------

    def step(self, group: int, commits: bool = True, snapshot: int = 0) -> bool:
        """A step of a group; False: its script has ended. Snapshot: of what this step leaves."""
        steps = [self._advance(who) for who in self.group(group)]
        if all(step is None for step in steps):
            return False
        assert all(step is not None and step.marks == steps[0].marks for step in steps), steps
        if commits:
            (stream, seq) = steps[0].marks
            assert seq == self.lease_server.applied.get(stream, 0)
            self.lease_server.applied[stream] = seq + 1
            self.taken[group] = self.taken.get(group, 0) + 1
            self.seen += steps
            for who in self.group(group):
                self.worlds[who].worker.snapshot = snapshot
        return True

    def _advance(self, who: Address) -> Step | None:
        with self.rng[who]:
            return next(self.runs[who], None)

    def run(self, steps: int | None = None, group: int | None = None) -> int:
        """So many steps of a group, or of all in turn; None: to the end. Returns how many were taken."""
        taken = 0
        live = list(range(self.shape.groups)) if group is None else [group]
        while live and taken != steps:
            for number in list(live):
                if taken != steps and self.step(number):
                    taken += 1
                elif taken != steps:
                    live.remove(number)
        return taken

    def snapshot(self, number: int) -> Past:
        """After a step with this snapshot, and one more of each group (or their end)."""
        blobs = {(w.group, w.index): b.numpy().tobytes() for w, b in self.deposits.snapshot_states(number).items()}
        return Past(blobs, self.positions())

    def positions(self) -> dict[int, batch_ranges.Runs]:
        """As a manifest has them."""
        found: dict[int, list[tuple[int, int]]] = {}
        unit = self.shape.unit
        for stream, done in self.lease_server.applied.items():
            epoch, low = stream >> 32, stream & 0xFFFF_FFFF
            if low & STATIC:
                units = [(low & ~STATIC) + s * self.shape.groups for s in range(done)]
            else:
                units = list(range(self.leases[stream], self.leases[stream] + done))
            found.setdefault(epoch, []).extend((u * unit, (u + 1) * unit) for u in units)
        base = {} if self.past is None else self.past.done
        return {e: batch_ranges.origin(base.get(e, ()), found.get(e, ())) for e in {*base, *found}}

    def samples(self, epoch: int) -> list[int]:
        return [sample for step in self.seen if step.epoch == epoch for sample in step.samples]
