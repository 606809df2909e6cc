"""The DataLoader that `prepare` returns: the script's batches, divided.

Over all workers every sample occurs once per epoch. The script's loader is copied with all its settings, and only its
sampler is replaced: by one with this worker's share of each batch of its group. An epoch is divided among groups in
one of three ways:

* "broadcast" (a synchronous job): worker (0,0) draws from the script's sampler as the plain loader would, and sends
  the draw to the others. With one worker in all this is the plain loader, bit for bit.
* "static": all draw the same list from (seed, epoch), and batch b is for group b mod groups.
* "lease": the same list, from which groups lease ranges, so that a slow group takes fewer. A pass ends when no group
  holds a batch that might be given back.

A stream (IterableDataset) cannot be drawn from: every worker reads all of it and keeps its part.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from topotrain.config.job import ConfigError
from topotrain.training.data.batch_ranges import Runs
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.data_fingerprint import knows_ranks, sample_of
from topotrain.training.data.iterable_dataset import IterableEpoch
from topotrain.training.data.job_progress import EpochShare, batches_in, own_done
from topotrain.training.data.loader_view import LoaderView
from topotrain.training.data.map_dataset import (
    PLAIN,
    STATIC,
    BatchPosition,
    DataPlan,
    EpochReader,
    EpochStart,
    LoadedBatch,
    LoaderCopy,
    MapEpoch,
    ResumePoint,
    ResumeRecorder,
)
from topotrain.training.data.sampling import epoch_seed, generators_of, index_sampler, samplers
from topotrain.training.worker_stats import BatchAccounting

__all__ = ["STATIC", "DataPlan", "ResumeRecorder", "ShardedLoader", "EpochStart"]


class BatchSource:
    """Gives the batches of a pass that were not given before.

    Args:
        feed: the pass.
    """

    def __init__(self, feed: EpochReader) -> None:
        self._feed = feed

    def __call__(self) -> LoadedBatch:
        """The next batch. Raises StopIteration at the end."""
        try:
            return self._feed.next()
        except StopIteration:
            # A draw without a batch for this worker has batches for others.
            self._feed.send_draw()
            raise

    def divide_again(self, members: tuple[int, ...], repeat: bool) -> None:
        self._feed.divide_again(members, repeat)


class PassReplay(ABC):
    """Gives the batches of one pass, some of them again."""

    repeats = False
    """Whether the last call of `next` has given a batch of which the group has not made a step."""

    @abstractmethod
    def next(self, fresh: BatchSource) -> LoadedBatch:
        """The next batch; `fresh` gives one that was not given before."""


class BatchReplay(ABC):
    """Decides which batches the script is given again."""

    def plan_for(self, loader: DataLoader[Any], plan: DataPlan) -> DataPlan:
        """The plan by which a loader is divided that can give batches again."""
        return plan

    def opening(self, epoch: int, point: ResumePoint) -> ResumePoint:
        """How the pass of this epoch begins, in place of `point`."""
        return point

    @abstractmethod
    def begin(self, epoch: int) -> PassReplay:
        """The pass of this epoch begins."""

    @abstractmethod
    def interleaved(self) -> None:
        """The script reads two loaders at once. Raises ConfigError if that cannot be."""


class PassProgress:
    """Progress of one pass over a loader.

    Args:
        loader: the script's.
        plan: this worker's part of it.
        done: batches of an earlier start of the job, as `ResumePoint` has them.
    """

    def __init__(self, loader: Any, plan: DataPlan, done: Runs = ()) -> None:
        self._loader, self._plan, self._done = loader, plan, done
        self._share: EpochShare | None = None
        self._last: BatchPosition | None = None
        self._over = False
        self.batches = 0
        """Batches that the script was given."""
        self._trains = self.whole = False

    def given(self, place: BatchPosition, whole: bool) -> None:
        """Note that the script gets this batch. whole: each worker reads all of it."""
        self._last = place
        self.batches += 1
        self.whole = whole
        self._trains = torch.is_grad_enabled()

    @property
    def number(self) -> int:
        """The number of the last batch that this worker was given in the epoch, or 0."""
        last = self._last
        if last is None:
            return 0
        # With leases `last` counts what other groups had.
        return self._earlier + (self.batches - 1 if self._plan.mode == "lease" else last.before + last.seq)

    @cached_property
    def _earlier(self) -> int:
        return own_done(self._plan, self._done)

    @property
    def goes_on(self) -> bool:
        """Whether an earlier process has used the first batches of this part of the epoch."""
        return self.number >= self.batches > 0

    @property
    def single(self) -> bool:
        """Whether the script may train with the only batch taken: `next(iter(loader))`."""
        # What was read to its end, or left later, were batches to validate with.
        return self.batches == 1 and self._trains and not self._over

    def end(self) -> None:
        """There is no batch left."""
        self._over = True

    @property
    def share(self) -> float:
        """The share of the epoch that is done, with the batch that was given last.

        Raises:
            ConfigError: the loader has no length.
        """
        if self._over:
            return 1.0
        # Only when it is asked for: torch compares the length of a stream, once named, with what it reads.
        if self._share is None:
            self._share = EpochShare.of(batches_in(self._loader), self._plan, self._done)
        last = self._last
        return self._share.behind(0 if last is None else last.before + last.seq + 1)


class ScriptPasses:
    """The passes over all loaders of a script, numbered from 0 in their order.

    The numbers are the same on all workers, which run the same script.
    """

    def __init__(self) -> None:
        self.begun = 0
        """Number of passes that were begun."""
        self.recorder: ResumeRecorder | None = None
        self.loaders = 0
        self.numbered = False
        """Whether the script gets the numbers of its batches by `tt.enumerate`."""
        self.leading: ShardedLoader | None = None
        """Return the loader that counts as the progress of the script."""
        # Weak references: a pass that the script drops must be collected, because `__del__` gives its batches back.
        self._live: list[Callable[[], _Pass | None]] = []
        self.divided: WeakSet[ShardedLoader] = WeakSet()
        # The number of steps, and the passes with a batch since the last, by their loaders.
        self._given: tuple[int, dict[ShardedLoader, PassProgress]] = (0, {})

    def add(self, live: "_Pass") -> None:
        """A pass has begun."""
        self._live = [*map(ref, self.open()), ref(live)]

    def given(self, steps: int) -> "dict[ShardedLoader, PassProgress]":
        """The last passes of loaders that gave the script a batch since the last step."""
        if steps != self._given[0]:
            self._given = steps, {}
        return self._given[1]

    def open(self) -> "list[_Pass]":
        """The passes that have neither ended nor been left."""
        found = (live() for live in self._live)
        return [live for live in found if live is not None and live.is_open]


class ShardedLoader(LoaderView):
    """Iterates over this worker's share of the batches.

    Other attributes (`dataset`, `batch_size`, ...) are those of the script's loader. Each `iter()` is an epoch, counted
    from 0 over all loaders of the script. A loop that is left early gives back the batches that it has not read.
    `len()` is the number of batches per epoch. In mode "lease" it is an equal part: a group may have more batches, but
    not once its script has asked for that number.

    A script may read two loaders at once, as `zip` does, and use a batch of each in one step. If not all batches of
    both are cut in equal shares, no weight of a worker is right for both, so each worker reads all of both. A step with
    a batch beside one that is divided already is an error.

    Args:
        plan: this worker's part, as far as it is known.
        begin: called before each pass; lets the job begin, which calls `join` if it was not given its arguments.

    Raises:
        ConfigError: this loader cannot be divided, or there is no data, or less than a group's batch of it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: DataPlan,
        client: DataClient | None = None,
        accounting: BatchAccounting | None = None,
        replay: BatchReplay | None = None,
        begin: Callable[[], object] = lambda: None,
        passes: ScriptPasses | None = None,
    ) -> None:
        """`passes`: with those of the script's other loaders."""
        _check(loader, plan)
        super().__init__(loader)
        self._begin = begin
        self._given = self._plan = plan
        self._all = ScriptPasses() if passes is None else passes
        self.number = self._all.loaders
        self._all.loaders += 1
        self._all.divided.add(self)
        self._client: Any = None
        if accounting is not None:
            self.join(plan, client, accounting, replay)
        self._kept: LoaderCopy | None = None
        self._is_new, self._counted = True, False  # there was no pass yet; the script has asked for the length
        self._progress: PassProgress | None = None  # of the last pass. None: it is being opened

    def beside(self, loader: DataLoader[Any]) -> "ShardedLoader":
        """This or another loader of the same script."""
        known = next((each for each in self._all.divided if each._loader is loader), None)
        if known is not None:
            return known
        other = ShardedLoader(loader, self._given, begin=self._begin, passes=self._all)
        if self._client is not None:
            other.join(self._given, self._client, self._accounting, self._replay)
        return other

    def join_all(self, plan: DataPlan, client: Any, accounting: BatchAccounting, replay: BatchReplay | None) -> None:
        """The job has begun: `join`, of all loaders of the script."""
        for loader in tuple(self._all.divided):
            loader.join(plan, client, accounting, replay)

    def join(self, plan: DataPlan, client: Any, accounting: BatchAccounting, replay: BatchReplay | None) -> None:
        """Take the job's final plan. replay: gives batches again, with backup workers."""
        _check(self._loader, plan)
        self._given = plan
        self._plan = plan if replay is None else replay.plan_for(self._loader, plan)
        self._client, self._accounting, self._replay = client, accounting, replay

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        # Other groups may wait for the batches that a loop that was left early still holds.
        if self._plan.mode == "lease":
            self._close_own()
            self._client.most = self._nominal() if self._counted else -1
        others = [live for live in self._all.open() if live.loader is not self]
        epoch = self._all.begun
        self._all.begun += 1
        if self._all.leading is None or not others:
            self._all.leading = self
        self._progress = None
        # An earlier process has finished this pass.
        if self._recorder is not None and epoch < self._recorder.first:
            self._progress = PassProgress(self._loader, self._plan)
            self._progress.end()
            return iter(())
        if others:
            self._interleave()
        plan = self._plan_beside(others)
        if self._all.loaders > 1:
            self._client.since = min([epoch, *(live.epoch for live in self._all.open())])
        # The shares of a stream are cut where it is loaded.
        fits = self._kept is not None and (self._kept.indices is not None or self._kept.plan == plan)
        inner = self._kept if self._kept is not None and fits else LoaderCopy(self._loader, plan)
        if plan.groups * plan.workers > 1 and self._client is not None:
            self._client.begin_pass(epoch, self.number, *self._compared(inner))
        if self._loader.persistent_workers:
            self._kept = inner
        opening = self._opening(inner, epoch)
        progress = self._progress = PassProgress(self._loader, self._plan, opening.done)
        if self._replay is not None:
            opening = self._replay.opening(epoch, opening)
        feed: EpochReader
        if inner.indices is None:
            feed = IterableEpoch(inner, plan, self._client, self._accounting, epoch, opening, self.number)
        else:
            number = self.number if self._is_new and knows_ranks(self._loader) else None
            several = self._all.loaders > 1
            feed = MapEpoch(inner, inner.indices, plan, self._client, epoch, opening, self._accounting, number, several)
        self._is_new = False
        repeats = None if self._replay is None else self._replay.begin(epoch)
        live = _Pass(self, feed, self._accounting, epoch, progress, self._recorder, repeats)
        self._all.add(live)
        if self._recorder is not None:
            feed.catch_up(self._recorder)
        return live

    def _compared(self, inner: LoaderCopy) -> Sequence[int]:
        """Samples, indices and content for `PassBegun`, before the first pass only."""
        # A stream is compared when its first batch is read.
        if not self._is_new or inner.indices is None:
            return ()
        return _length(self._loader.dataset) or -1, 0, sample_of(self._loader, self._plan.seed)

    def _interleave(self) -> None:
        """The script reads this loader while it reads another one."""
        if self._plan.mode == "lease":
            accepted = "must be kStatic: the script reads two loaders at once, and groups would wait for each other"
            raise ConfigError("shard", "kLease", accepted)
        if self._replay is not None:
            self._replay.interleaved()
        if self._recorder is not None:
            self._recorder.interleaved()

    def _plan_beside(self, others: "Sequence[_Pass]") -> DataPlan:
        """The plan of a pass that may have a part in the steps of other loaders' batches."""
        begun = any(live.given and not live.whole for live in others)
        if not others or begun or not self._shares or not torch.is_grad_enabled():
            return self._plan
        if all(loader.cuts_evenly for loader in (self, *(live.loader for live in others))):
            return self._plan
        for live in others:
            live.read_whole()
        return replace(self._plan, whole=all(live.whole for live in others))

    def count_given(self, progress: PassProgress, whole: bool) -> bool:
        """Note a batch of this pass for the step; return whether another loader has one.

        whole: each worker reads all of it.

        Raises:
            ConfigError: the step may be made with both, and one is divided in shares that are not equal.
        """
        given = self._all.given(self._accounting.own_steps)
        accumulates = given.get(self) is progress and torch.is_grad_enabled()
        if accumulates and self._recorder is not None and progress.goes_on and not self._all.numbered:
            self._recorder.accumulates()
        given[self] = progress
        if len(given) == 1:
            return False
        live = {each.loader for each in self._all.open()}
        beside = {at: last for at, last in given.items() if at is not self and (at in live or last.single)}
        equal = (whole and all(last.whole for last in beside.values())) or all(at.cuts_evenly for at in (self, *beside))
        if beside and self._shares and not equal and torch.is_grad_enabled():
            raise self._unequal_shares()
        return True

    @property
    def _shares(self) -> bool:
        """Whether a step has the mean over shares of each batch."""
        return self._plan.workers > 1 and not self._plan.sums and not self._plan.in_rounds

    def _unequal_shares(self) -> ConfigError:
        accepted = (
            f"must be a multiple of {self._plan.workers}, the workers of a group, with drop_last=True where the last "
            "batch has fewer samples: a step has a batch of this loader and one of another, which is divided already, "
            "and no weight is right for both. Or begin both loops before the first batch, as zip does, without "
            "processes of a stream: then each worker reads all of both. Validate inside torch.no_grad()"
        )
        return ConfigError("loader.batch_size", self._loader.batch_size, accepted)

    @cached_property
    def cuts_evenly(self) -> bool:
        """Whether all shares of each batch are equal, for certain."""
        plan, sampler = self._plan, index_sampler(self._loader)
        size, samples = _batch_of(self._loader)
        # Exact types: a subclass may do anything.
        if type(sampler) is not BatchSampler or not size or samples is None or plan.shares:
            return False
        sizes = {size, 0 if sampler.drop_last else samples % size}
        return all(n % plan.workers == 0 and (not n or n // plan.workers >= plan.min_share) for n in sizes)

    def _opening(self, inner: LoaderCopy, epoch: int) -> ResumePoint:
        if self._recorder is None:
            return PLAIN
        dice = self._plan.alone if inner.indices is None else self._plan.mode == "broadcast"
        generators = tuple(generators_of(self._loader))
        start = EpochStart(epoch, "dice" if dice else "seed", inner.fresh, generators, _settings(self._loader))
        opening, kept = self._recorder.opening(start)
        # The earlier process kept its iterator, which draws no seed when a pass begins. A new iterator does, so it
        # gets a generator of its own to draw from.
        if kept and inner.fresh:
            inner.seed(epoch_seed(self._plan.seed, epoch))
        return opening

    def remaining(self, epoch: int, done: Runs, returned: bool) -> int:
        """Batches of a pass that are left; `done` and `returned` as in `ResumePoint`."""
        plan = self._plan
        batches = len(self._loader) - sum(last - first for first, last in done)
        units = -(-batches // plan.workers) if plan.in_rounds else batches
        own = len(range(plan.group, units, plan.groups))
        return max(0, own - (self._client.applied(plan.stream(epoch)) if returned else 0))

    @property
    def passes(self) -> int:
        """Number of passes that were begun, over all loaders of the script."""
        return self._all.begun

    @property
    def _recorder(self) -> ResumeRecorder | None:
        return self._all.recorder

    def position(self) -> int:
        """As `Passes` has it: the number of passes that were begun."""
        return self._all.begun

    def share_since(self, position: int) -> float:
        """As `Passes` has it. Of two loaders that are read at once, the first one counts."""
        leading = self._all.leading
        return 0.0 if self._all.begun == position or leading is None else leading.share_of_pass()

    def place(self) -> tuple[int, int]:
        """Passes that were begun, and batches that the last one has given."""
        leading = self._all.leading
        last = None if leading is None else leading._progress
        return self._all.begun, 0 if last is None else last.batches

    def number_from(self, place: tuple[int, int]) -> int:
        """The number of the first batch of a pass that has begun since `place`; else 0.

        Of two loaders that are read at once, the first one counts. The script counts on by `tt.enumerate`.
        """
        now, leading = self.place(), self._all.leading
        if now == place or now[1] != 1 or leading is None or leading._progress is None:
            return 0
        self._all.numbered = True
        return leading._progress.number

    def share_of_pass(self) -> float:
        """The share of this loader's last pass that is done."""
        if self._progress is not None:
            return self._progress.share
        # A scheduler that is restored may step once more, and the pass is not begun yet. Leases are not known before.
        if self._recorder is None or self._plan.mode == "lease" or _length(self._loader) is None:
            return 0.0
        own = max(1, len(self))
        return (own - self._recorder.batches_left(self._all.begun - 1, self)) / own

    def skip_to(self, epoch: int) -> None:
        """Begin the next pass at this epoch, unless it is a later one already."""
        self._all.begun = max(self._all.begun, epoch)

    def __len__(self) -> int:
        # A schedule of so many steps must not be asked for more, whatever other groups do. `list(loader)` asks for a
        # hint only, once it has begun the pass.
        if not any(live.loader is self and not live.given for live in self._all.open()):
            self._counted = True
            if self._plan.mode == "lease" and self._client is not None:
                self._client.most = self._nominal()
        return self._nominal()

    def _nominal(self) -> int:
        batches, plan = len(self._loader), self._plan
        units = -(-batches // plan.workers) if plan.in_rounds else batches
        if plan.mode == "static":
            return len(range(plan.group, units, plan.groups))
        return -(-units // plan.groups)

    @property
    def accounting(self) -> BatchAccounting:
        """Notes the batches that the script is given."""
        return self._accounting

    def account_to(self, accounting: BatchAccounting) -> None:
        """Note batches in `accounting` from the next pass on."""
        self._accounting = accounting

    def resume_with(self, recorder: ResumeRecorder | None) -> None:
        """Resume passes by this recorder. None: the loop cannot be resumed."""
        self._all.recorder = recorder

    @property
    def in_step(self) -> bool:
        """Whether the next step has a batch of a loader of the script."""
        return bool(self._all.given(self._accounting.own_steps))

    @property
    def under_way(self) -> bool:
        """The script is in the middle of a pass, over any loader."""
        return bool(self._all.open())

    def close(self) -> None:
        """Leave the passes that are under way, of all loaders, as a `break` does."""
        for live in self._all.open():
            live.close()

    def _close_own(self) -> None:
        for live in self._all.open():
            if live.loader is self:
                live.close()


# --- loaders that cannot be divided ------------------------------------------------------------------------------


def _check(loader: DataLoader[Any], plan: DataPlan) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError("loader", type(loader).__name__, "must be a torch.utils.data.DataLoader")
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        accepted = "must be True: which samples a step has seen is known from the order of the batches"
        raise ConfigError("loader.in_order", False, accepted)
    # Such a sampler would leave out the samples of the other replicas, and the rest would be divided once more.
    for sampler in samplers(loader):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            accepted = "must be 1, or another sampler: the batches are divided among the workers already"
            raise ConfigError("loader.sampler.num_replicas", sampler.num_replicas, accepted)
    if plan.own_streams and not isinstance(loader.dataset, IterableDataset) and _length(index_sampler(loader)) is None:
        accepted = "must have a length: with cluster.backup above 0 an epoch is drawn as a whole before it begins"
        raise ConfigError("loader.sampler", type(index_sampler(loader)).__name__, accepted)
    if _length(loader.dataset) == 0:
        raise ConfigError("len(loader.dataset)", 0, "must be at least 1: there is nothing to train on")
    size, samples = _batch_of(loader)
    if size is not None and samples is not None:
        group = size * plan.workers if plan.in_rounds else size
        # With `drop_last` such a loader would give no batch, and without it the last shares would be empty.
        if group > samples:
            each = f" for each of {plan.workers} workers" if plan.in_rounds else ""
            accepted = f"a group's batch{each} must fit in the {samples} samples of an epoch: make it smaller"
            raise ConfigError("loader.batch_size", size, accepted)
    if not isinstance(loader.dataset, IterableDataset) and _length(loader) == 0:
        raise ConfigError("len(loader)", 0, "must be at least 1: the sampler gives no batch")


def most_workers(loader: DataLoader[Any], per_worker_batch: bool) -> int | None:
    """How many workers of a group can share this loader. None: no limit is known."""
    size, samples = _batch_of(loader) if per_worker_batch else (None, None)
    return None if size is None or samples is None else samples // size


def _length(what: Any) -> int | None:
    # Some samplers and datasets raise NotImplementedError instead of having no `__len__`.
    try:
        return len(what)
    except (TypeError, NotImplementedError):
        return None


def _batch_of(loader: DataLoader[Any]) -> tuple[int | None, int | None]:
    """Samples per batch and samples per epoch, where they are known."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.batch_size, _length(loader.dataset)
    sampler = index_sampler(loader)
    return (sampler.batch_size, _length(sampler.sampler)) if isinstance(sampler, BatchSampler) else (None, None)


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings that number the batches of an epoch, as far as they are known."""
    size, samples = _batch_of(loader)
    order = None if isinstance(loader.dataset, IterableDataset) else type(loader.sampler).__name__
    return {"loader.batch_size": size, "len(loader.dataset)": samples, "loader.sampler": order}


class _Pass(Iterator[Any]):
    """The iterator that the script holds."""

    # On the class, because `__del__` also runs after an `__init__` that has failed.
    _open = False

    def __init__(
        self,
        loader: ShardedLoader,
        feed: EpochReader,
        accounting: BatchAccounting,
        epoch: int,
        progress: PassProgress,
        recorder: ResumeRecorder | None,
        repeats: PassReplay | None = None,
    ) -> None:
        self.loader = loader
        self._feed, self._accounting, self.epoch, self._recorder = feed, accounting, epoch, recorder
        self._progress = progress
        self._repeats, self._fresh = repeats, BatchSource(feed)
        self._open = True

    def __next__(self) -> Any:
        if not self._open:
            raise StopIteration
        if self._recorder is not None:
            self._recorder.asked()
        try:
            place, samples, data = self._fresh() if self._repeats is None else self._repeats.next(self._fresh)
        except StopIteration:
            self._open = False
            self._feed.end()
            self._progress.end()
            self._accounting.over()
            if self._recorder is not None:
                self._recorder.ended()
            raise
        if self._recorder is not None:
            if self._repeats is not None and self._repeats.repeats:
                self._recorder.repeats()
            self._recorder.given()
        # Only after the recorder has the state from which the draw can be repeated: with the draw, the others may train
        # without this worker.
        self._feed.send_draw()
        beside = self.loader.count_given(self._progress, self.whole)
        # Batches that all workers read as a whole count alike. One to validate with leaves a step its weight.
        weight = 1.0 if self.whole else float(samples)
        # What all workers of a group read as a whole is counted by the first of them.
        counted = self._feed.counted(samples)
        weighs = torch.is_grad_enabled() or not beside
        self._accounting.drawn(place.stream, place.seq, weight if weighs else None, counted, place.made)
        self._progress.given(place, self.whole)
        return data

    @property
    def given(self) -> int:
        """Batches that the script was given."""
        return self._progress.batches

    @property
    def whole(self) -> bool:
        """Whether each worker reads all of a batch."""
        return self._feed.whole

    def read_whole(self) -> None:
        """Let each worker read all of the batches, unless the script was given one."""
        if not self.given:
            self._feed.read_whole()

    @property
    def is_open(self) -> bool:
        """Whether the pass has neither ended nor been left."""
        return self._open

    def close(self) -> None:
        """Leave early; nothing happens at the end or the second time."""
        if self._open:
            self._open = False
            self._feed.leave()
            self._accounting.left_early(self.epoch, self.given)

    def __del__(self) -> None:
        # At the end of the interpreter the modules that `close` needs may be gone.
        if not sys.is_finalizing():
            self.close()
