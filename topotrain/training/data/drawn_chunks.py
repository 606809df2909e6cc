"""Batches that the first worker of a group draws from a sampler for all others."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from topotrain.config.topology import Address
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.component_state import State
from topotrain.core.server.gradients.gradient_source import StepError, ended_first
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest

# Chunks that a worker has yet to fetch, and numbers in them. These limits bound the memory that peers can take.
_MOST_CHUNKS, _MOST_DRAWN = 1 << 16, 1 << 23
_RECENT = 64
"""Epochs of which the last fetched chunk is remembered."""

Replies = list[tuple[Address, Message]]


def _numbers(put: DrawnBatches) -> int:
    return len(put.sizes) + len(put.indices)


def _nothing_of(key: tuple[int, int]) -> DrawnBatches:
    """Return the empty chunk that ends an epoch."""
    epoch, chunk = key
    return DrawnBatches(epoch, chunk, True, (), ())


@dataclass(slots=True)
class _Chunk:
    put: DrawnBatches | None = None
    fetched: set[Address] = field(default_factory=set)
    held: list[Address] = field(default_factory=list)
    packed: tuple["array[int]", "array[int]"] | None = None  # sizes and indices that no worker waits for

    def fill(self, put: DrawnBatches) -> None:
        """Store the chunk."""
        self.put, self.packed = put, None

    def pack(self) -> None:
        """Store the numbers in a fifth of the memory, for a worker that may ask once more."""
        if self.put is not None and self.packed is None:
            self.packed = array("q", self.put.sizes), array("q", self.put.indices)
            self.put = replace(self.put, sizes=(), indices=())

    @property
    def content(self) -> DrawnBatches | None:
        """The chunk as it was put. None: it is not here yet."""
        if self.put is None or self.packed is None:
            return self.put
        return replace(self.put, sizes=tuple(self.packed[0]), indices=tuple(self.packed[1]))


class DrawnChunks:
    """Batches that worker (0,0) drew from the script's sampler.

    They are for `askers` other workers. A chunk is kept until all of them have it.

    keeps: a worker may restart alone, in the epoch in which it last had a batch, and request that epoch again. The
        same holds for chunks that worker (0,0) asks to keep.
    """

    def __init__(self, askers: int, keeps: bool = False) -> None:
        self._askers, self._keeps = askers, keeps
        self._newest: dict[Address, int] = {}  # the last epoch that each asked for
        self._absent: set[Address] = set()  # those with a process that has not asked yet
        self._first: int | None = None  # the epoch that worker (0,0) drew first
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._drawn = 0  # numbers in all chunks that are kept
        self._kept = False  # worker (0,0) has asked to keep some
        self._ended: int | None = None  # the steps of worker (0,0), once its script has ended
        self._over: dict[int, int] = {}  # the last chunk of recent epochs that all workers have fetched

    def put(self, put: DrawnBatches) -> Replies:
        """Store a chunk, and reply to the workers that wait for it.

        Raises ProtocolError if it differs from an earlier one, or too much is kept.
        """
        key = (put.epoch, put.chunk)
        chunk = self._chunk(key)
        # The same chunk again is no error: a transport may deliver it twice, or worker (0,0) has restarted.
        known = chunk.content
        if known not in (None, put):
            raise ProtocolError(f"chunk {put.chunk} of epoch {put.epoch} came again with other batches")
        if known is None:
            self._drawn += _numbers(put)
        # Then there are chunks of up to three epochs.
        if self._drawn > _MOST_DRAWN * (1 + 2 * (self._keeps or put.keep)):
            raise ProtocolError(f"{self._drawn} numbers were drawn that some worker has not fetched")
        self._kept = self._kept or put.keep
        if known is None:
            chunk.fill(put)
        return self.begin(put.epoch) + self._serve(key)

    def begin(self, epoch: int) -> Replies:
        """Worker (0,0) begins a pass. Of two at once, it may draw from the later first."""
        over: Replies = []
        # After a restart of its group, worker (0,0) first draws the epoch that it was in. Earlier ones are over, so a
        # request for them gets an empty chunk.
        if self._first is None:
            self._first = epoch
            for each in [each for each in self._chunks if each[0] < epoch]:
                over += [(worker, _nothing_of(each)) for worker in self._chunks.pop(each).held]
        return over

    def ask(self, sender: Address, ask: DrawRequest) -> Replies:
        """Reply with the chunk, at once or when it is there."""
        key = (ask.epoch, ask.chunk)
        if self._first is not None and ask.epoch < self._first:
            return [(sender, _nothing_of(key))]
        if ask.chunk <= self._over.get(ask.epoch, -1):
            return []  # delivered twice
        held = self._chunk(key).held
        self._absent.discard(sender)
        if sender not in held:
            held.append(sender)
        since = ask.epoch if ask.since < 0 else ask.since
        self._newest[sender] = max(since, self._newest.get(sender, 0))
        # An epoch that all workers have passed by more than one is not requested again.
        if (self._keeps or self._kept) and len(self._newest) == self._askers - len(self._absent):
            self._drop_before(min(self._newest.values()) - 1)
        # No correct worker requests an epoch that all have passed: its chunk has just been dropped.
        if key not in self._chunks:
            return [(sender, _nothing_of(key))]
        self._check_continues()
        return self._serve(key)

    def awaited(self) -> Mapping[Address, DrawRequest]:
        """The last request of each worker that waits for a chunk that is not here."""
        if not self._chunks:  # asked for at each commit
            return {}
        waiting = sorted(key for key, chunk in self._chunks.items() if chunk.held)
        return {worker: DrawRequest(*key, worker.index) for key in waiting for worker in self._chunks[key].held}

    def end(self, steps: int) -> None:
        """The script of worker (0,0) has ended, and draws no more.

        Raises:
            StepError: another worker waits for a draw.
        """
        self._ended = steps
        self._check_continues()

    def _check_continues(self) -> None:
        if self._ended is not None and any(chunk.held and chunk.put is None for chunk in self._chunks.values()):
            raise StepError(ended_first(0, self._ended))

    def forget(self, worker: Address) -> None:
        """Wait for a worker no more, until its new process asks."""
        self._newest.pop(worker, None)
        self._absent.add(worker)
        for chunk in self._chunks.values():
            if worker in chunk.held:
                chunk.held.remove(worker)

    def _drop_before(self, epoch: int) -> None:
        """Drop the chunks of all epochs before this one, which no worker requests again."""
        for key in [key for key in self._chunks if key[0] < epoch]:
            put = self._chunks.pop(key).content
            self._drawn -= 0 if put is None else _numbers(put)

    def _chunk(self, key: tuple[int, int]) -> _Chunk:
        if key not in self._chunks and len(self._chunks) >= _MOST_CHUNKS:
            raise ProtocolError(f"chunk {key[1]} of epoch {key[0]}, while {len(self._chunks)} others wait")
        return self._chunks.setdefault(key, _Chunk())

    def __len__(self) -> int:
        return len(self._chunks)

    def _serve(self, key: tuple[int, int]) -> Replies:
        chunk = self._chunks[key]
        put = chunk.content
        if put is None:
            return []
        replies: Replies = [(worker, put) for worker in chunk.held]
        chunk.fetched.update(chunk.held)
        chunk.held.clear()
        if len(chunk.fetched) >= self._askers and not self._keeps:
            if put.keep:
                chunk.pack()
            else:
                self._drawn -= _numbers(put)
                del self._chunks[key]
                self._over = {epoch: last for epoch, last in self._over.items() if epoch > key[0] - _RECENT}
                self._over[key[0]] = key[1]
        return replies

    def state_dict(self) -> State:
        return {
            "keeps": self._keeps,
            "newest": self._newest,
            "absent": self._absent,
            "first": self._first,
            "chunks": {key: (chunk.content, chunk.fetched, chunk.held) for key, chunk in self._chunks.items()},
            "drawn": self._drawn,
            "kept": self._kept,
            "ended": self._ended,
            "over": self._over,
        }

    def load_state_dict(self, state: State) -> None:
        self._keeps, self._newest, self._first = state["keeps"], dict(state["newest"]), state["first"]
        self._chunks = {
            key: _Chunk(put, set(fetched), list(held)) for key, (put, fetched, held) in state["chunks"].items()
        }
        self._absent = set(state["absent"])
        self._drawn, self._kept, self._ended = state["drawn"], state["kept"], state["ended"]
        self._over = dict(state["over"])
