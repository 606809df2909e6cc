"""The prediction of a rehearsal that has run."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from topotrain.config.topology import Address, Role
from topotrain.tools.prediction.failures import goodput
from topotrain.tools.prediction.measured_errors import expected_error
from topotrain.tools.prediction.prediction import (
    BusyResource,
    LinkLoad,
    Prediction,
    ProcessMemory,
    Staleness,
    StepParts,
    Wait,
)
from topotrain.tools.prediction.rehearsable import changes, processes_of
from topotrain.tools.prediction.rehearsal import Rehearsal
from topotrain.tools.prediction.rehearsed.message_records import Moment
from topotrain.tools.prediction.rehearsed.rehearsed_worker import RehearsedWorker, StepRecord

_SHOWN_WAIT_S = 1e-6


class RehearsalResult:
    """The result of a rehearsal that has run."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self._first = rehearsal.measured.start
        self._steps = [record for script in rehearsal.scripts for record in script.records[self._first :]]

    def prediction(self, memory: Sequence[ProcessMemory]) -> Prediction:
        """Return the prediction. Raises ConfigError where failures end the job."""
        rehearsal = self._rehearsal
        job, topology = rehearsal.job, rehearsal.topology
        times = sorted(record.ended - record.begun for record in self._steps)
        parts, waits = self._parts()
        begun = max(script.records[0].begun for script in rehearsal.scripts if script.records)
        step_s = median(times)
        return Prediction(
            framework=topology.framework,
            processes=processes_of(topology),
            step_s=step_s,
            step_p95_s=quantile(times, 0.95),
            samples_per_s=sum(script.samples * self._rate(script) for script in rehearsal.scripts),
            parts=parts,
            waits=waits,
            busiest=tuple(self._busiest()),
            links=tuple(self._links()),
            memory=tuple(memory),
            staleness=self._staleness(),
            start_s=rehearsal.probe.start_s + begun,
            goodput=goodput(job, topology, rehearsal.machines, rehearsal.probe, step_s),
            error=expected_error(job, rehearsal.machines, topology, rehearsal.probe.machine.cores),
            same_as_one_process=not changes(job),
            seed=rehearsal.sim.seed,
        )

    def _rate(self, script: RehearsedWorker) -> float:
        """Return the steps of a worker per second that count."""
        measured = self._measured(script)
        if measured:
            return sum(not record.late for record in measured) / (measured[-1].ended - measured[0].begun)
        # Too slow for a step in all of the rehearsal: by arithmetic, and as long as the slowest worker of its group.
        usual = median(record.ended - record.begun for record in self._steps)
        group = [each for each in self._rehearsal.scripts if each.me.group == script.me.group]
        return 1.0 / (usual + max(each.extra_s for each in group))

    def _measured(self, script: RehearsedWorker) -> Sequence[StepRecord]:
        """Return the steps of a worker that count: of a slow one all but its first one."""
        return script.records[self._first :] or script.records[1:]

    # --- a step ----------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[StepParts, tuple[Wait, ...]]:
        spent: dict[str, float] = defaultdict(float)
        waited: dict[Address, float] = defaultdict(float)
        for script in self._rehearsal.scripts:
            for record in script.records[self._first :]:
                at = record.begun
                for part, moment, who in self._moments(script.me, record):
                    # In their order: what was over before takes no time of its own.
                    until = min(max(at, moment), record.ended)
                    spent[part] += until - at
                    if part == "wait":
                        waited[who] += until - at
                    at = until
        count = len(self._steps)
        parts = StepParts(**{name: spent[name] / count for name in ("compute", "push", "apply", "pull", "wait")})
        waits = [Wait(str(who), seconds / count) for who, seconds in sorted(waited.items(), key=lambda each: -each[1])]
        return parts, tuple(wait for wait in waits if wait.seconds > _SHOWN_WAIT_S)

    def _moments(self, me: Address, record: StepRecord) -> Iterator[tuple[str, float, Address]]:
        """Yield name, end and process of each part of a step; that of a wait is the one that is waited for."""
        yield "compute", record.computed, me
        messages, step = self._rehearsal.messages, record.number
        if record.exchanged:
            rounds = (Moment.PUSHED, Moment.REDUCED, Moment.MEAN), (Moment.COMMITTED, Moment.ANSWERED, None)
            for sent, left, here in rounds:
                last = messages.last(sent, me.group, step)
                yield "push", messages.time(sent, me, step), me
                if last is not None:
                    yield "wait", last[1], last[0]
                yield "apply", messages.time(left, me, step), me
                if here is not None:
                    yield "pull", messages.time(here, me, step), me
        yield "pull", record.ended, me

    def _staleness(self) -> Staleness:
        seen = sorted(float(value) for record in self._steps for value in record.staleness)
        return Staleness(fmean(seen), quantile(seen, 0.95), seen[-1]) if seen else Staleness(0.0, 0.0, 0.0)

    # --- resources ---------------------------------------------------------------------------------------------------

    def _busiest(self) -> Sequence[BusyResource]:
        before, after = self._rehearsal.warm, self._rehearsal.use()
        assert before is not None
        seconds = max(after.time - before.time, 1e-12)
        shares = {name: (busy - before.busy.get(name, 0.0)) / seconds for name, busy in after.busy.items()}
        return [
            BusyResource(name, min(1.0, share)) for name, share in sorted(shares.items(), key=lambda each: -each[1])
        ]

    def _links(self) -> Iterator[LinkLoad]:
        rehearsal, messages = self._rehearsal, self._rehearsal.messages
        begun = rehearsal.warm.time if rehearsal.warm is not None else 0.0
        mean = len(self._steps) / len(rehearsal.scripts)
        scripts = {script.me: script for script in rehearsal.scripts}
        for me, to in sorted(messages.sizes.keys() | messages.others.keys()):
            # Of two servers the steps are those of the first worker: they are the same for all, or have no number.
            worker = next((end for end in (me, to) if end.role is Role.WORKER), rehearsal.workers[0])
            measured = self._measured(scripts[worker])
            # A worker that makes steps alone exchanges in some of them only.
            exchanged = {record.number for record in measured if record.exchanged}
            numbered = [size for step, sizes in messages.sizes[me, to].items() if step in exchanged for size in sizes]
            rest = [size for time, size in messages.others[me, to] if time >= begun]
            steps = max(1, len(measured))
            count = len(numbered) / steps + len(rest) / mean
            if count:
                nbytes = sum(numbered) / steps + sum(rest) / mean
                yield LinkLoad(f"{me} > {to}", nbytes, count, rehearsal.hosts.far(me, to))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of sorted values does not exceed."""
    return values[min(len(values) - 1, max(0, round(share * len(values)) - 1))]
