"""Resume of a worker's script in a fresh process.

The fresh process runs the script again from its first line. The servers know which batches are applied, and everything
else is known only to the worker (`worker_state`).

* A worker saves its state at server (0,0) when its script is about to get a batch. The state at the begin of a pass is
  saved when all batches of earlier passes count (`pass_states`).
* A fresh process restores buffers and the objects of `tt.keep` in `tt.prepare`. It restores schedulers and random
  number generators at the begin of the pass that was under way.
* Passes that were over are empty. Batches that are applied are left out by the data loader, not here.
* Work of the script between its last save and its death is done again. One thing is not known: a scheduler's last
  step, if it came after the last request of a batch. Where the scheduler steps with each step, `lr_schedulers` knows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from topotrain.config.job import ConfigError, OnFailure
from topotrain.core.events import EventNotifier, LastingNotice, Unrepeatable
from topotrain.extensions.checkpointing.server_snapshots import takes_snapshots
from topotrain.extensions.elastic.eligibility import singly
from topotrain.extensions.elastic.leave import GroupLeaving
from topotrain.extensions.resume.lr_schedulers import OptimizerRates
from topotrain.extensions.resume.previous_run import INTERLEAVED, find
from topotrain.extensions.resume.read_ahead import ReadAhead
from topotrain.extensions.resume.state_capture import StateCapture
from topotrain.extensions.resume.state_serialization import unpack
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.training.context import Context
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import EpochStart, ShardedLoader
from topotrain.training.data.map_dataset import ResumePoint
from topotrain.training.data.script_position import ScriptPosition
from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.rng_state import Stand, put_back, stand
from topotrain.training.worker import Worker

ACCUMULATES = (
    "this epoch goes on in its middle, and a step has several batches: if the script counts them by enumerate(loader), "
    "steps have other batches than without the restart; tt.enumerate(loader) goes on with the number"
)


def _saves(here: Context) -> bool:
    """Whether this worker saves its state at the begin of each pass."""
    job, topology = here.place.job, here.place.topology
    restarts = job.on_failure is OnFailure.kContinue and topology.regroups(here.me.group)
    # For snapshots, too: from this state server (0,0) knows which workers will leave one.
    return restarts or takes_snapshots(job, topology)


class ScriptResume(ScriptPosition):
    """Records the position of a worker's script, and restores it in a fresh process.

    Raises ConfigError if the saved state does not fit this script.
    """

    def __init__(self, here: Context, worker: Worker) -> None:
        self._here, self._worker = here, worker
        self._rates = OptimizerRates(worker.optimizers, here.kept, EventNotifier(here, str(here.me)))
        self._capture = StateCapture(here, worker, self._rates)
        self._saves = _saves(here)
        # A lazy step is known to be applied only in the next one. Of several optimizers the servers freeze behind the
        # last step with a batch, which is known when the next batch is asked for.
        self._lazy = worker.lazy and len(worker.optimizers) == 1
        # Set for a loop that draws batches before it uses them.
        self._ahead: ReadAhead | None = None
        self._earlier = find(here, worker)
        self._generators: tuple[torch.Generator, ...] = ()
        self._told = False
        self._turns = 0
        self.in_epochs = False
        """Whether the script is in the middle of a loop over `tt.epochs`."""
        # The part that is the same for the whole pass.
        self._at = WorkerState(self._earlier.first, self._earlier.steps)
        # The script has not got the first batch of the pass.
        self._begins = False
        # Generators before the requested batch, and before those that the loop has read ahead of it.
        self._now: Stand = {}
        self._read: Stand = {}
        # Generators at the saved position of the earlier process.
        self._moment: Stand = {}
        # Rates and schedulers when the script was given its last batch.
        self._given_rates: WorkerState | None = None
        self._latest: WorkerState | None = None
        self._latest_step = -1
        worker.tally.continue_from(self._earlier.steps)
        if self._earlier.returned:
            worker.rejoin(self._earlier.taken)
        if self._earlier.condition is not None:
            _restore_buffers(worker.parts, self._earlier.condition.buffers)
            # Objects that the script gives to `tt.keep` later are restored there, by `restore_kept`.
            for name in here.kept:
                self.restore_kept(name)

    @property
    def steps(self) -> int:
        """Steps that this worker had taken before this process began."""
        return self._earlier.steps

    def interleaved(self) -> None:
        """The script reads two loaders at once: no fresh process can go on."""
        if not self._at.interleaved:
            self._at = replace(self._at, interleaved=True)
            self._here.emit(Unrepeatable(str(self._worker.me), INTERLEAVED, job=True))

    def accumulates(self) -> None:
        """See `distributed_loader.ResumeRecorder`."""
        if not self._told:
            self._told = True
            self._here.emit(LastingNotice(str(self._worker.me), ACCUMULATES))

    def batches_left(self, epoch: int, loader: ShardedLoader | None = None) -> int:
        earlier, loader = self._earlier, loader or self._here.loader
        assert loader is not None
        done = () if earlier.past is None else earlier.past.runs(epoch)
        return loader.remaining(epoch, done, earlier.has_read(epoch))

    @property
    def first(self) -> int:
        """Passes before this one are over."""
        return self._earlier.first

    # --- restore ------------------------------------------------------------------------------------------

    def restore_kept(self, name: str) -> None:
        """Restore an object of `tt.keep`, if its name is saved and nothing newer is there."""
        if name in self._here.superseded:
            return
        condition = self._earlier.lead if name in self._here.alike else self._earlier.condition
        if condition is not None and name in condition.kept:
            self._here.kept[name].load_state_dict(unpack(condition.kept[name], condition.tensors))

    def opening(self, start: EpochStart) -> tuple[ResumePoint, bool]:
        earlier, condition = self._earlier, self._earlier.condition
        opening, device = earlier.opening(start), self._worker.device
        self._generators, kept_iterator = start.generators, False
        if self._ahead is not None:
            self._ahead.begin()
        begin, fresh = {}, start.fresh
        if condition is not None and earlier.restores(start.epoch):
            # Again at the begin of the pass: the script may have changed the objects since `tt.prepare`.
            for name in self._here.kept:
                self.restore_kept(name)
            self._rates.restore(earlier.later or condition, earlier.steps)
            _restore_trains(self._worker.parts, condition)
            if opening.restored:
                # The loader draws the pass from these generators, so it gets the same order of samples.
                put_back(condition.begin, start.generators, device)
                begin, fresh, kept_iterator = condition.begin, condition.fresh, not condition.fresh
                self._moment = condition.now
                if self._ahead is not None:
                    self._ahead.replay(condition.now, condition.ahead)
        drawn_by = opening.dice if opening.drawn == "dice" else None
        self._at = replace(
            self._at,
            passes=start.epoch,
            drawn=opening.drawn or start.drawn,
            data=dict(start.data),
            fresh=opening.fresh if opening.drawn else fresh,
            begin=begin or stand(start.generators, device),
            # Stored only where they differ: generator states take kilobytes in every saved state.
            draw={} if drawn_by is None or drawn_by is begin else drawn_by,
        )
        self._begins = True
        return opening, kept_iterator

    def opened(self) -> None:
        # After the draw of the pass: from here on masks continue at the saved position within it.
        if self._moment:
            put_back(self._moment, self._generators, self._worker.device)
        self._moment = {}

    # --- save ----------------------------------------------------------------------------------------------

    def asked(self) -> None:
        """See `distributed_loader.ResumeRecorder`.

        Raises:
            GroupLeaving: the worker's group leaves the job.
        """
        if self._ahead is not None:
            # Batches that are drawn and not used would be lost here, so `use` asks whether the group leaves.
            noted = self._ahead.asked(self._generator_state() if self._ahead.notes else {})
            if noted:
                put_back(noted, self._generators, self._worker.device)
            return
        # Of several steps with one batch, an earlier one may have brought the number of a snapshot.
        if len(self._worker.optimizers) > 1:
            self._worker.client.values.settle()
        self._check_whether_it_leaves()
        # Only for a state that will be saved: reading all generators takes time in every step.
        if self._worker.snapshot or self._lazy:
            self._now = self._generator_state()

    def ended(self) -> None:
        """See `distributed_loader.ResumeRecorder`. Raises GroupLeaving, as `asked` does."""
        self._here.owner.loop_ended()
        if self._ahead is not None:
            self._ahead.ended()
            return
        # In an epoch of one batch the scheduler's step is seen only here. Without a batch, what was seen is a step
        # between this pass and the one before.
        if not self._begins:
            self._rates.note_steps()
        self._check_whether_it_leaves()
        if self._worker.snapshot and singly(self._here.place.job):
            # Other workers had batches of this pass left at the snapshot, and only this state can draw them again.
            self._now = self._generator_state()
            self._save_for_snapshot()

    def _check_whether_it_leaves(self) -> None:
        if self._worker.leaves or self._worker.client.extension(DataClient).leaves:
            raise GroupLeaving

    def given(self) -> None:
        self._capture.passes.save()
        # The script is about to get a batch, so everything that its last step changes has changed by now.
        if self._begins:
            self._begin()
            if self._ahead is None:
                self._save_if_due()
        elif self._ahead is None:
            self._save_rates()
            self._save_if_due()

    def read_ahead(self) -> None:
        """The loop draws batches before it uses them, and calls `use` for each."""
        self._ahead = ReadAhead(takes_snapshots(self._here.place.job, self._here.place.topology) or self._lazy)

    def use(self) -> None:
        """See `ScriptPosition`. Raises GroupLeaving, as `asked` does."""
        assert self._ahead is not None
        self._check_whether_it_leaves()
        self._capture.passes.save()
        first = self._ahead.unused
        noted = self._ahead.reached()
        if noted:
            put_back(noted, self._generators, self._worker.device)
        if not first:
            self._save_rates()
        if self._worker.snapshot or self._lazy:
            # For the first batch the generators are those at the begin of the pass.
            self._now, self._read = ({}, {}) if first else self._ahead.states(self._generator_state())
        self._save_if_due()
        self._ahead.used()

    def _save_rates(self) -> None:
        # A scheduler has stepped within the pass. Rates and schedulers are small, unlike the whole state.
        if self._rates.note_steps() and self._saves:
            self._given_rates = self._capture.rates(self._at.passes)
            self._capture.change(self._given_rates)

    def _save_if_due(self) -> None:
        if self._worker.snapshot:
            self._save_for_snapshot()
        if self._lazy and self._latest_step != self._worker.tally.steps:
            # A lazy step is known to be applied only in the next one. By then the state is no longer that of the step.
            self._latest, self._latest_step = self._whole(self._now), self._worker.tally.steps

    def repeats(self) -> None:
        # The body of the loop runs once more, and must not make a second step of a scheduler for one batch.
        if self._given_rates is not None and self._rates.stepped():
            self._rates.restore(self._given_rates, self._given_rates.steps)

    def _begin(self) -> None:
        self._begins = False
        self._rates.begin_pass()
        # For the first batch the generators are those at the begin of the pass.
        self._now, self._read = {}, {}
        if self._saves and self._capture.passes.holds:
            # A fresh process would begin at the state before, and come here by itself.
            self._given_rates = self._capture.rates(self._at.passes)
        elif self._saves:
            self._given_rates = self._whole({})
            self._capture.begin(self._given_rates)

    def finish(self) -> None:
        """Save the state at the end of the script, with no pass under way."""
        if self._worker.snapshot and self._lazy:
            self._save_for_snapshot()
        # The last lazy step may bring another snapshot's number.
        self._worker.client.values.settle()
        if self._worker.snapshot:
            # A job that continues from here finds all passes over.
            passes = self._here.loader.passes if self._here.loader is not None else self._at.passes
            self._at = replace(self._at, passes=max(passes, self.first), begin=self._generator_state(), draw={})
            self._now, self._read, self._latest = {}, {}, None
            self._save_for_snapshot()

    def _save_for_snapshot(self) -> None:
        # One state per snapshot: the number is taken with the save.
        number, self._worker.snapshot = self._worker.snapshot, 0
        late = self._latest if self._lazy else None
        self._capture.save(number, late or self._whole(self._now))
        self._now, self._read = {}, {}

    def _generator_state(self) -> Stand:
        return stand(self._generators, self._worker.device)

    def _whole(self, now: Stand) -> WorkerState:
        passes = self._at.passes
        # A pass that is drawn from generators of the script can be drawn again only by a state of its own begin. Of a
        # lazy step the reply says later whether the snapshot has it, and then its batches count.
        again = self._at.drawn == "seed" and not self._lazy
        uncounted = self._worker.first_uncounted(passes) if again else passes
        return self._capture.whole(replace(self._at, uncounted=uncounted, now=now, ahead=self._read if now else {}))

    # --- the script's loop ---------------------------------------------------------------------------------------

    def remaining(self, count: int) -> range:
        was = self._earlier.condition
        # Loops are identified by their order: the script runs again from its first line.
        if was is None or self._turns > was.turn:
            return range(count)
        if self._turns < was.turn:
            return range(count, count)
        # If passes before the saved epoch are not over for all groups, their epochs are repeated, too.
        return range(max(0, was.epoch - max(0, was.epoch_pass - self.first)), count)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the rest of `range(count)`, one such loop of the script after the other."""
        numbers = self.remaining(count)
        turn, loader, was = self._turns, self._here.loader, self._earlier.condition
        self._turns += 1
        if was is not None and turn < was.turn:
            return
        if was is not None and turn == was.turn and isinstance(loader, ShardedLoader):
            # Passes of epochs that are not repeated count as begun.
            loader.skip_to(min(was.epoch_pass, self.first))
        try:
            for number in numbers:
                passes = loader.passes if isinstance(loader, ShardedLoader) else 0
                self._at = replace(self._at, turn=turn, epoch=number, epoch_pass=passes)
                if loader is None:
                    self._begin_unseen(was if number == numbers.start else None)
                self.in_epochs = True
                yield number
        finally:
            # Also if the script leaves the loop early.
            self.in_epochs = False
            self._here.owner.loop_ended()
        # A death after the loop must not repeat it.
        self._at = replace(self._at, turn=turn + 1, epoch=0, epoch_pass=self._at.passes)

    def _begin_unseen(self, was: WorkerState | None) -> None:
        """Begin an epoch of a script that divides its data itself."""
        # Its batches are not known, so a repeated epoch is read as a whole, from the generators of its begin.
        if was is not None:
            self._rates.restore(self._earlier.later or was, self.steps)
            _restore_trains(self._worker.parts, was)
            if self._earlier.own:
                put_back(was.begin, (), self._worker.device)
        self._at = replace(self._at, begin=self._generator_state())
        self._begin()


def _restore_buffers(parts: ModelParts, left: Mapping[str, torch.Tensor]) -> None:
    names = [described.name for each in (parts.buffers, parts.parameters) for described in each]
    for name, buffer in zip(names, (*parts.buffer_tensors, *parts.tensors), strict=True):
        found = left.get(name)
        # A meta buffer has no values: the layer is on another worker.
        if buffer.is_meta or found is None:
            continue
        if (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
            was, now = (f"{tuple(t.shape)} of {t.dtype}" for t in (found, buffer))
            raise ConfigError(f"model buffer {name}", now, f"must be {was}, as before")
        with torch.no_grad():
            buffer.copy_(found)


def _restore_trains(parts: ModelParts, left: WorkerState) -> None:
    """Freeze and thaw parameters as they were."""
    # The script may have thawed a layer in an epoch that is over, and is not repeated.
    for described, tensor in zip(parts.parameters, parts.tensors, strict=True):
        trains = left.trains.get(described.name)
        if isinstance(trains, bool) and not tensor.is_meta:
            tensor.requires_grad_(trains)
