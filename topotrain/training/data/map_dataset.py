"""One pass over a loader with a sampler: this worker's share of each batch.

The script's loader is copied with all its settings, and only its sampler is replaced. A loader with processes of its
own runs ahead of the script, so some batches are drawn and not read yet.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import count, islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from topotrain.core.server.consistency import STATIC as STATIC
from topotrain.training.data.batch_ranges import Runs, left
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.data_fingerprint import content, dice, first_indices
from topotrain.training.data.sampling import (
    AS_IS,
    Chunk,
    cut,
    digest,
    draw_again,
    draw_epoch,
    draw_seed,
    draws_at_once,
    generators_of,
    in_runs,
    index_sampler,
    is_list,
    leading,
    length_of,
    received,
    repeats,
    share_of,
    share_of_loaded,
)
from topotrain.training.rng_state import Stand, put_back, stand
from topotrain.training.worker_stats import BatchAccounting

# --- the worker's part of the data -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataPlan:
    """This worker's part of the data.

    Args:
        group, groups, index, workers: worker `index` of the `workers` in group `group` of `groups`.
        shares: claims of the group's workers on a batch, in any unit. Empty: equal.
        mode: see `distributed_loader`. "broadcast" needs groups = 1.
        per_worker_batch: the loader's batch is a worker's, not the group's.
        seed: the job's.
        min_share: samples below which a share goes to fewer workers; 2 for models with BatchNorm.
        is_main: worker (0,0).
        own_streams: with backup workers (in rounds only), each worker's batches count by themselves, and a batch that
            came too late is given again.
        repeats: the group may go on without a dead worker, and divide its last batch once more.
        members: the workers of the group among which a batch is divided. Empty: all.
        sums: the gradients of the group's workers are added, and not averaged.
        whole: a batch is not divided: each worker reads all of it, and its size has no part in the step's weight.
    """

    group: int
    groups: int
    index: int
    workers: int
    shares: tuple[float, ...]
    mode: Literal["broadcast", "static", "lease"]
    per_worker_batch: bool
    seed: int
    min_share: int
    is_main: bool
    own_streams: bool = False
    repeats: bool = False
    members: tuple[int, ...] = ()
    sums: bool = False
    whole: bool = False

    @property
    def alone(self) -> bool:
        """Whether one worker is the whole job: everything must be as in the plain script."""
        return self.groups == self.workers == 1 and self.mode == "broadcast"

    def stream(self, epoch: int) -> int:
        """The data stream of this worker's group, or its own, where no leases are."""
        number = self.group * self.workers + self.index if self.own_streams else self.group
        return (epoch << 32) | STATIC | number

    @property
    def in_rounds(self) -> bool:
        """Whether a unit of the epoch is one batch for each worker, and not one to divide."""
        return self.per_worker_batch and self.workers > 1

    def among(self, members: tuple[int, ...]) -> "DataPlan":
        """The plan with these members."""
        found = () if len(members) == self.workers else members
        return self if found == self.members else replace(self, members=found)

    def bounds(self, samples: int) -> tuple[int, int]:
        """[lo, hi) of this worker in a batch of `samples`."""
        if self.whole:
            return 0, samples
        there = self.members or range(self.workers)
        shares = tuple(self.shares[index] for index in there) if self.shares else ()
        return cut(samples, len(there), shares, self.min_share)[there.index(self.index)]


class BatchPosition(NamedTuple):
    """The position of a batch.

    stream, seq: its stream, and its number there. ordinal: number of its lease among those of the group. number: its
    number in the epoch. last: it ends the lease. made: the number of steps of an earlier process with this batch, which
    count already. before: with leases, the batches of the epoch before this lease that are known to be done.
    """

    stream: int
    seq: int
    ordinal: int
    number: int
    last: bool
    made: int = 0
    before: int = 0


LoadedBatch = tuple[BatchPosition, int, Any]
"""The position of a batch, the number of its samples that count, and its data."""


class _After(Enum):
    """The work that remains when a batch is loaded."""

    NOTHING = 0
    COUNT = 1  # the key named a whole batch: count its samples
    SLICE = 2  # the same, and only a part of it is this worker's


class _Mark(NamedTuple):
    place: BatchPosition
    samples: int
    after: _After


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The beginning of a pass that an earlier process had begun.

    Args:
        done: batches that an earlier start of the job has applied, by their numbers in the epoch as it was drawn then.
            The batches that are left count from 0 again.
        returned: the servers know how many of the batches that are left are applied. An earlier process read them.
        drawn: all workers draw the epoch again, from the generators of worker (0,0) or from the seed. Empty: the plan's
            own way, with the generators as they are.
        dice: state of the generators of worker (0,0), for `drawn` = "dice".
        fresh: the loader's iterator was a new one then.
        again: batches that are left out are loaded all the same, for the generators of the loader's processes.
        restored: the generators of this process are restored once the pass has begun.
        over: the group has read the pass to its end, so it is empty.
        alone: this process has taken the place of one worker, and the group of that worker went on.
        members: as in DataPlan.
        unfinished: an earlier process may have died between two steps with its last batch, which is given again.
    """

    done: Runs = ()
    returned: bool = False
    drawn: Literal["", "dice", "seed"] = ""
    dice: Stand | None = None
    fresh: bool = True
    again: bool = False
    restored: bool = False
    over: bool = False
    alone: bool = False
    members: tuple[int, ...] = ()
    unfinished: bool = False


PLAIN = ResumePoint()


@dataclass(frozen=True, slots=True)
class EpochStart:
    """A pass that is about to begin.

    Args:
        epoch: its number.
        drawn: from the generators of worker (0,0)'s script, or from the job's seed.
        fresh: with a new iterator.
        generators: the loader's own.
        data: settings of the loader, by name, with which its batches are counted.
    """

    epoch: int
    drawn: Literal["dice", "seed"]
    fresh: bool
    generators: tuple[torch.Generator, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


class ResumeRecorder(ABC):
    """Records the position of a worker's script, and knows that of an earlier process.

    All methods are called on the script's thread.
    """

    @property
    @abstractmethod
    def first(self) -> int:
        """Number of the first pass that is not over. Earlier passes are empty."""

    @abstractmethod
    def opening(self, sight: EpochStart) -> tuple[ResumePoint, bool]:
        """How a pass begins.

        Also returns whether an earlier process began it with an iterator that it had already.
        """

    @abstractmethod
    def opened(self) -> None:
        """The pass has reached the position of the earlier process; no batch was given."""

    @abstractmethod
    def asked(self) -> None:
        """The script asks for a batch."""

    @abstractmethod
    def given(self) -> None:
        """The script gets the batch that it asked for."""

    @abstractmethod
    def repeats(self) -> None:
        """The script gets its last batch again: undo what schedulers have done since."""

    @abstractmethod
    def ended(self) -> None:
        """There is no batch left: the pass is over."""

    @abstractmethod
    def interleaved(self) -> None:
        """The script reads two loaders at once: a fresh process would not find its place."""

    @abstractmethod
    def accumulates(self) -> None:
        """A step has several batches of a pass that has gone on in its middle."""

    @abstractmethod
    def batches_left(self, epoch: int, loader: Any = None) -> int:
        """Batches that this worker's group has not yet had applied, of those of a pass.

        loader: the `ShardedLoader` of the pass. None: the script has one.
        """


class EpochReader(ABC):
    """One pass over a loader: the batches of this worker."""

    _plan: DataPlan

    @property
    def whole(self) -> bool:
        return self._plan.whole

    def counted(self, samples: int) -> int:
        """Of the samples of a batch, those that this worker counts."""
        return 0 if self.whole and self._plan.index else samples

    @abstractmethod
    def catch_up(self, recorder: ResumeRecorder) -> None:
        """Go to the batch that an earlier process had reached.

        `ResumeRecorder.opened` is called when all random numbers up to there are drawn. That may be at the first batch.
        """

    @abstractmethod
    def next(self) -> LoadedBatch:
        """The next batch. Raises StopIteration."""

    def divide_again(self, members: tuple[int, ...], repeat: bool) -> None:
        """Divide later batches among these workers, and with `repeat` the last one, too."""
        raise NotImplementedError

    @abstractmethod
    def read_whole(self) -> None:
        """Let each worker read all of each batch, if it still can. No batch was read."""

    @abstractmethod
    def send_draw(self) -> None:
        """Send what was drawn at once for the whole epoch to the other workers."""

    @abstractmethod
    def leave(self) -> None:
        """Give back what was drawn and not read."""

    @abstractmethod
    def end(self) -> None:
        """Release the loader's iterator, so that its processes end at once."""


# --- the copied loader -------------------------------------------------------------------------------------------


def _nothing() -> Iterator[Any]:
    return iter(())


class _Indices:
    """The copied loader's sampler, which records the position of each batch."""

    def __init__(self) -> None:
        self._open: Callable[[], Iterator[tuple[_Mark, Any]]] = _nothing
        self.marks: deque[_Mark] = deque()

    def open(self, draw: Callable[[], Iterator[tuple[_Mark, Any]]]) -> None:
        """Give the loader what this draws, when it begins to iterate."""
        self._open = draw

    def close(self) -> None:
        """Give the loader nothing more."""
        self._open = _nothing

    def __iter__(self) -> Iterator[Any]:
        # A new queue: marks of an iterator that was left are of batches that are never loaded.
        self.marks = deque()
        # It opens now, because plain samplers may draw in iter() already.
        return self._noted(self._open(), self.marks)

    @staticmethod
    def _noted(drawn: Iterator[tuple[_Mark, Any]], marks: deque[_Mark]) -> Iterator[Any]:
        for mark, index in drawn:
            marks.append(mark)
            yield index


class _Ahead(Iterator[Any]):
    """A sampler's draw without its first items, which `skip` or `next` draw."""

    def __init__(self, drawn: Iterator[Any], skipped: int, recorder: ResumeRecorder | None) -> None:
        self._drawn, self._skipped, self._recorder = drawn, skipped, recorder
        self._begun = False

    def catch_up(self, recorder: ResumeRecorder) -> None:
        """Draw the first items now, and report it to the recorder."""
        self._recorder = recorder
        self.skip()

    def skip(self) -> None:
        if not self._begun:
            self._begun = True
            for _ in islice(self._drawn, self._skipped):
                pass
            if self._recorder is not None:
                self._recorder.opened()

    def __next__(self) -> Any:
        self.skip()
        return next(self._drawn)


@dataclass(slots=True)
class _CollateShare:
    """Collates this worker's part of a stream's batch, and counts its samples.

    Returns the number, the batch, and the fingerprint of the whole batch, if it is the first of a process.
    """

    collate: Callable[[Any], Any]
    plan: DataPlan
    first: bool = True

    def __call__(self, items: list[Any]) -> tuple[int, Any, int]:
        found, self.first = content(items) if self.first and not self.plan.alone else 0, False
        if self.plan.workers == 1 or self.plan.in_rounds:
            return len(items), self.collate(items), found
        share, samples = share_of(items, self.plan.bounds(len(items)), self.plan.min_share)
        return samples, self.collate(share), found


class LoaderCopy:
    """A copy of the script's loader with another sampler."""

    def __init__(self, loader: DataLoader[Any], plan: DataPlan) -> None:
        self.original, self.plan = loader, plan
        self.loader = copy(loader)
        self.indices: _Indices | None = None
        self._share: _CollateShare | None = None
        self._set(AS_IS, False)
        # `copy` has copied the iterator of persistent processes, which belongs to the script's loader.
        self._set("_iterator", None)
        if not isinstance(loader.dataset, IterableDataset):
            self.indices = _Indices()
            self.read(self.indices)
        elif loader.batch_sampler is not None and type(loader).__iter__ is DataLoader.__iter__:
            # A subclass that looks at its own batches must see them as its author knows them: sliced after loading.
            self._share = _CollateShare(loader.collate_fn, plan)
            self._set("collate_fn", self._share)

    def divide(self, plan: DataPlan) -> None:
        """Divide later batches by this plan; not for loaders with processes."""
        self.plan = plan
        if self._share is not None:
            self._share.plan = plan

    @property
    def collates(self) -> bool:
        """Whether batches are divided when they are collated."""
        return self._share is not None

    def _set(self, name: str, value: Any) -> None:
        # DataLoader refuses ordinary assignment to most attributes.
        object.__setattr__(self.loader, name, value)

    def read(self, indices: Any) -> None:
        """Read these indices, instead of those of `indices`."""
        self._set("sampler" if self.original.batch_sampler is None else "batch_sampler", indices)

    def seed(self, seed: int) -> None:
        """Let all workers' copies give the same seeds to their processes."""
        self._set("generator", torch.Generator().manual_seed(seed))

    def seed_from(self, state: Stand) -> None:
        """Give the processes the seeds of a worker with generators in this state."""
        generator = torch.Generator()
        # "own 0" is the loader's generator. A loader without one draws from the global generator.
        generator.set_state(state.get("own 0", state["torch"]) if self.original.generator else state["torch"])
        self._set("generator", generator)

    @property
    def fresh(self) -> bool:
        """Whether the next pass has a new iterator; processes that persist keep theirs."""
        return self.loader._iterator is None

    def draw_seed(self) -> None:
        """Move the script's generator as far as the plain loader's `iter()` does."""
        # An iterator that persists draws its seeds once, when it is made.
        if self.fresh:
            draw_seed(self.original)


# --- leases ------------------------------------------------------------------------------------------------------


class LeaseIterator:
    """The leases of this group in one epoch, one after the other.

    Args:
        client: asks for them.
        epoch, total, digest: as in LeaseRequest.
        skips: leave out the batches that the group has applied without this process.
        accounting: knows which batches may not count yet. None: those of earlier epochs all count.
    """

    def __init__(
        self,
        client: DataClient,
        epoch: int,
        total: int,
        digest: int,
        skips: bool = False,
        accounting: BatchAccounting | None = None,
    ) -> None:
        self._client, self._epoch, self._digest, self._accounting = client, epoch, digest, accounting
        self.total = total
        self._skips = skips
        self.passed = 0  # leases with a last batch that the script has read
        self.asked = 0
        self.stream = self.first = self.at = self.last = 0
        self._own = self._before = 0  # batches in earlier leases of the group, and with those of others that are done

    def ask(self, wait: bool) -> bool:
        """Get the next lease. False: there is none now, or with `wait`, no more.

        With `wait`, all leased batches must have been read.
        """
        while self._ask(wait):
            if not self._skips:
                return True
            self.at = min(self.last, self.first + self._client.applied(self.stream))
            # The group reads its leases in order, so after the first one with a rest none has to be asked for.
            self._skips = self.at == self.last
            self.passed = self.asked - (not self._skips)
            if not self._skips:
                return True
        return False

    def _ask(self, wait: bool) -> bool:
        # Also if the last batch failed to load and the script went on: it will never be read.
        if wait:
            self.passed = self.asked
        uncounted = self._epoch if self._accounting is None else self._accounting.first_uncounted(self._epoch)
        lease, first, last = self._client.lease(
            self._epoch, self.asked, self.total, self._digest, self.passed, wait, uncounted
        )
        if last <= first:
            return False
        self._own += self.last - self.first
        self._before = self._own + self._client.done_by_others
        self.stream, self.first, self.at, self.last = (self._epoch << 32) | lease, first, first, last
        self.asked += 1
        return True

    def take(self) -> BatchPosition:
        """The next batch of the lease."""
        seq, ends = self.at - self.first, self.at + 1 == self.last
        place = BatchPosition(self.stream, seq, self.asked - 1, self.at, ends, before=self._before)
        self.at += 1
        return place

    def read(self, place: BatchPosition) -> None:
        """The script is given this batch, so all leases before it are read."""
        # And its own lease, if this is the lease's last batch; a bool is 0 or 1.
        self.passed = place.ordinal + place.last

    def end_at(self, total: int) -> None:
        """End the lease, because the stream ends after so many batches."""
        self.total = total
        self.drop_rest()

    def drop_rest(self) -> None:
        """Take nothing more of this lease."""
        self.at = self.last

    def leave(self, unread: BatchPosition | None) -> None:
        """Give back everything from `unread` (None: from the next batch) on."""
        # By what was read: a loader with processes has drawn further.
        if self.asked:
            ordinal, number = (unread.ordinal, unread.number) if unread else (self.asked - 1, self.at)
            self._client.free(self._epoch, ordinal, number)


# --- the pass ----------------------------------------------------------------------------------------------------


def progress_of(client: DataClient, opening: ResumePoint, stream: int) -> tuple[int, int, int]:
    """Where a pass goes on in a stream of this worker's group that is no lease.

    Returns:
        The number of applied batches, the first batch that is given, and the number of steps that are made already with
        those that are given again.
    """
    if not (opening.returned or opening.alone):
        return 0, 0, 0
    found = client.progress(stream)
    again = opening.unfinished and found.made > 0
    return found.count, found.first if again else found.count, found.made if again else 0


class MapEpoch(EpochReader):
    """One pass over a loader with a sampler."""

    def __init__(
        self,
        inner: LoaderCopy,
        indices: _Indices,
        plan: DataPlan,
        client: DataClient,
        epoch: int,
        opening: ResumePoint = PLAIN,
        accounting: BatchAccounting | None = None,
        number: int | None = None,
        several: bool = False,
    ) -> None:
        """`accounting`: as for `LeaseIterator`.

        number: of the loader, if workers compare its first indices. several: the script has several loaders.
        """
        self._number = number
        self._original, self._indices = inner.original, indices
        self._plan, self._client, self._epoch = plan.among(opening.members), client, epoch
        self._opening = opening
        # Otherwise every worker makes the list of the epoch, and leaves out of it what is applied.
        handed_out = plan.mode == "broadcast" and not opening.drawn
        # Only where the applied batches are the first ones of the epoch, as in a group that has read it in order.
        self._again = (
            handed_out and opening.again and inner.loader.num_workers > 0 and [f for f, _ in opening.done] == [0]
        )
        # With backup workers each worker may have come to another batch. A group that has gone on loads nothing again.
        if plan.own_streams or opening.alone:
            self._again = False
        self._pending: deque[tuple[BatchPosition, Any]] = deque()  # drawn for the loader, and not read
        self._returned: deque[tuple[BatchPosition, Any]] = deque()  # to be drawn again
        self._last: tuple[BatchPosition, Any] | None = None  # read last
        self._flow: Iterator[tuple[BatchPosition, Any]] | None = None
        self._unsent: list[Chunk] = []  # the draw of the whole epoch, until it is sent
        self._ahead: _Ahead | None = None
        self._recorder: ResumeRecorder | None = None
        self._leases: LeaseIterator | None = None
        places: Callable[[], Iterator[tuple[BatchPosition, Any]]] = _nothing
        if opening.over:
            pass
        elif handed_out:
            places = self._broadcast
        else:
            drawn = list(self._listed(self._drawn()))
            self._compare(digest(drawn[:1]), 0)
            batches = list(left(drawn, opening.done))
            # All of it: leases name batches by their number in this list.
            units = list(self._units(batches))
            places = partial(self._placed, units[plan.group :: plan.groups], 0)
            if plan.mode == "lease":
                self._leases = LeaseIterator(client, epoch, len(units), digest(batches), opening.alone, accounting)
                places = partial(self._leased, self._leases, units)
        # A new iterator of the loader calls this again, and goes on where the leases have come to.
        self._places = places
        keeps = plan.repeats or (several and inner.loader.num_workers > 0)
        indices.open(lambda: map(self._own, self._kept() if keeps else places()))
        self._reopen: Callable[[], Iterator[Any]] = lambda: iter(inner.loader)
        self._batches = self._reopen()

    def catch_up(self, recorder: ResumeRecorder) -> None:
        if self._again:
            # The processes of the loader draw random numbers for each batch, so these are loaded and dropped.
            for _ in range(self._units_done()):
                self._load()
        elif (
            self._opening.restored
            and self._plan.mode == "broadcast"
            and not (self._opening.drawn or self._opening.over)
        ):
            # A subclass of DataLoader may make its iterator at the first batch only. Then `_broadcast` passes the
            # recorder.
            self._recorder = recorder
            if self._ahead is not None:
                self._ahead.catch_up(recorder)
            return
        recorder.opened()

    def next(self) -> LoadedBatch:
        data, mark = self._load()
        if self._leases is not None:
            self._leases.read(mark.place)
        if mark.after is _After.SLICE:
            samples = length_of(data)
            data, samples = share_of_loaded(data, samples, self._plan.bounds(samples), self._plan.min_share)
        else:
            samples = mark.samples if mark.after is _After.NOTHING else leading(data) or 1
        return mark.place, samples, data

    def divide_again(self, members: tuple[int, ...], repeat: bool) -> None:
        self._plan = self._plan.among(members)
        # Batches that processes of the loader have loaded ahead are divided among the former members.
        self._load_again(self._last if repeat else None)

    def read_whole(self) -> None:
        self._plan = replace(self._plan, whole=True)
        if self._pending:
            self._load_again(None)

    def _load_again(self, last: tuple[BatchPosition, Any] | None) -> None:
        """Load again the last batch, if it is given, and all that was drawn and not read."""
        self._returned.extendleft(reversed(self._pending))
        self._pending.clear()
        if last is not None:
            self._returned.appendleft(last)
        # A new iterator draws a seed, which the script's generators must not notice.
        generators = generators_of(self._original)
        before = stand(generators)
        self._batches = self._reopen()
        put_back(before, generators)

    def _kept(self) -> Iterator[tuple[BatchPosition, Any]]:
        """The items to be drawn, which are kept until they are read."""
        # Now, and not with the first batch: plain samplers may draw when they are opened. A lease iterator ends where
        # the queue is empty, and is opened again.
        if self._flow is None or self._leases is not None:
            self._flow = self._places()
        return self._keep(self._flow)

    def _keep(self, flow: Iterator[tuple[BatchPosition, Any]]) -> Iterator[tuple[BatchPosition, Any]]:
        while True:
            item = self._returned.popleft() if self._returned else next(flow, None)
            if item is None:
                return
            self._pending.append(item)
            yield item

    def _load(self) -> tuple[Any, _Mark]:
        while True:
            try:
                data = next(self._batches)
                break
            except StopIteration:
                # The sampler stopped because the queue was empty. All batches are read now, so this may wait for those
                # that other groups give back.
                if self._leases is None or not self._leases.ask(wait=True):
                    raise
                self._batches = self._reopen()
            except Exception:
                # The loader skips the batch that failed.
                if self._indices.marks:
                    self._take_mark()
                raise
        if not self._indices.marks:
            raise RuntimeError(f"{type(self._original).__name__} gave more batches than its sampler")
        return data, self._take_mark()

    def _take_mark(self) -> _Mark:
        if self._pending:
            self._last = self._pending.popleft()
        return self._indices.marks.popleft()

    def send_draw(self) -> None:
        unsent, self._unsent = self._unsent, []
        for number, chunk in enumerate(unsent):
            self._client.put_draw(self._epoch, number, chunk, self._plan.repeats)

    def leave(self) -> None:
        self.send_draw()
        if self._leases is not None:
            self._leases.leave(self._indices.marks[0].place if self._indices.marks else None)
        self.end()

    def end(self) -> None:
        # The last reference to the iterator.
        self._batches = _nothing()
        self._reopen = _nothing
        self._indices.close()

    def _listed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches as lists, whatever the sampler yields; a tuple may be a key."""
        if self._plan.alone or self._original.batch_sampler is None:
            return iter(batches)
        return (batch if is_list(batch) else list(batch) for batch in batches)

    def _units(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The units that are divided: batches, keys, or one batch for each worker."""
        if not self._plan.in_rounds:
            return iter(batches)
        flow = iter(batches)
        return iter(lambda: list(islice(flow, self._plan.workers)), [])

    def _broadcast(self) -> Iterator[tuple[BatchPosition, Any]]:
        plan, loader = self._plan, self._original
        if plan.workers == 1:
            batches = iter(index_sampler(loader))
        elif plan.is_main:
            drawn = self._listed(iter(index_sampler(loader)))
            # With backup workers the others do not wait for a slow worker (0,0), so it draws the epoch at once.
            if plan.own_streams:
                runs = list(in_runs(drawn, True))
                self._unsent = [chunk for _, chunks in runs for chunk in chunks]
                batches = iter([batch for run, _ in runs for batch in run])
            else:
                batches = self._announced(in_runs(drawn, draws_at_once(loader)))
        else:
            batches = self._received()
        # The batches that `catch_up` loads and drops have negative numbers.
        if self._again:
            return self._placed(self._units(batches), -self._units_done())
        done = self._opening.done
        # The applied batches at the start are skipped before the generators are restored, later ones as they come.
        first = done[0][1] if done and done[0][0] == 0 else 0
        self._ahead = _Ahead(iter(batches), first, self._recorder)
        rest = tuple((a - first, b - first) for a, b in done if a)
        return self._placed(self._units(left(self._ahead, rest) if rest else self._ahead), 0)

    def _received(self) -> Iterator[Any]:
        """The batches that worker (0,0) has drawn."""
        # Now, when worker (0,0) draws, too, and not when the pass is opened.
        if self._number is not None:
            self._compare(*first_indices(self._original))
        yield from received(self._client.get_draw(self._epoch, number) for number in count())

    def _announced(self, runs: Iterator[tuple[list[Any], list[Chunk]]]) -> Iterator[Any]:
        """The batches of worker (0,0), each sent to the others before it is used."""
        number, state = 0, 0 if self._number is None else dice()
        for run, chunks in runs:
            if not number:
                self._compare(digest(run[:1]), state)
            # A new process of this worker must be able to draw the same again, so its state is saved before the first
            # chunk is sent.
            if self._plan.repeats and not number:
                self._unsent = chunks
            else:
                for at, chunk in enumerate(chunks, number):
                    self._client.put_draw(self._epoch, at, chunk, self._plan.repeats)
            number += len(chunks)
            yield from run

    def _compare(self, indices: int, drawn_from: int) -> None:
        """Tell the other workers the first batch of the epoch, as `PassBegun` has it."""
        if self._number is not None:
            self._client.begin_pass(self._epoch, self._number, indices=indices, dice=drawn_from)

    def _placed(self, units: Iterable[Any], first: int) -> Iterator[tuple[BatchPosition, Any]]:
        """This group's units, numbered from `first` on, without those that are applied."""
        plan = self._plan
        stream = plan.stream(self._epoch)
        applied, made_from, made = progress_of(self._client, self._opening, stream)
        if plan.own_streams:
            # The last round of an epoch may have fewer batches than workers.
            units = (unit for unit in units if plan.index < len(unit))
        numbered = islice(enumerate(units, first), made_from, None)
        return (
            (BatchPosition(stream, seq, 0, seq, False, made if seq < first + applied else 0), unit)
            for seq, unit in numbered
        )

    def _units_done(self) -> int:
        """The number of units that a synchronous group, which reads in order, has read."""
        batches = max((last for _, last in self._opening.done), default=0)
        return -(-batches // self._plan.workers) if self._plan.in_rounds else batches

    def _drawn(self) -> list[Any]:
        """The epoch as all workers draw it."""
        if self._opening.drawn == "dice" and self._opening.dice is not None:
            return draw_again(self._original, self._opening.dice, self._opening.fresh)
        return draw_epoch(self._original, self._plan.seed, self._epoch)

    @staticmethod
    def _leased(leases: LeaseIterator, units: list[Any]) -> Iterator[tuple[BatchPosition, Any]]:
        # A loader with processes of its own runs ahead: waiting here for batches that only the script can finish
        # would be for ever, so an empty queue ends the sampler.
        while leases.at < leases.last or leases.ask(wait=False):
            place = leases.take()
            yield place, units[place.number]

    def _own(self, drawn: tuple[BatchPosition, Any]) -> tuple[_Mark, Any]:
        place, unit = drawn
        plan, auto = self._plan, self._original.batch_sampler is not None
        if plan.in_rounds and plan.members:
            # The batches of the workers that are gone are divided, too.
            whole = [index for batch in unit for index in batch]
            share, samples = share_of(whole, plan.bounds(len(whole)), plan.min_share)
            return _Mark(place, samples, _After.NOTHING), share
        if plan.in_rounds and plan.index >= len(unit):
            # A batch at weight 0: the worker's collectives and its BatchNorm must take part in the step.
            spare = unit[0]
            if is_list(spare):
                spare = [spare[i] for i in repeats(len(spare), plan.min_share)]
            return _Mark(place, 0, _After.NOTHING), spare
        if plan.in_rounds:
            unit = unit[plan.index]
        elif plan.workers > 1:
            if not is_list(unit):
                return _Mark(place, 0, _After.SLICE), unit
            share, samples = share_of(unit, plan.bounds(len(unit)), plan.min_share)
            return _Mark(place, samples, _After.NOTHING), share
        if is_list(unit) or (auto and hasattr(unit, "__len__")):
            return _Mark(place, len(unit), _After.NOTHING), unit
        return _Mark(place, 0, _After.COUNT), unit
