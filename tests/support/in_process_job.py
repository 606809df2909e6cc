"""A whole job in one process, and what it must equal: the same script run plainly, or by a reference trainer.

Rule: a test's script is written once, against `Trainer`, and run by
* `plain`: one ordinary process, the whole batch;
* `reference`: one process that computes every worker's share in turn, adds them up in the job's canonical order and
  updates with the servers' kernels, but has no server, message or wire: synchronous jobs must equal it bit for bit;
* `run_local`: real servers, exchanges and workers on the in-process transport, one thread per worker;
* `run_hosted`: the same with server processes' and workers' own code (`host`) over shared memory or TCP.
"""

import copy
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import MethodType
from typing import Any, Protocol

import torch
from reports import FunctionSender
from torch import nn

from topotrain.comm.router import RouterConfig
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.comm.transport.inprocess import InProcessTransport
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import Cluster, Job, Reduce
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.client.client import Client
from topotrain.core.model.schema import BufferMemory, PrivateMemory
from topotrain.core.optim.adapter import SliceUpdate, describe_all, hyper
from topotrain.core.server.ordered_sum import ScratchBuffers, canonical_mean
from topotrain.core.server.server import Server, ServerFactory
from topotrain.core.transport_contract import MessageSender
from topotrain.launch.runtime.process_host import (
    ConditionWaiter,
    HostObserver,
    HostOptions,
    ServerEndpoint,
    peers,
    serve,
)
from topotrain.launch.runtime.server_composition import make_server
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.launch.runtime.worker_connections import WorkerConnections
from topotrain.training.adopted_optimizer import adopt
from topotrain.training.data.map_dataset import STATIC
from topotrain.training.final_parameters import fetch_final
from topotrain.training.parameters.flat_parameters import ModelParts, describe_model
from topotrain.training.parameters.last_writes import end_script
from topotrain.training.parameters.lazy_pull import wait_by_layer
from topotrain.training.worker import Worker, WorkerMemory

PATIENCE_S = 120.0  # after this a run counts as hung; nothing here takes long

Loss = Callable[..., torch.Tensor]
Build = Callable[[], tuple[Any, ...]]  # (model, optimizer, whatever the script made of them before `prepare`)


class Trainer(Protocol):
    """What a test's script sees. `losses` are the shares that this process computes; one, except in the
    reference.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    more: tuple[Any, ...]

    def losses(
        self, loss: Loss, *batch: torch.Tensor, weight: Callable[..., float] | None = None
    ) -> list[torch.Tensor]:
        """loss(model, *share) of each share of a batch of the group; it counts its samples, or weight(*share)."""
        ...

    def backward(self, losses: Sequence[torch.Tensor], **kwargs: bool) -> None:
        """One backward; `.grad` of the model then has the group's mean."""
        ...


Script = Callable[[Any], None]


def share_of(batch: Sequence[torch.Tensor], index: int, workers: int) -> tuple[list[torch.Tensor], int]:
    """A worker's part of a batch and its samples; without any, one sample that must not count."""
    samples = len(batch[0])
    lo, hi = samples * index // workers, samples * (index + 1) // workers
    return [t[lo:hi] if hi > lo else t[:1] for t in batch], hi - lo


# --- one process -------------------------------------------------------------------------------------------------


class Plain:
    """The script without topotrain."""

    def __init__(self, build: Build) -> None:
        self.model, self.optimizer, *more = build()
        self.more = tuple(more)

    def losses(
        self, loss: Loss, *batch: torch.Tensor, weight: Callable[..., float] | None = None
    ) -> list[torch.Tensor]:
        return [loss(self.model, *batch)]

    def backward(self, losses: Sequence[torch.Tensor], **kwargs: bool) -> None:
        (loss,) = losses
        loss.backward(**kwargs)


class Reference:
    """A synchronous group in one process: a replica per worker over the same parameter values."""

    def __init__(self, build: Build, tree: Sequence[Sequence[int]], divide: bool = True) -> None:
        self.model, self.optimizer, *more = build()
        self.more = tuple(more)
        self._tree = tree
        self._divide = divide
        self._workers = sum(len(unit) for unit in tree)
        self._replicas = [self._replica(number) for number in range(self._workers)]
        self._weights: list[float] = []
        self._parameters = list(self.model.parameters())
        self._update = SliceUpdate(
            describe_all(_optimizers(self.optimizer), self._parameters),
            [(i, i, p.detach().view(-1)) for i, p in enumerate(self._parameters)],
        )
        for number, each in enumerate(_optimizers(self.optimizer)):
            self._take_over_step(number, each)

    def _replica(self, number: int) -> nn.Module:
        replica = copy.deepcopy(self.model)
        for own, shared in zip(replica.parameters(), self.model.parameters(), strict=True):
            own.data = shared.data
        if number == 0:  # the group's buffers are worker 0's
            for own, shared in zip(replica.buffers(), self.model.buffers(), strict=True):
                own.data = shared.data
        return replica

    def _take_over_step(self, number: int, mine: torch.optim.Optimizer) -> None:
        own = {id(p) for group in mine.param_groups for p in group["params"]}

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            grads = {
                i: p.grad.reshape(-1) if p.grad is not None and id(p) in own else None
                for i, p in enumerate(self._parameters)
            }
            self._update.apply(hyper(*_optimizers(self.optimizer)), grads, optimizer=number)
            return loss

        hooked = torch.optim.Optimizer.profile_hook_step(step)

        def tracked(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True
            return hooked(optimizer, closure)

        # A scheduler that the script built before takes it for its own wrapper.
        tracked._wrapped_by_lr_sched = True
        mine.step = MethodType(tracked, mine)

    def losses(
        self, loss: Loss, *batch: torch.Tensor, weight: Callable[..., float] | None = None
    ) -> list[torch.Tensor]:
        found = []
        self._weights = []
        for index, replica in enumerate(self._replicas):
            part, samples = share_of(batch, index, self._workers)
            self._weights.append(float(samples) if weight is None else weight(*part))
            found.append(loss(replica, *part))
        return found

    def backward(self, losses: Sequence[torch.Tensor], **kwargs: bool) -> None:
        rows = []
        for replica, loss in zip(self._replicas, losses, strict=True):
            for p in replica.parameters():
                p.grad = None
            loss.backward(**kwargs)
            rows.append([p.grad for p in replica.parameters()])
        for index, parameter in enumerate(self._parameters):
            grads = [row[index] for row in rows]
            if any(g is not None for g in grads):
                self._add(parameter, grads)

    def _add(self, parameter: nn.Parameter, grads: list[torch.Tensor | None]) -> None:
        flat = [None if g is None else g.contiguous().view(-1) for g in grads]
        out = torch.empty(parameter.numel(), dtype=parameter.dtype)
        parts = {w: (self._weights[w], flat[w]) for w in range(self._workers)}
        canonical_mean(parts, self._tree, out, ScratchBuffers(), self._divide)
        mean = out.view(parameter.shape)
        parameter.grad = mean if parameter.grad is None else parameter.grad.add_(mean)


def plain(build: Build, script: Script) -> "Result":
    """Run a script in an ordinary process."""
    trainer = Plain(_seeded(build))
    script(trainer)
    return Result.of(trainer.model)


def reference(job: Job, build: Build, script: Script) -> "Result":
    """Run a script by the one-process reference of a synchronous job."""
    trainer = Reference(_seeded(build), layout(job.cluster).sum_tree(0), job.reduce is Reduce.kMean)
    script(trainer)
    return Result.of(trainer.model)


def _seeded(build: Build) -> Build:
    def seeded() -> tuple[Any, ...]:
        torch.manual_seed(1)
        return build()

    return seeded


# --- a job -------------------------------------------------------------------------------------------------------


@dataclass
class WorkerHandle:
    """One worker of a job, as its script sees it."""

    me: Address
    topology: Topology
    model: nn.Module
    optimizer: torch.optim.Optimizer
    more: tuple[Any, ...]
    exchange: Client
    worker: Worker
    seq: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def losses(
        self, loss: Loss, *batch: torch.Tensor, weight: Callable[..., float] | None = None
    ) -> list[torch.Tensor]:
        part, samples = share_of(batch, self.me.index, self.topology.workers_per_group)
        self.worker.drawn(STATIC | self.me.group, self.seq, float(samples), samples)
        self.seq += 1
        if weight is not None:
            self.worker.batches.set_weight(weight(*part))
        return [loss(self.model, *part)]

    def backward(self, losses: Sequence[torch.Tensor], **kwargs: bool) -> None:
        (loss,) = losses
        loss.backward(**kwargs)

    @contextmanager
    def local(self) -> Iterator[None]:
        """As tt.local, which knows of only one worker per process."""
        self.worker.path.private = True
        try:
            yield
        finally:
            self.worker.path.private = False


@dataclass
class Result:
    """Final values by name (buffers too), and of a job its workers, in order."""

    values: dict[str, torch.Tensor]
    workers: list[WorkerHandle] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    traffic: tuple[int, int] = (0, 0)

    @staticmethod
    def of(model: nn.Module, **more: Any) -> "Result":
        named = [*model.named_parameters(), *model.named_buffers()]
        return Result({name: t.detach().clone() for name, t in named}, **more)

    def same_bits(self, other: "Result") -> bool:
        """Every value equal bit for bit (and no NaN, which would be equal in bits and wrong)."""
        assert self.values.keys() == other.values.keys()
        return all(
            torch.equal(
                v.contiguous().view(-1).view(torch.uint8), other.values[n].contiguous().view(-1).view(torch.uint8)
            )
            and bool(torch.isfinite(v).all())
            for n, v in self.values.items()
        )

    def distance(self, other: "Result") -> float:
        """Norm of the difference over the norm, all values together."""
        mine = torch.cat([v.double().reshape(-1) for v in self.values.values()])
        theirs = torch.cat([other.values[n].double().reshape(-1) for n in self.values])
        return float((mine - theirs).norm() / theirs.norm())


@dataclass(frozen=True)
class PlainServerFactory(ServerFactory):
    """Servers of a job without a store and without records of spans."""

    job: Job
    topology: Topology
    memory: ProcessMemory | None = None  # that residents see; None: each has its own

    def make(self, me: Address, sender: MessageSender) -> Server:
        memory = self.memory or PrivateMemory()
        return make_server(me, self.job, self.topology, memory, self.memory is not None, sender)


class FailureObserver(HostObserver):
    """Calls `trouble` where a server fails."""

    def __init__(self, trouble: Callable[[], object]) -> None:
        self._trouble = trouble

    def on_failure(self) -> None:
        self._trouble()


class _JobThreads:
    """The threads of a run: the first thing that goes wrong ends it, as the supervisor does."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.exchanges: dict[Address, Client] = {}
        self._lock = threading.Lock()

    def failed(self, me: Address | None, error: BaseException) -> None:
        with self._lock:
            self.errors.append(error)
        for address, exchange in list(self.exchanges.items()):
            if address != me:
                exchange.lost(me or exchange.channel.servers[0], f"it failed: {error}")

    def trouble(self) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        self.failed(None, error)

    def run(self, jobs: dict[Address, Callable[[], None]]) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(me, job), name=f"run {me}", daemon=True)
            for me, job in jobs.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        hung = [thread for thread in threads if thread.is_alive()]
        if hung and not self.errors:
            frames = sys._current_frames()
            stacks = ["".join(traceback.format_stack(frames[t.ident])[-6:]) for t in hung if t.ident in frames]
            raise AssertionError("hung:\n" + "\n".join(stacks))

    def _guarded(self, me: Address, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self.failed(me, error)


Describe = Callable[[Address, nn.Module, torch.optim.Optimizer], ModelParts]
"""Takes a worker's model apart; a split model's is changed on the way."""


def whole(me: Address, model: nn.Module, optimizer: torch.optim.Optimizer) -> ModelParts:
    """Every worker has the whole model."""
    return describe_model(model, (), _optimizers(optimizer))


def _optimizers(made: Any) -> Sequence[torch.optim.Optimizer]:
    """A script's optimizer, or its several."""
    return (made,) if isinstance(made, torch.optim.Optimizer) else tuple(made)


def run_local(job: Job, build: Build, script: Script, shared: bool = False, describing: Describe = whole) -> Result:
    """Run a script as a job on the in-process transport. Raises what went wrong first.

    shared: residents see each other's buffers, as on a host's shared memory; else everything travels.
    """
    topology, wire, threads = layout(job.cluster), InProcessTransport(), _JobThreads()
    addresses = [server for unit in topology.units for server in unit.servers]
    servers = {}
    regions = ProcessMemory()
    factory = PlainServerFactory(job, topology, regions if shared else None)
    options = HostOptions(FailureObserver(threads.trouble))
    for me in addresses:
        endpoint = ServerEndpoint(me, factory, wire, threading.Event(), options)  # type: ignore[arg-type]
        servers[me] = endpoint.server
        wire.attach(me, endpoint)
    for me in servers:
        for peer in peers(me, topology):
            wire.connect(me, peer, "local:")
    handles = []
    for me in (worker for g in range(topology.worker_groups) for worker in topology.workers(g)):
        send, waiter = FunctionSender(partial(wire.send, me)), ConditionWaiter(0.1)
        exchange = Client(me, topology, send, waiter, shared, extensions=client_extensions(topology))
        wire.attach(me, exchange)
        for server in dict.fromkeys((*exchange.channel.servers, exchange.channel.first_server)):
            wire.connect(me, server, "local:")
        threads.exchanges[me] = exchange
        handles.append(_enlist(job, topology, me, build, exchange, regions, describing, regions))
    for handle in handles:
        _connect(handle, wire)
    try:
        _train(threads, [h for h in handles if h is not None], script)
    finally:
        for exchange in threads.exchanges.values():
            exchange.leave()
        wire.close()
    if threads.errors:
        raise threads.errors[0]
    return Result.of(handles[0].model, workers=handles, servers=list(servers.values()), traffic=wire.traffic())


def run_hosted(
    job: Job,
    build: Build,
    script: Script,
    directory: Path,
    hosts: Sequence[int] = (),
    describing: Describe = whole,
) -> Result:
    """Run a script with the code of real processes, in threads, over the transport that `cluster.transport` names.

    hosts: the host of each unit, as `layout` takes them. A worker's connections are in its handle's notes.
    """
    topology, threads = layout(job.cluster, hosts), _JobThreads()
    (directory / "store").mkdir(mode=0o700)
    url = (directory / "store").as_uri()
    sockets = Path(mkdtemp(prefix="tt-"))

    def place() -> RouterConfig:
        return RouterConfig(job, topology, Identity(job.name, bytes(32), 0, 0, job.digest()), open_store(url), sockets)

    traffic: list[tuple[int, ...]] = []

    def servers_of(unit: int) -> None:
        found = topology.units[unit].servers
        traffic.append(serve(place(), found, HostOptions(FailureObserver(threads.trouble))))

    homes = [
        threading.Thread(target=threads._guarded, args=(None, lambda n=unit.rank: servers_of(n)), daemon=True)
        for unit in topology.units
        if unit.servers and not topology.inline
    ]
    for home in homes:
        home.start()
    workers = [worker for g in range(topology.worker_groups) for worker in topology.workers(g)]
    with ThreadPoolExecutor(len(workers)) as pool:  # servers beside workers meet each other: all at once
        found = pool.map(lambda me: WorkerConnections(place(), me), workers)
        connections = dict(zip(workers, found, strict=True))
    threads.exchanges.update({me: each.exchange for me, each in connections.items()})
    handles = [
        _enlist(job, topology, me, build, each.exchange, each, describing, each.memory)
        for me, each in connections.items()
    ]
    for handle in handles:
        handle.notes["connections"] = connections[handle.me]
    _train(threads, handles, script, lambda me: connections[me].close(finished=not threads.errors))
    for home in homes:
        home.join(PATIENCE_S if not threads.errors else 0.0)
    shutil.rmtree(sockets, ignore_errors=True)
    if threads.errors:
        raise threads.errors[0]
    assert not any(home.is_alive() for home in homes), "a server did not end"
    if topology.inline:
        traffic = [each.traffic() for each in connections.values()]
    return Result.of(
        handles[0].model, workers=handles, traffic=(sum(each[0] for each in traffic), sum(each[1] for each in traffic))
    )


def _enlist(
    job: Job,
    topology: Topology,
    me: Address,
    build: Build,
    exchange: Client,
    memory: BufferMemory,
    describing: Describe,
    regions: ProcessMemory,
) -> WorkerHandle:
    """Build a worker's model here, one after another: the seed is the process's."""
    model, optimizer, *more = _seeded(build)()
    local: Any = None
    if job.cluster.outer is not None:
        # Here: servers are tested without this extension, too.
        from topotrain.extensions.outer_optimizer.groups.group_optimizer import GroupOptimizer
        from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
        from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
        from topotrain.extensions.outer_optimizer.radial.radial_marks import embeddings_of

        wanted = (optimizer, job.cluster, model.named_parameters(), embeddings_of(model))
        if topology.workers_per_group > 1:
            local = GroupOptimizer(*wanted, GroupReduction(me, job, topology))
        else:
            local = InnerOptimizer(*wanted)
    worker = Worker(
        me,
        job,
        topology,
        describing(me, model, optimizer if local is None else local.optimizers),
        tuple(_optimizers(optimizer)),
        exchange,
        WorkerMemory(memory, regions),
        local,
    )
    return WorkerHandle(me, topology, model, optimizer, tuple(more), exchange, worker, notes={"inner": local})


def _connect(handle: WorkerHandle, wire: InProcessTransport) -> None:
    """Connect the workers of a group that add up their gradients themselves."""
    me, inner = handle.me, handle.notes["inner"]
    if inner is not None and handle.topology.workers_per_group > 1:
        inner.channel(handle.exchange, FunctionSender(partial(wire.send, me)))
        for peer in handle.topology.workers(me.group)[: me.index]:
            wire.connect(me, peer, "local:")


def _train(
    threads: _JobThreads,
    handles: Sequence[WorkerHandle],
    script: Script,
    close: Callable[[Address], None] = lambda me: None,
) -> None:
    def work(handle: WorkerHandle) -> None:
        try:
            handle.worker.start()
            inner = handle.notes["inner"]
            if inner is not None and "connections" in handle.notes and handle.topology.workers_per_group > 1:
                inner.meet(handle.notes["connections"])
            if handle.worker.lazy:
                wait_by_layer(handle.model, handle.worker)
            for number, optimizer in enumerate(_optimizers(handle.optimizer)):
                handle.notes[f"adopted {number}"] = adopt(optimizer, handle.worker, number)
            script(handle)
            writes = end_script(handle.worker)
            if handle.me != Address(Role.WORKER, 0, 0):
                return
            if any(tensor.is_meta for tensor in (*handle.worker.parts.tensors, *handle.worker.parts.buffer_tensors)):
                handle.notes["buffers"] = fetch_final(handle.worker, handle.notes.get("folder"))
            else:
                handle.notes["parts"], handle.notes["lost"] = writes.result(handle.worker)
        finally:
            handle.exchange.leave()
            close(handle.me)

    threads.run({handle.me: lambda handle=handle: work(handle) for handle in handles})


# --- the usual jobs, models and data -----------------------------------------------------------------------------

LAYOUTS = {
    "sandblaster": {"nworkers_per_group": 3, "nservers_per_group": 2, "server_worker_separate": True},
    "allreduce": {"nworkers_per_group": 3, "nservers_per_group": 3},
    "in-memory": {"nworkers_per_group": 2, "nworkers_per_procs": 2},
    "two by two": {"nworkers_per_group": 4, "nworkers_per_procs": 2, "nservers_per_group": 2},
    "serverless": {"nworkers_per_group": 2, "nserver_groups": 0},
    "one": {},
}


def job_of(name: str = "sandblaster", **changes: Any) -> Job:
    """A job of a named layout; keyword arguments are fields of Job, or of Cluster where it has them."""
    cluster = {key: changes.pop(key) for key in list(changes) if key in Cluster.__dataclass_fields__}
    return Job(cluster=Cluster(**{**LAYOUTS[name], **cluster}), **changes)


def mlp() -> nn.Module:
    """Parameters that do not end where a slice does."""
    return nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 5))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


class Transformer(nn.Module):
    """One block, pre-norm; the embedding is the output layer. No bias on the keys: its exact gradient is zero, and
    Adam makes steps of full size out of what rounding leaves of it."""

    def __init__(self, words: int = 13, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + self.down(torch.relu(self.up(x))))


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over the samples (of every position, for tokens)."""
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def vectors(count: int, size: int = 12, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches of `size` samples for `mlp`."""
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 12, generator=rng), torch.randint(5, (size,), generator=rng)) for _ in range(count)]


def images(count: int, size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For `Cnn`."""
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 1, 8, 8, generator=rng), torch.randint(5, (size,), generator=rng)) for _ in range(count)]


def tokens(count: int, size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For `Transformer`."""
    rng = torch.Generator().manual_seed(0)
    runs = [torch.randint(13, (size, 7), generator=rng) for _ in range(count)]
    return [(run[:, :-1], run[:, 1:]) for run in runs]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.003)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.03)


def building(model: Callable[[], nn.Module] = mlp, optimizer: Callable[..., torch.optim.Optimizer] = sgd) -> Build:
    """A builder of these two."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model()
        return made, optimizer(made)

    return build


def usual_loop(batches: Sequence[tuple[torch.Tensor, ...]], loss: Loss = cross_entropy) -> Script:
    """zero_grad, forward, backward, step."""

    def script(t: Trainer) -> None:
        for batch in batches:
            t.optimizer.zero_grad()
            t.backward(t.losses(loss, *batch))
            t.optimizer.step()

    return script
