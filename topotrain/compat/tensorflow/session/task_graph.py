"""One worker's part in a session: its states, and the cut graphs that it runs.

The session is a job of its own. Servers hold the parameters, the workers of one group are the cluster's, and every
value travels over the group's activation channel.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from topotrain.comm.store import Store, open_store
from topotrain.comm.transport import TransportError
from topotrain.compat.tensorflow.cluster_spec import task_name
from topotrain.config.job import Cluster, ConfigError, Job, TransportChoice
from topotrain.config.topology import Address, Role
from topotrain.core.client.client import JobError, PeerLost, StepEnd
from topotrain.core.optim.adapter import OptimizerSpec, remake
from topotrain.launch.by_hand.manual_server import SharedSettings, by_hand, place_of
from topotrain.launch.runtime.worker_connections import WorkerConnections
from topotrain.parallel.estimate.memory_check import memory_limits
from topotrain.parallel.remote.graph_description import GraphDescription, StateDescription
from topotrain.parallel.remote.graph_replayer import OutputCollector, WorkerModel, program
from topotrain.parallel.runtime.local_model import localise
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.program_runner import Runner
from topotrain.parallel.runtime.worker_sync import WorkerSync
from topotrain.training.adopted_optimizer import adopt
from topotrain.training.gradients.push_path import PushPath
from topotrain.training.worker import Worker, WorkerMemory
from topotrain.training.worker_extension import WorkerExtension

OVER = "the session is over"
# Bytes that a value may always have, whatever memory the machine reports.
_LEAST_BYTES = 64 << 20
# Bytes of all descriptions of a session.
_LEARNED_BYTES = 64 << 20
# Seconds in which a server may still send the reason for a lost connection.
_CAUSE_S = 1.5
_NAME = re.compile(r"session-[0-9a-f]{16}")


TERMS = SharedSettings("session", "the ClusterSpec", 60.0, task_name)


@dataclass(frozen=True, slots=True)
class SessionRendezvous:
    """The rendezvous of a session: name, store, number of processes, first worker."""

    name: str
    store: str
    workers: int
    servers: int
    first: int

    @staticmethod
    def from_data(data: Any) -> "SessionRendezvous":
        """Check the data of another task. Raises ConfigError."""
        kinds = {"name": str, "store": str, "workers": int, "servers": int, "first": int}
        if not isinstance(data, dict) or {name: type(value) for name, value in data.items()} != kinds:
            raise ConfigError("session", None, "must have name, store, workers, servers and first")
        meet = SessionRendezvous(**data)
        # The name goes into keys and texts, and the URL is connected to: neither may be anything that a peer likes.
        if not _NAME.fullmatch(meet.name) or not meet.store.startswith("tcp://") or not 0 <= meet.first < meet.workers:
            raise ConfigError("session", None, "must have a name, the URL of a tcp:// store and a first worker")
        return meet

    def job(self) -> Job:
        """Return the job: one synchronous group of all workers."""
        cluster = Cluster(
            nworkers_per_group=self.workers,
            nservers_per_group=self.servers,
            server_worker_separate=True,
            transport=TransportChoice.kTcp,
        )
        # `by_hand`: a loss ends the job, since no launcher can restart a process.
        return by_hand(Job(name=self.name, cluster=cluster))


@dataclass(slots=True)
class _Graph:
    runner: Runner
    box: OutputCollector | None
    description: GraphDescription


class SessionWorker:
    """A worker of a session. Nothing is opened before `enter`.

    values: of the states that this worker holds, by number. host: where other tasks reach this one. Raises ConfigError
    for a state that does not fit, or an optimizer that cannot be used.
    """

    def __init__(
        self,
        meet: SessionRendezvous,
        index: int,
        states: Sequence[StateDescription],
        values: Mapping[int, torch.Tensor],
        optimizer: str,
        secret: bytes,
        host: str,
    ) -> None:
        self._meet, self._index, self._states = meet, index, states
        self._secret, self._host = secret, host
        self._model = WorkerModel(states, values)
        spec = OptimizerSpec.from_text(optimizer)
        self._optimizer = remake(spec, self._model.parameters_in_order())
        division = self._model.divided(states, meet.workers)
        self._localised = localise(self._model, self._optimizer, division, index)
        self._graphs: dict[int, _Graph] = {}
        self._learned = 0
        # Masks are drawn with a generator of its own. Its state goes back to the client.
        self._generator = torch.Generator()
        self._connections: WorkerConnections | None = None
        self._store: Store | None = None

    def enter(self) -> None:
        """Meet the servers and the other workers.

        Raises TransportError, JobError, PeerLost, StoreError.
        """
        job, me = self._meet.job(), Address(Role.WORKER, 0, self._index)
        self._store = open_store(self._meet.store, self._secret)
        place = place_of(job, self._store, self._secret, TERMS, self._host)
        self._connections = connections = WorkerConnections(place, me)
        self._worker = Worker(
            me,
            job,
            place.topology,
            self._localised.parts,
            (self._optimizer,),
            connections.exchange,
            WorkerMemory(connections),
        )
        self._worker.start()
        # After `start`, which has sent the model's description: a worker with another model fails here.
        self._channel: NetworkChannel = connections.meet_group()
        adopt(self._optimizer, self._worker)
        assert isinstance(self._worker.path, PushPath)
        self._sync = _SessionSync(self._channel, self._worker.path)
        self._worker.attach(self._sync)

    def execute(self, request: Mapping[str, Any], inputs: Sequence[torch.Tensor] = ()) -> Any:
        """Carry out a request that the session's first worker makes to all workers."""
        match request["do"]:
            case "go":
                self.enter()
            case "learn":
                self.learn(request["number"], request["description"], request["loss"])
            case "run":
                raw = None if request["dice"] is None else bytearray(bytes.fromhex(str(request["dice"])))
                state = None if raw is None else torch.frombuffer(raw, dtype=torch.uint8)
                return self.run(request["number"], inputs, state, request["settings"])
            case _:
                return self.values()
        return None

    def learn(self, number: int, data: Any, loss: bool) -> None:
        """Keep a description to be run under this number. Raises ConfigError."""
        if type(number) is not int or number in self._graphs:
            raise ConfigError("description", number, "must have a whole number that no other description has")
        self._learned += len(json.dumps(data))
        if self._learned > _LEARNED_BYTES:
            raise ConfigError("description", number, f"all of a session may have {_LEARNED_BYTES:,} bytes together")
        description = GraphDescription.from_data(data, self._meet.workers, len(self._states))
        box = None if loss else OutputCollector()
        # A description may ask for any size, and must not take all memory of the machine.
        most = max(_LEAST_BYTES, memory_limits().least() or 0)
        cut = program(description, self._states, self._meet.workers, self._meet.first, box, most)
        runner = Runner(cut, self._model, self._channel, sync=self._sync, generator=self._generator)
        self._graphs[number] = _Graph(runner, box, description)

    def run(self, number: int, inputs: Sequence[torch.Tensor], rng_state: torch.Tensor | None, settings: str) -> Any:
        """Run a description; one with a loss is a step of training.

        Returns the output, on the first worker, which has the `inputs`. rng_state: of torch's generator, if the
        description draws. settings: the optimizer's, if they are new. Raises ConfigError for arguments of other forms,
        and the errors of torch or of the job.
        """
        graph = self._graphs[number]
        if self._index == self._meet.first:
            _check(inputs, graph.description)
        if rng_state is not None:
            self._generator.set_state(rng_state)
            # For functions that draw by themselves, such as attention.
            torch.default_generator.set_state(rng_state)
        given = {f"x{k}": tensor for k, tensor in enumerate(inputs)}
        # Without a box the result is the loss, of a step of training.
        self._model.train(graph.box is None)
        if graph.box is not None:
            with torch.no_grad():
                graph.runner(**given)
            return graph.box.take()
        if settings:
            self._set(OptimizerSpec.from_text(settings))
        self._optimizer.zero_grad()
        loss = graph.runner(**given)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _set(self, spec: OptimizerSpec) -> None:
        groups = self._optimizer.param_groups
        if len(spec.groups) != len(groups):
            raise ConfigError("optimizer.groups", len(spec.groups), f"must be {len(groups)}, as when the session began")
        for group, settings in zip(groups, spec.groups, strict=True):
            group.update(settings)

    @property
    def rng_state(self) -> torch.Tensor:
        """The state of the generator that masks are drawn with."""
        return self._generator.get_state()

    def values(self) -> dict[int, torch.Tensor]:
        """Return the present values that this worker holds, by number."""
        found = {}
        for number, state in enumerate(self._states):
            if state.worker == self._index:
                found[number] = getattr(self._model, f"s{number}").detach()
        return found

    def reason(self, error: BaseException) -> str:
        """Return the text of an error, with the cause if a server knows it."""
        if isinstance(error, JobError | PeerLost | TransportError) and self._connections is not None:
            # A broken connection may be seen before the server's message with the reason arrives.
            channel, until = self._connections.exchange.channel, time.monotonic() + _CAUSE_S
            return channel.await_cause(lambda: time.monotonic() >= until) or str(channel.failure or error)
        return error_text(error)

    def leave(self, why: str) -> None:
        # May be called twice, after an error and at the end.
        connections, self._connections = self._connections, None
        if connections is not None:
            with suppress(TransportError, PeerLost):
                # The servers get the reason, and send it to the other workers.
                connections.exchange.give_up(why)
            connections.close(finished=False)
        store, self._store = self._store, None
        if store is not None:
            store.close()


class _SessionSync(WorkerSync, WorkerExtension):
    """Worker synchronization that also starts a push without own gradients."""

    def __init__(self, channel: NetworkChannel, path: PushPath) -> None:
        super().__init__(channel)
        self._path = path

    def begun(self) -> None:
        super().begun()
        # A worker would not notice a backward that reaches none of its parameters.
        self._path.begin()

    def before_commit(self, step: int, end: StepEnd) -> None:
        self.stepped()


def error_text(error: BaseException) -> str:
    """Return the text of an error, with the notes that were added to it."""
    text = str(error) if isinstance(error, ConfigError | JobError) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def _check(inputs: Sequence[torch.Tensor], description: GraphDescription) -> None:
    forms = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in inputs]
    expected = [(form.dtype, form.sizes) for form in description.inputs]
    if forms != expected:
        raise ConfigError("arguments", forms, f"must be {expected}, as described")
