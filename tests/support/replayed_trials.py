"""Simulated jobs that are recorded under one seed's network, and replayed under another's.

The numbers are floats, and each gradient depends on the values that its worker has seen. So jobs in which servers
decide in another order, or show other versions, end with other bits.
"""

from dataclasses import dataclass, field

import torch
from cell_model import cell_model, outer_plan
from fault_schedule import Fault, FaultSchedule
from fault_trial import Trial, TrialScript
from faulty_cluster import parameters
from faulty_network import NetworkFaults

from topotrain.config.job import Job
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address
from topotrain.core.model.schema import PrivateMemory, Schema
from topotrain.core.server.server import Server
from topotrain.extensions.decision_record.exchange_record import RecordedExchanges, ReplayedExchanges
from topotrain.extensions.decision_record.order_entries import decode_entries
from topotrain.extensions.decision_record.process_order import part_of
from topotrain.extensions.decision_record.recording_server import RecordingServer, RecordingSink
from topotrain.extensions.decision_record.replay_order import ReplayOrder
from topotrain.extensions.decision_record.replayed_server import ReplayedServer, ReplayObserver, ReplayTask
from topotrain.extensions.decision_record.server_order import ServerOrder
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.launch.runtime.server_composition import make_server
from topotrain.tools.replay.decision_file import DecisionFile
from topotrain.tools.replay.replay_run import RecordedDeaths
from topotrain.tools.simulator.sim_cluster import SimServer
from topotrain.training.adopted_optimizer import adopt

NEAR, FAR = NetworkFaults(delay=(0.0005, 0.004)), NetworkFaults(delay=(0.0002, 0.03))
EPOCHS = 2


class Differs(AssertionError):
    """A replay says that the program does something else."""


@dataclass
class KeptBytes(RecordingSink):
    """Keeps the bytes of one process."""

    data: bytearray = field(default_factory=bytearray)

    def write(self, data: bytes) -> None:
        self.data += data


class Recorder(ServerOrder):
    """Records all processes of a simulated job."""

    def __init__(self) -> None:
        self._parts: dict[str, KeptBytes] = {}

    def make(self, *arguments: object) -> Server:
        me = arguments[0]
        assert isinstance(me, Address)
        return RecordingServer(*arguments, self._sink(part_of(me)))  # type: ignore[arg-type]

    def choices(self, worker: Address, incarnation: int) -> ExchangeChoices:
        return RecordedExchanges(self._sink(part_of(worker, incarnation)))

    def _sink(self, name: str) -> KeptBytes:
        return self._parts.setdefault(name, KeptBytes())

    def record_of(self, job: Job) -> DecisionFile:
        return DecisionFile(job, True, {name: bytes(sink.data) for name, sink in self._parts.items()})


class Replayer(ServerOrder, ReplayObserver):
    """Replays a recording in a simulated job, and kills groups where the recording has."""

    def __init__(self, record: DecisionFile, until: int | None = None) -> None:
        self.record, self._until = record, until
        self._deaths = RecordedDeaths(record)
        self._whole: dict[tuple[str, int], set[str]] = {}
        self._killed: set[tuple[int, int]] = set()
        self.stopped: dict[Address, torch.Tensor] = {}
        """The values of servers at the last version."""
        self.trial: FloatTrial

    def make(self, *arguments: object) -> Server:
        me = arguments[0]
        assert isinstance(me, Address)
        order = ReplayOrder(decode_entries(self.record.parts[part_of(me)]), self.record.whole)
        return ReplayedServer(*arguments, ReplayTask(order, self, self._until))  # type: ignore[arg-type]

    def choices(self, worker: Address, incarnation: int) -> ExchangeChoices:
        later = part_of(worker, incarnation + 1) in self.record.parts
        return ReplayedExchanges(self.record.parts.get(part_of(worker, incarnation), b""), not later, str(worker))

    def on_whole_life(self, server: Server, worker: Address, life: int) -> None:
        self._whole.setdefault((str(worker), life), set()).add(str(server.me))
        key, trial = (worker.group, life), self.trial
        if self._deaths.due(str(worker), life, self._whole) and key not in self._killed:
            self._killed.add(key)
            trial.sim.at(trial.sim.now, lambda: trial.kill(worker.group, 0.05, None))

    def on_version(self, server: Server, version: int) -> None:
        model = server.state.known
        self.stopped[server.me] = torch.cat([model.values(bucket.id).clone() for bucket in model.buckets])

    def on_end(self, server: Server) -> None:
        raise AssertionError(f"{server.me}: a recording of a whole job does not end early")

    def on_difference(self, server: Server, text: str) -> None:
        raise Differs(text)


def noise(count: int, *key: int) -> torch.Tensor:
    """Numbers that depend on the key only."""
    generator = torch.Generator().manual_seed(sum(number * 1009**at for at, number in enumerate(key, 1)))
    return torch.randn(count, generator=generator)


class FloatScript(TrialScript):
    """A script whose gradients depend on the values."""

    def run(self) -> None:
        trial, worker, process = self._trial, self._worker, self._process
        assert isinstance(trial, FloatTrial)
        worker.open(1.0)
        for epoch, stream, seq, number in self._steps(lambda: worker.sleep(0.0, 0.006)):
            key = (epoch, number, worker.me.index)
            gradient = [
                0.03 * value + 0.01 * noise(value.numel(), at, *key, trial.changed)
                for at, value in enumerate(worker.values())
            ]
            worker.step(gradient, marks=(stream, seq, seq), samples=1)
            process.stepped = True
        self._finish()


class FloatTrial(Trial):
    """A simulated job of a `FloatScript`.

    Args:
        job, seed: of the job and of its network.
        order: records it, or replays it. None: neither.
        batches: of an epoch.
        lease: the workers lease their batches.
        faults: the deaths in it.
        lengths: of the parameters.
        changed: another number makes the scripts compute other gradients.
    """

    script_class = FloatScript

    def __init__(
        self,
        job: Job,
        seed: int,
        order: Recorder | Replayer | None = None,
        batches: int = 12,
        lease: bool = True,
        faults: tuple[Fault, ...] = (),
        changed: int = 0,
        lengths: tuple[int, ...] = (150, 150, 256),
    ) -> None:
        self._lengths = lengths
        self._order, self.changed = order, changed
        if isinstance(order, Replayer):
            order.trial = self
        mode = "lease" if lease else "static"
        network = FAR if seed % 2 else NEAR
        super().__init__(job, seed, FaultSchedule("calm", batches, EPOCHS, mode, True, faults), network)
        self.counts.elastic = False  # the values are no counts

    def _make_server(self, me: Address) -> SimServer:
        server = make_server(me, self.job, self.topology, PrivateMemory(), order=self._order)
        return SimServer(server, self.transport)

    def _describe(self, schema: tuple[Parameter, ...]) -> tuple[Schema, SliceMap]:
        return super()._describe(parameters(*self._lengths))

    def choices(self, worker: Address, incarnation: int) -> ExchangeChoices:
        return ExchangeChoices() if self._order is None else self._order.choices(worker, incarnation)


class FloatIslandScript(TrialScript):
    """A script that trains a model alone between rounds."""

    def run(self) -> None:
        trial, process, me = self._trial, self._process, self._worker.me
        assert isinstance(trial, FloatIslands)
        model = cell_model(trial.schema.parameters)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        choices = trial.choices(me, process.incarnation)
        inner = InnerOptimizer(plain, trial.job.cluster, model.named_parameters(), choices=choices)
        worker = self._trained(model, plain, inner)
        worker.start()
        adopt(plain, worker)
        for epoch, stream, seq, number in self._steps(lambda: self._worker.sleep(0.0, 0.006)):
            worker.drawn(stream, seq, 1.0, 1)
            plain.zero_grad()
            for at, tensor in enumerate(model.parameters()):
                target = noise(tensor.numel(), at, epoch, number, trial.changed)
                (tensor - target).square().sum().backward()
            plain.step()
            process.stepped = True
        self._finish(worker)


class FloatIslands(FloatTrial):
    """A simulated job with an outer optimizer."""

    script_class = FloatIslandScript

    def _describe(self, schema: tuple[Parameter, ...]) -> tuple[Schema, SliceMap]:
        return outer_plan(self.job, self.topology, parameters(256, 256, 64, 64))


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
