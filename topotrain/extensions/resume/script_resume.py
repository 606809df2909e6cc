"""How a worker's script goes on in a fresh process, whose script runs from its first line on.

Rule: servers know what is applied, and only this worker knows the rest (`worker_state`): it leaves that at server (0,0)
when a batch is about to be given to the script, for then all that a step changes has been changed. A fresh process
takes it back where the script would have made it: buffers and what `tt.keep` holds in `tt.prepare`, and as the pass
begins that was under way schedulers and the dice, which then draw the same order again. Passes that were over are
empty.

What is applied is left out by the feeds, not here. What the script did between its last deposit and its death is done
again, and one thing is not known for sure: a scheduler's last step, if it came after the last batch was asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError, OnFailure
from topotrain.core.events import Notice
from topotrain.extensions.checkpointing.server_snapshots import takes_snapshots
from topotrain.extensions.elastic.eligibility import singly
from topotrain.extensions.elastic.leave import GroupLeaving
from topotrain.extensions.resume.lr_schedulers import OptimizerRates
from topotrain.extensions.resume.previous_run import find
from topotrain.extensions.resume.state_serialization import UnserializableState, pack, unpack
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE
from topotrain.training.context import Context
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import EpochStart, ShardedLoader
from topotrain.training.data.map_dataset import ResumePoint
from topotrain.training.data.script_position import ScriptPosition
from topotrain.training.rng_state import Stand, put_back, stand
from topotrain.training.worker import Worker


def _leaves(here: Context) -> bool:
    """Whether this worker leaves its state as each pass begins.

    For a snapshot that is also how server (0,0) knows whose states it has to wait for.
    """
    job, topology = here.place.job, here.place.topology
    restarts = job.on_failure is OnFailure.kContinue and topology.regroups(here.me.group)
    return restarts or takes_snapshots(job, topology)


class ScriptResume(ScriptPosition):
    """Notes where a worker is, and leads a fresh process there; a `distributed_loader.Memory`.

    Args:
        here: this process.
        worker, optimizer: what `tt.prepare` made of the script's.

    Raises:
        ConfigError: what was left does not fit this script.
    """

    def __init__(self, here: Context, worker: Worker, optimizer: Optimizer) -> None:
        self._here, self._worker = here, worker
        self._rates = OptimizerRates(optimizer, here.kept, self._notice)
        self._leaves = _leaves(here)
        self._earlier = find(here, worker)
        self._generators: tuple[torch.Generator, ...] = ()
        self._turns = 0
        self.in_epochs = False
        """The script is in the middle of a loop over `tt.epochs`."""
        self._at = WorkerState(self._earlier.first, self._earlier.steps)  # what holds for the whole pass
        self._begins = False  # its first batch was not given yet
        self._now: Stand = {}  # before the batch that is asked for
        self._moment: Stand = {}  # when the process before this one had its place noted
        self._marked: tuple[object, ...] = ()
        self._latest: WorkerState | None = None
        self._latest_step = -1
        worker.tally.continue_from(self._earlier.steps)
        if self._earlier.returned:
            worker.rejoin(self._earlier.taken)
        if self._earlier.condition is not None:
            self._restore_buffers(self._earlier.condition.buffers)
            for name in here.kept:
                self.restore_kept(name)

    @property
    def steps(self) -> int:
        """Steps that this worker had taken before this process began."""
        return self._earlier.steps

    @property
    def first(self) -> int:
        """Passes before this one are over."""
        return self._earlier.first

    def _notice(self, text: str) -> None:
        self._here.emit(Notice(str(self._here.me), text))

    # --- taking it back ------------------------------------------------------------------------------------------

    def _restore_buffers(self, left: Mapping[str, torch.Tensor]) -> None:
        parts = self._worker.parts
        for described, buffer in zip(parts.buffers, parts.buffer_tensors, strict=True):
            found = left.get(described.name)
            if buffer.is_meta or found is None:
                continue
            if (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
                was, now = (f"{tuple(t.shape)} of {t.dtype}" for t in (found, buffer))
                raise ConfigError(f"model buffer {described.name}", now, f"must be {was}, as before")
            with torch.no_grad():
                buffer.copy_(found)

    def restore_kept(self, name: str) -> None:
        """Load what an object of `tt.keep` held. Nothing happens where there was none of this name."""
        condition = self._earlier.condition
        if condition is not None and name in condition.kept:
            self._here.kept[name].load_state_dict(unpack(condition.kept[name], condition.tensors))

    def opening(self, sight: EpochStart) -> tuple[ResumePoint, bool]:
        """As `distributed_loader.Memory` has it."""
        earlier, condition = self._earlier, self._earlier.condition
        opening, device = earlier.opening(sight), self._worker.device
        self._generators, kept_iterator = sight.generators, False
        begin, fresh = {}, sight.fresh
        if condition is not None and earlier.restores(sight.epoch):
            for name in self._here.kept:
                self.restore_kept(name)
            self._rates.restore(earlier.later or condition)
            if opening.restored:
                put_back(condition.begin, sight.generators, device)
                begin, fresh, kept_iterator = condition.begin, condition.fresh, not condition.fresh
                self._moment = condition.now
        drawn_by = opening.dice if opening.drawn == "dice" else None
        self._at = replace(
            self._at,
            passes=sight.epoch,
            drawn=opening.drawn or sight.drawn,
            fresh=opening.fresh if opening.drawn else fresh,
            begin=begin or stand(sight.generators, device),
            draw={} if drawn_by is None or drawn_by is begin else drawn_by,
        )
        self._begins = True
        return opening, kept_iterator

    def opened(self) -> None:
        """As `distributed_loader.Memory` has it."""
        if self._moment:
            put_back(self._moment, self._generators, self._worker.device)
        self._moment = {}

    # --- leaving it ----------------------------------------------------------------------------------------------

    def asked(self) -> None:
        """As `distributed_loader.Memory` has it. Raises Leaving, where the worker's group leaves the job."""
        self._look_whether_it_leaves()
        if self._worker.snapshot or self._worker.lazy:
            self._now = self._stand()

    def ended(self) -> None:
        """As `distributed_loader.Memory` has it. Raises Leaving, as `asked` does."""
        self._loop_ended()
        self._look_whether_it_leaves()
        if self._worker.snapshot and singly(self._here.place.job):
            # Of this pass others had batches left at the snapshot, and nobody could draw it again from the next one.
            self._now = self._stand()
            self._leave_snapshot()

    def _loop_ended(self) -> None:
        self._here.owner.loop_ended()

    def _look_whether_it_leaves(self) -> None:
        if self._worker.leaves or self._worker.client.extension(DataClient).leaves:
            raise GroupLeaving

    def given(self) -> None:
        """As `distributed_loader.Memory` has it."""
        if self._begins:
            self._begin()
        elif self._leaves and (mark := self._rates.mark()) != self._marked:
            self._marked = mark
            self._leave(SINCE, self._rated(WorkerState(self._at.passes, self._worker.tally.steps)))
        if self._worker.snapshot:
            self._leave_snapshot()
        if self._worker.lazy and self._latest_step != self._worker.tally.steps:
            # What a step brought is heard in the next one, and then it is too late to look.
            self._latest, self._latest_step = self._whole(self._now), self._worker.tally.steps

    def _begin(self) -> None:
        self._begins = False
        self._rates.look()
        self._marked = self._rates.mark()
        self._now = {}  # the dice of this batch are those with which the pass began
        if self._leaves:
            self._leave(EPOCH, self._whole({}))

    def finish(self) -> None:
        """The script has ended: no pass is under way."""
        if self._worker.snapshot and self._worker.lazy:
            self._leave_snapshot()
        self._worker.client.values.settle()
        if self._worker.snapshot:
            passes = self._here.loader.passes if self._here.loader is not None else self._at.passes
            self._at = replace(self._at, passes=max(passes, self.first), begin=self._stand(), draw={})
            self._now, self._latest = {}, None
            self._leave_snapshot()

    def _leave_snapshot(self) -> None:
        number, self._worker.snapshot = self._worker.snapshot, 0
        late = self._latest if self._worker.lazy else None
        self._leave(number, late or self._whole(self._now))
        self._now = {}

    def _stand(self) -> Stand:
        return stand(self._generators, self._worker.device)

    def _whole(self, now: Stand) -> WorkerState:
        tensors: dict[str, torch.Tensor] = {}
        kept = {}
        for name, thing in self._here.kept.items():
            if self._rates.has(thing):
                continue
            try:
                kept[name] = pack(thing.state_dict(), tensors)
            except UnserializableState as error:
                accepted = "its state must be numbers, texts, lists, dicts and tensors"
                raise ConfigError(f"tt.keep {name}", str(error), accepted) from None
        parts = self._worker.parts
        buffers = {
            described.name: buffer.detach().cpu().contiguous().clone()
            for described, buffer in zip(parts.buffers, parts.buffer_tensors, strict=True)
            if not buffer.is_meta
        }
        steps = self._worker.tally.steps
        whole = replace(self._at, steps=steps, kept=kept, now=now, buffers=buffers, tensors=tensors)
        return self._rated(whole)

    def _rated(self, condition: WorkerState) -> WorkerState:
        groups, schedulers = self._rates.pack(condition.tensors)
        return replace(condition, groups=groups, schedulers=schedulers)

    def _leave(self, number: int, condition: WorkerState) -> None:
        data = torch.frombuffer(bytearray(condition.to_bytes()), dtype=torch.uint8)
        with self._worker.client.channel.spans.span("deposit"):
            self._worker.client.extension(WorkerStateClient).save(number, data)

    # --- the script's loop ---------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """What is left of `range(count)`, where the script may have several such loops, one after the other."""
        turn, loader, was = self._turns, self._here.loader, self._earlier.condition
        self._turns += 1
        begin = 0
        if was is not None and turn < was.turn:
            return
        if was is not None and turn == was.turn:
            begin = max(0, was.epoch - max(0, was.epoch_pass - self.first))
            if isinstance(loader, ShardedLoader):
                loader.skip_to(min(was.epoch_pass, self.first))
        try:
            for number in range(begin, count):
                passes = loader.passes if isinstance(loader, ShardedLoader) else 0
                self._at = replace(self._at, turn=turn, epoch=number, epoch_pass=passes)
                if loader is None:
                    self._begin_unseen(was if number == begin else None)
                self.in_epochs = True
                yield number
        finally:  # also where the script leaves the loop
            self.in_epochs = False
            self._loop_ended()
        self._at = replace(self._at, turn=turn + 1, epoch=0, epoch_pass=self._at.passes)

    def _begin_unseen(self, was: WorkerState | None) -> None:
        """An epoch of a script that divides its data itself: nobody knows what it reads, so it is read as a whole."""
        if was is not None:
            self._rates.restore(self._earlier.later or was)
            if self._earlier.own:
                put_back(was.begin, (), self._worker.device)
        self._at = replace(self._at, begin=self._stand())
        self._begin()
