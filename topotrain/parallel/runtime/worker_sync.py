"""Synchronization of a group's workers at the beginning of each forward.

Workers exchange their numbers of samples and check that all scripts do the same. A worker that calls the model once
more or once less than the others, or in another mode, would wait forever for a tensor that is never sent.
"""

import struct
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

import torch

from topotrain.config.field_checks import ConfigError
from topotrain.parallel.runtime.channel import ControlEdge, TensorKey
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.training.data.data_client import DrawObserver

_NOWHERE = (-1, -1)
HINT = "all workers of a group must call the model, and go backward, the same number of times and in the same order"


@dataclass(frozen=True, slots=True)
class ForwardHello:
    """State of a worker at the beginning of a forward. All fields are int64.

    Attributes:
        steps, backwards: optimizer steps and backwards that it has begun before.
        weight_bits: the bits of a float64, the weight of its gradients.
        modes: a digest of the training modes of all modules.
        program: a digest of the program, the number of micro-batches and the schedule.
        chance: a digest of torch's generator, 0 if no mask will be drawn.
    """

    steps: int
    backwards: int
    samples: int
    weight_bits: int
    training: int
    grad: int
    modes: int
    autocast: int
    program: int
    chance: int

    @property
    def weight(self) -> float:
        """The weight of the worker's gradients."""
        return float(struct.unpack("<d", struct.pack("<q", self.weight_bits))[0])

    @staticmethod
    def bits(weight: float) -> int:
        """Return `weight_bits` of a weight."""
        return int(struct.unpack("<q", struct.pack("<d", weight))[0])


class WorkerSync(DrawObserver):
    """Counts forwards, backwards and steps of one worker, and tracks the others'.

    All runners of a process that share a channel share this object.
    """

    def __init__(self, channel: NetworkChannel) -> None:
        self.channel = channel
        self.forwards = self.backwards = self.steps = 0
        self._others = [worker for worker in range(channel.size) if worker != channel.me]
        self._hellos: dict[tuple[int, TensorKey], ForwardHello] = {}
        self._stepped = dict.fromkeys(self._others, 0)  # by worker: steps with a notice that was read
        self._drawn = _NOWHERE
        self._asked = 0
        self._draws = dict.fromkeys(self._others, (0, _NOWHERE))  # by worker: notices read, and the last one

    def weight(self) -> float:
        """Return the weight of this worker's gradient in the present step (its samples)."""
        return 1.0

    def begun(self) -> None:
        """Count a backward that begins here."""
        self.backwards += 1

    def stepped(self) -> None:
        """Notify the others that the script calls optimizer.step()."""
        # Another worker may be waiting for this worker in a forward. It can then name the script that differs.
        notice = torch.tensor([self.forwards, self.backwards])
        for other in self._others:
            self.channel.send(other, TensorKey(self.steps, 0, ControlEdge.STEPPED, False), notice)
        self.steps += 1

    def exchange(self, mine: ForwardHello) -> tuple[ForwardHello, ...]:
        """Send the hello to all workers, and return the hellos of all, by worker.

        Raises:
            ConfigError: the workers' scripts differ.
        """
        key = self._hello(self.forwards)
        self.forwards += 1
        # All send before any receives. Sending never waits, so the order of the workers does not matter.
        for other in self._others:
            self.channel.send(other, key, torch.tensor(astuple(mine)))
        hellos = []
        for worker in range(self.channel.size):
            hello = mine if worker == self.channel.me else self._hello_of(worker, key)
            hellos.append(hello)
        check(hellos)
        # The notices of all common steps are here now. They are read, so that they do not pile up.
        for other in self._others:
            for step in range(self._stepped[other], self.steps):
                self.channel.receive(other, TensorKey(step, 0, ControlEdge.STEPPED, False))
            self._stepped[other] = self.steps
        return tuple(hellos)

    def _hello_of(self, worker: int, key: TensorKey) -> ForwardHello:
        notice = (worker, TensorKey(self.steps, 0, ControlEdge.STEPPED, False))
        while (worker, key) not in self._hellos and not self.channel.arrived(worker, key):
            stepped, draws = self.channel.arrived(*notice), self._draws_on(worker)
            if self.channel.arrived(worker, key):  # checked again: a hello is sent before the notices that follow it
                break
            if stepped:
                called = self._notice(notice)[0]
                raise disagreement(
                    f"worker {worker} of the group called the split model {called} times before its optimizer.step() "
                    f"number {self.steps + 1}, worker {self.channel.me} has called it {self.forwards} times: {HINT}"
                )
            if draws:
                raise disagreement(
                    f"worker {worker} of the group goes on to other batches, worker {self.channel.me} calls the split "
                    f"model: {HINT}"
                )
            self.channel.wait_any([(worker, key), notice, self._draw_notice(worker)])
        return self._read(worker, key)

    def wait(self, source: int, key: TensorKey) -> None:
        """Wait for a tensor.

        Raises:
            ConfigError: the tensor is a gradient, and its sender has continued without a backward.
        """
        channel = self.channel
        if channel.arrived(source, key):
            return
        hello, notice = (
            (source, self._hello(self.forwards)),
            (source, TensorKey(self.steps, 0, ControlEdge.STEPPED, False)),
        )
        # Only gradients can fail to come. That a value is sent was agreed upon by the hellos.
        signs: Collection[tuple[int, TensorKey]] = (hello, notice) if key.backward else ()
        while not channel.arrived(source, key):
            signs = self._without_known(signs, source)
            channel.wait_any([(source, key), *signs])

    def receive(self, source: int, key: TensorKey, what: str) -> torch.Tensor:
        """Return a tensor that belongs to no forward, sent by all workers during `what`.

        Raises:
            ConfigError: the sender has continued without it.
        """
        signs = (source, self._hello(self.forwards)), (source, TensorKey(self.steps, 0, ControlEdge.STEPPED, False))
        while True:
            went = (
                signs[0] in self._hellos or any(self.channel.arrived(*sign) for sign in signs) or self._draws_on(source)
            )
            if self.channel.arrived(source, key):
                return self.channel.receive(source, key)[0]
            if went:
                raise disagreement(
                    f"worker {source} of the group goes on with the training, worker {self.channel.me} is in {what}: "
                    f"all workers of a group must call it, at the same point of the script"
                )
            self.channel.wait_any([(source, key), *signs, self._draw_notice(source)])

    def draw(self, epoch: int, chunk: int) -> None:
        """Notify worker 0 that this worker needs a part of the order of batches."""
        # Worker 0 makes this order. Without the notice, this worker and worker 0 could wait for each other forever.
        if self.channel.me == 0:
            self._drawn = epoch, chunk
            for other in self._others:
                self._draws_on(other)  # reads the notices, so that they do not pile up
        else:
            self.channel.send(0, TensorKey(self._asked, 0, ControlEdge.DRAW, False), torch.tensor([epoch, chunk]))
            self._asked += 1

    def _draws_on(self, other: int) -> bool:
        """Whether a worker waits for a part of the order that is not made yet."""
        notice = self._draw_notice(other)
        while self.channel.arrived(*notice):
            epoch, chunk = self.channel.receive(*notice)[0].tolist()
            self._draws[other] = notice[1].forward + 1, (epoch, chunk)
            notice = self._draw_notice(other)
        return self.channel.me == 0 and self._draws[other][1] > self._drawn

    def _draw_notice(self, other: int) -> tuple[int, TensorKey]:
        return other, TensorKey(self._draws[other][0], 0, ControlEdge.DRAW, False)

    def _without_known(self, signs: Iterable[tuple[int, TensorKey]], source: int) -> list[tuple[int, TensorKey]]:
        left = []
        for sign in signs:
            if not self.channel.arrived(*sign) and sign not in self._hellos:
                left.append(sign)
                continue
            if sign[1].edge == ControlEdge.HELLO:
                backwards, does = self._read(*sign, keep=True).backwards, "calls the split model again"
            else:
                backwards, does = self._notice(sign)[1], "goes on to optimizer.step()"
            # With as many backwards the sender has begun this one, so the gradient is on its way.
            if backwards < self.backwards:
                raise disagreement(
                    f"worker {source} of the group {does} after {backwards} backwards, worker {self.channel.me} is in "
                    f"its backward number {self.backwards}: {HINT}"
                )
        return left

    def _read(self, worker: int, key: TensorKey, keep: bool = False) -> ForwardHello:
        # A hello may have been read early, in a wait for a gradient.
        hello = self._hellos.pop((worker, key), None) or ForwardHello(*self.channel.receive(worker, key)[0].tolist())
        if keep:
            self._hellos[worker, key] = hello
        return hello

    def _notice(self, notice: tuple[int, TensorKey]) -> tuple[int, int]:
        self._stepped[notice[0]] = notice[1].forward + 1
        forwards, backwards = self.channel.receive(*notice)[0].tolist()
        return forwards, backwards

    @staticmethod
    def _hello(forward: int) -> TensorKey:
        return TensorKey(forward, 0, ControlEdge.HELLO, False)


WHAT = {
    "program": "holds another model, or other settings of the split, than",
    "steps": "has done another number of optimizer steps than",
    "training": "calls the model in another mode (model.train() or model.eval()) than",
    "grad": "calls the model with gradients switched on or off (torch.no_grad()) unlike",
    "modes": "has other modules in training mode than",
    "autocast": "calls the model with another torch.autocast than",
    "chance": "has another state of torch's random generator than",
}
REMEDY = {
    "chance": "call torch.manual_seed with the same number on all workers, and draw no random number on one alone"
}


def check(hellos: Collection[ForwardHello]) -> None:
    """Raise ConfigError with the first difference of a hello from worker 0's."""
    first = next(iter(hellos))
    for worker, hello in enumerate(hellos):
        for name, what in WHAT.items():
            mine, its = getattr(first, name), getattr(hello, name)
            if mine != its:
                counts = f" ({its} and {mine})" if name == "steps" else ""
                raise disagreement(f"worker {worker} of the group {what} worker 0{counts}: {REMEDY.get(name, HINT)}")


def disagreement(text: str) -> ConfigError:
    return ConfigError("split model", None, text)
