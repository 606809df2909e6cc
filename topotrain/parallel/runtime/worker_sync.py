"""At the beginning of a forward all workers of the group meet: who has how many samples, and do all do the same?

A worker that calls the model once more or once less than the others, or in another mode, would wait for ever for what
nobody sends. What each says of itself (`ForwardHello`) tells such a script apart from a slow one.
"""

import struct
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

import torch

from topotrain.config.field_checks import ConfigError
from topotrain.parallel.runtime.channel import HELLO, STEPPED, ActivationChannel, TensorKey

_DRAW = STEPPED - 4
"""`TensorKey.edge` of the word that a worker goes on to other batches; -3 to -5 are used in other files."""
_NOWHERE = (-1, -1)
HINT = "all workers of a group must call the model, and go backward, the same number of times and in the same order"


@dataclass(frozen=True, slots=True)
class ForwardHello:
    """What a worker says of itself as it begins a forward. All numbers are int64; `weight` is said bit by bit.

    steps, backwards: optimizer steps and backwards that it has begun before.
    modes: a digest of which modules train; chance: of torch's generator, 0 where no mask will be drawn.
    program: of the cut graph, the number of micro-batches and the schedule.
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
        """What the worker's gradient counts."""
        return float(struct.unpack("<d", struct.pack("<q", self.weight_bits))[0])

    @staticmethod
    def bits(weight: float) -> int:
        """`weight_bits` of a weight."""
        return int(struct.unpack("<q", struct.pack("<d", weight))[0])


class WorkerSync:
    """One worker's count of forwards, backwards and steps, and what it knows of the others'.

    All runners of a process that share a passage share the meeting.
    """

    def __init__(self, passage: ActivationChannel) -> None:
        self.passage = passage
        self.forwards = self.backwards = self.steps = 0
        self._others = [worker for worker in range(passage.size) if worker != passage.me]
        self._heard: dict[tuple[int, TensorKey], ForwardHello] = {}
        self._stepped = dict.fromkeys(self._others, 0)  # steps of each one whose word has been read
        self._drawn = _NOWHERE
        self._asked = 0
        self._draws = dict.fromkeys(self._others, (0, _NOWHERE))  # words of each one that have been read, and the last

    def begun(self) -> None:
        """A backward begins here."""
        self.backwards += 1

    def stepped(self) -> None:
        """The script calls optimizer.step(): tell the others, one of whom may wait for this worker in a forward."""
        word = torch.tensor([self.forwards, self.backwards])
        for other in self._others:
            self.passage.send(other, TensorKey(self.steps, 0, STEPPED, False), word)
        self.steps += 1

    def meet(self, mine: ForwardHello) -> tuple[ForwardHello, ...]:
        """Say hello to all and hear all, by worker.

        Raises:
            ConfigError: the workers' scripts do not do the same.
        """
        key = self._hello(self.forwards)
        self.forwards += 1
        for other in self._others:
            self.passage.send(other, key, torch.tensor(astuple(mine)))
        hellos = []
        for worker in range(self.passage.size):
            hello = mine if worker == self.passage.me else self._hear(worker, key)
            hellos.append(hello)
        check(hellos)
        for other in self._others:
            for step in range(self._stepped[other], self.steps):
                self.passage.take(other, TensorKey(step, 0, STEPPED, False))
            self._stepped[other] = self.steps
        return tuple(hellos)

    def _hear(self, worker: int, key: TensorKey) -> ForwardHello:
        word = (worker, TensorKey(self.steps, 0, STEPPED, False))
        while (worker, key) not in self._heard and not self.passage.here(worker, key):
            stepped, draws = self.passage.here(*word), self._draws_on(worker)
            if self.passage.here(worker, key):  # asked again: it was sent before what the worker does next
                break
            if stepped:
                called = self._word(word)[0]
                raise disagreement(
                    f"worker {worker} of the group called the split model {called} times before its optimizer.step() "
                    f"number {self.steps + 1}, worker {self.passage.me} has called it {self.forwards} times: {HINT}"
                )
            if draws:
                raise disagreement(
                    f"worker {worker} of the group goes on to other batches, worker {self.passage.me} calls the split "
                    f"model: {HINT}"
                )
            self.passage.wait_any([(worker, key), word, self._draw_word(worker)])
        return self._read(worker, key)

    def wait(self, source: int, key: TensorKey) -> None:
        """Return when a tensor is here.

        Raises:
            ConfigError: it is a gradient, and its sender has gone on without backward.
        """
        passage = self.passage
        if passage.here(source, key):
            return
        hello, word = (source, self._hello(self.forwards)), (source, TensorKey(self.steps, 0, STEPPED, False))
        signs: Collection[tuple[int, TensorKey]] = (hello, word) if key.backward else ()
        while not passage.here(source, key):
            signs = self._without_known(signs, source)
            passage.wait_any([(source, key), *signs])

    def take(self, source: int, key: TensorKey, what: str) -> torch.Tensor:
        """What a worker sends that is of no forward: all workers of the group are in `what`, or come to it.

        Raises:
            ConfigError: it has gone on without.
        """
        signs = (source, self._hello(self.forwards)), (source, TensorKey(self.steps, 0, STEPPED, False))
        while True:
            went = signs[0] in self._heard or any(self.passage.here(*sign) for sign in signs) or self._draws_on(source)
            if self.passage.here(source, key):
                return self.passage.take(source, key)[0]
            if went:
                raise disagreement(
                    f"worker {source} of the group goes on with the training, worker {self.passage.me} is in {what}: "
                    f"all workers of a group must call it, at the same point of the script"
                )
            self.passage.wait_any([(source, key), *signs, self._draw_word(source)])

    def draw(self, epoch: int, chunk: int) -> None:
        """This worker goes to this part of the order of the batches, which worker 0 makes; tell worker 0.

        A worker that is there would wait for ever for a worker 0 that waits for it in something else.
        """
        if self.passage.me == 0:
            self._drawn = epoch, chunk
            for other in self._others:
                self._draws_on(other)  # so that no words pile up
        else:
            self.passage.send(0, TensorKey(self._asked, 0, _DRAW, False), torch.tensor([epoch, chunk]))
            self._asked += 1

    def _draws_on(self, other: int) -> bool:
        """Whether it waits for a part of the order that is to be made here, and is not made yet."""
        word = self._draw_word(other)
        while self.passage.here(*word):
            epoch, chunk = self.passage.take(*word)[0].tolist()
            self._draws[other] = word[1].forward + 1, (epoch, chunk)
            word = self._draw_word(other)
        return self.passage.me == 0 and self._draws[other][1] > self._drawn

    def _draw_word(self, other: int) -> tuple[int, TensorKey]:
        return other, TensorKey(self._draws[other][0], 0, _DRAW, False)

    def _without_known(self, signs: Iterable[tuple[int, TensorKey]], source: int) -> list[tuple[int, TensorKey]]:
        left = []
        for sign in signs:
            if not self.passage.here(*sign) and sign not in self._heard:
                left.append(sign)
                continue
            if sign[1].edge == HELLO:
                backwards, does = self._read(*sign, keep=True).backwards, "calls the split model again"
            else:
                backwards, does = self._word(sign)[1], "goes on to optimizer.step()"
            if backwards < self.backwards:
                raise disagreement(
                    f"worker {source} of the group {does} after {backwards} backwards, worker {self.passage.me} is in "
                    f"its backward number {self.backwards}: {HINT}"
                )
        return left

    def _read(self, worker: int, key: TensorKey, keep: bool = False) -> ForwardHello:
        hello = self._heard.pop((worker, key), None) or ForwardHello(*self.passage.take(worker, key)[0].tolist())
        if keep:
            self._heard[worker, key] = hello
        return hello

    def _word(self, word: tuple[int, TensorKey]) -> tuple[int, int]:
        self._stepped[word[0]] = word[1].forward + 1
        forwards, backwards = self.passage.take(*word)[0].tolist()
        return forwards, backwards

    @staticmethod
    def _hello(forward: int) -> TensorKey:
        return TensorKey(forward, 0, HELLO, False)


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
    """Raises ConfigError naming the first thing that one worker does otherwise than worker 0."""
    first = next(iter(hellos))
    for worker, hello in enumerate(hellos):
        for name, what in WHAT.items():
            mine, its = getattr(first, name), getattr(hello, name)
            if mine != its:
                told = f" ({its} and {mine})" if name == "steps" else ""
                raise disagreement(f"worker {worker} of the group {what} worker 0{told}: {REMEDY.get(name, HINT)}")


def disagreement(text: str) -> ConfigError:
    """The workers' scripts do not fit together."""
    return ConfigError("split model", None, text)
