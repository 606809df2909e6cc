"""The costs of messages and kernels, by a probe."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from topotrain.config.job import Job
from topotrain.config.topology import Address, Topology
from topotrain.tools.prediction.flow.flow_frames import Parcel
from topotrain.tools.prediction.host_resources import slowdown
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe
from topotrain.training.data.sampling import cut

_BITS = 8


@dataclass(frozen=True)
class Costs:
    """The costs of one job on certain machines.

    Attributes:
        job, topology: the job.
        probe: of its program.
        machines: that it runs on.
        workers_on_host: processes that compute at once on the fullest host.
    """

    job: Job
    topology: Topology
    probe: Probe
    machines: Machines
    workers_on_host: int

    @cached_property
    def rate(self) -> float:
        """Bytes per second of a host's link, in each direction."""
        link = self.machines.link
        if link is None or link.bandwidth is None:
            return math.inf
        # Lost bytes take the link again.
        return link.bandwidth * 1e6 / _BITS * (1 - link.loss)

    @cached_property
    def delay_s(self) -> float:
        """Seconds on the way between two hosts."""
        link = self.machines.link
        return self.probe.transports["tcp"].latency_s + (0.0 if link is None else link.delay / 1000)

    def seconds(self, nbytes: float) -> float:
        """Return how long so many bytes take a link."""
        return nbytes / self.rate

    # --- cores -----------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> int:
        """Of a host."""
        return self.machines.cores or self.probe.machine.cores

    @cached_property
    def crowding(self) -> float:
        """How many times slower a worker computes because of the others on its host."""
        known = self.probe.sharing if self.cores == self.probe.machine.cores else {}
        return slowdown(self.workers_on_host, self.cores, known)

    def send_s(self, parcel: Parcel, near: bool) -> float:
        """Seconds of a core of the sender."""
        way = self.probe.transports["shm" if near else "tcp"]
        return parcel.messages * way.send_message_s + parcel.nbytes * way.send_byte_s

    def receive_s(self, parcel: Parcel, near: bool) -> float:
        """Seconds of a core of the receiver."""
        way = self.probe.transports["shm" if near else "tcp"]
        return parcel.messages * way.receive_message_s + parcel.nbytes * way.receive_byte_s

    def handle_s(self, parcel: Parcel, near: bool) -> float:
        """Seconds of a core of a server that receives and handles messages."""
        return self.receive_s(parcel, near) + parcel.messages * self.probe.server_message_s

    def sum_s(self, nbytes: float, parts: int) -> float:
        """Seconds to add up so many gradients of a bucket."""
        if parts < 2:
            return 0.0
        kernels = self.probe.kernels
        # Each part is read and the sum is written; the mean is one more pass.
        return (parts + 1) * nbytes * kernels.byte_s + parts * kernels.operation_s

    def update_s(self, elements: int) -> float:
        """Seconds of the optimizer on a bucket."""
        return self.probe.optimizer.fixed_s + elements * self.probe.optimizer.element_s

    # --- computing ---------------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> Sequence[int]:
        """Samples in a step of each worker of a group."""
        size, workers = self.probe.batch.size, self.topology.workers_per_group
        if self.job.per_worker_batch or workers == 1:
            return [size] * workers
        if not self.job.cluster.shares and workers > size:
            # As `cut` does, which tries all numbers of workers one after another.
            return [1] * size + [0] * (workers - size)
        return [hi - lo for lo, hi in cut(size, workers, self.job.cluster.shares)]

    def computing(self, worker: Address) -> "Computing":
        """The computing of a worker in a step, as a mean."""
        number = worker.group * self.topology.workers_per_group + worker.index
        usual = self.usual_computing(worker.index)
        # A straggler is slow by itself: what it takes longer takes no cores from others, and is not slowed by them.
        slower = self.crowding + self.machines.stragglers.get(number, 1.0) - 1.0
        script = usual.script * self.crowding
        return Computing(script, usual.forward * slower, usual.backward * slower)

    def usual_computing(self, index: int) -> "Computing":
        """Seconds of a core for which a worker of this index computes in a step.

        It is no straggler.
        """
        batch, samples = self.probe.batch, self.samples[index]
        scale = batch.compute_s(samples) / batch.compute_s(batch.size)
        # With an outer optimizer the script's own makes its steps here.
        own = batch.optimizer_s if self.job.cluster.outer is not None else 0.0
        return Computing(batch.other_s * samples / batch.size + own, batch.forward_s * scale, batch.backward_s * scale)


@dataclass(frozen=True, slots=True)
class Computing:
    """Seconds of a worker in a step.

    Only the forward and the backward differ from step to step.
    """

    script: float
    forward: float
    backward: float

    @property
    def before(self) -> float:
        """What comes before the backward."""
        return self.script + self.forward

    @property
    def drawn(self) -> float:
        """The mean of what differs from step to step."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """All of it."""
        return self.before + self.backward
