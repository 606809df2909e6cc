"""Seeded simulations of a job: real servers and clients on a simulated network.

They run in virtual time. A seed determines the whole run: the faults, their times, and the order of messages. So every
finding can be reproduced. A run is right if all of these hold:

* Every batch is counted exactly once, on all shards, in the end and in every snapshot.
* No worker saw fewer updates than before (`cell_observers`).
* Values that scripts assign (`tt.assign`) are there with their steps, and no assignment is made twice.
* No actor waits forever.

A schedule that shows a bug is shortened as long as it still does (delta debugging: Zeller and Hildebrandt, 2002, one
fault at a time).
"""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from batch_counts import BatchCounts
from fault_schedule import (
    MOVES,
    FaultSchedule,
    draw,
    draw_assigns,
    draw_group_faults,
    draw_moves,
    draw_pairs,
)
from fault_trial import Trial
from island_trial import FRAGMENTS, OUTER, IslandTrial, trains_alone
from simulation import job

from topotrain.config.job import (
    Agreement,
    Apply,
    Cluster,
    Compression,
    ConfigError,
    Grads,
    Job,
    Keep,
    Merge,
    Pull,
    Reduce,
    Weigh,
)
from topotrain.config.topology import Address, layout
from topotrain.core.protocol import Message
from topotrain.extensions.elastic.eligibility import leave_refusal, refusal, singly

LAYOUTS: Mapping[str, Job] = {
    "downpour": job(3, 1, 1),
    "downpour of pairs": job(2, 2, 2),
    "downpour on three shards": job(3, 1, 3),
    "sandblaster": job(1, 2, 2),
    "sandblaster of three": job(1, 3, 3),
    "hogwild": job(2, 1, 2, nserver_groups=2),
    "hogwild of pairs": job(4, 2, 1, nserver_groups=2),
    "bounded": job(3, 1, 2, max_staleness=1),
    "in step": job(2, 2, 2, max_staleness=0),
    "warming up": job(3, 1, 2, warmup_steps=3),
    "encoded": job(2, 2, 2, compression=Compression.kFp16),
    # Workers with backups commit without the others, so they cannot see the group's mean.
    "backup workers": job(1, 3, 2, backup=1, grads=Grads.kHidden, per_worker_batch=True),
    "hogwild of three": job(3, 1, 1, nserver_groups=3, sync_freq=2),
    "outer optimizer": job(3, 1, 2, outer=OUTER),
    "quorum": job(4, 1, 2, outer=OUTER, quorum=2),
    "ring average": job(3, 1, 2, nserver_groups=3, agreement=Agreement.kRingAverage),
    "elastic averaging": job(3, 1, 2, nserver_groups=3, sync_freq=2, agreement=Agreement.kElastic, moving_rate=0.25),
    "gossip": job(4, 1, 1, nserver_groups=4, sync_freq=2, agreement=Agreement.kGossip),
    "islands": job(4, 1, 2, outer=OUTER, quorum=1, sync_freq=4, fragments=2),
    "islands in step": job(3, 1, 2, outer=OUTER, sync_freq=4, fragments=2, overlap=1),
    "islands of a quorum": job(4, 1, 2, outer=OUTER, quorum=2, sync_freq=3),
    "islands that wait": job(3, 1, 2, outer=OUTER, sync_freq=3, overlap=2),
    "islands of pairs": job(3, 2, 2, outer=OUTER, quorum=1, sync_freq=4, fragments=2),
    "islands of pairs in step": job(3, 2, 2, outer=OUTER, sync_freq=4, fragments=2, overlap=1),
    "islands of pairs that wait": job(2, 2, 2, outer=OUTER, sync_freq=3, overlap=2),
    "islands of three": job(3, 3, 1, outer=OUTER, quorum=2, sync_freq=3),
    # With a bound the servers restart a group by themselves, and do not wait for the launcher.
    "two with a bound": job(1, 2, 2, max_staleness=1),
    "three with a bound": job(1, 3, 3, max_staleness=1),
}
"""Small layouts of every framework that has servers, by name."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The result of one simulation."""

    seed: int
    layout: str
    schedule: FaultSchedule
    wrong: str  # the error; "": the run was right
    kills: int  # groups that died
    crashes: int  # of the whole job
    moves: int  # groups that left, were given up, or joined
    snapshots: int  # those that were published and compared
    messages: int  # those that arrived
    seconds: float  # of virtual time
    digest: int  # CRC-32 of all messages in order of arrival
    moments: tuple[float | None, ...]  # of each fault of the schedule, in virtual seconds; None: it did not happen


def prepared(job: Job, name: str) -> Job:
    """Return the job to simulate: its layout and rules, with integers as a model.

    Raises:
        ConfigError: its workers reduce gradients among themselves, or share a partitioned model.
    """
    topology = layout(job.cluster)
    if topology.collective or topology.server_collective or job.splits:
        raise ConfigError("--layout", name, "only jobs in which gradients go directly to servers can be simulated")
    # Other codecs would change the integers that the check counts by.
    exact = job.cluster.compression in (Compression.kNone, Compression.kFp16)
    cluster = job.cluster if exact else replace(job.cluster, compression=Compression.kNone)
    grads = Grads.kHidden if singly(job) else Grads.kVisible
    if cluster.outer is not None:
        cluster = _counting(cluster)
    plain = replace(job, apply=Apply.kAtStep, pull=Pull.kStep, grads=grads, per_worker_batch=singly(job))
    # Without a link all units are on one host. With several, the sums of hosts need a network that keeps the order of
    # messages, and most of the simulated ones do not.
    return replace(plain, cluster=replace(cluster, link=None), reduce=Reduce.kSum)


def _counting(cluster: Cluster) -> Cluster:
    """Return the block with rules by which each step of a worker counts as 1."""
    fragments = next(n for n in range(FRAGMENTS, 0, -1) if n <= cluster.fragments and not cluster.sync_freq % n)
    return replace(
        cluster, outer=OUTER, weigh=Weigh.kSamples, keep=Keep.kAdd, blend=0.5, merge=Merge.kMean, fragments=fragments
    )


def layout_of(seed: int) -> str:
    """Return the layout that a seed simulates by default."""
    return tuple(LAYOUTS)[seed % len(LAYOUTS)]


def schedule_of(job: Job, name: str, seed: int) -> FaultSchedule:
    """Return the schedule of a seed for a layout."""
    topology = layout(job.cluster)
    # A group that cannot restart gets no deaths, only pauses and jumps of clocks.
    mortal = not any(refusal(job, topology, group) for group in range(topology.worker_groups))
    sizes = (topology.worker_groups, topology.workers_per_group, topology.shards)
    schedule = draw(name, seed, *sizes, mortal)
    if trains_alone(job):
        # So many for each group, which makes several steps before it tells of them.
        schedule = replace(schedule, batches=schedule.batches * topology.worker_groups)
    elastic = [group for group in range(topology.worker_groups) if not leave_refusal(job, topology, group)]
    # With fixed shares no other group would read the batches of one that has left.
    moves = draw_moves(name, seed, elastic) if schedule.mode == "lease" else ()
    # A batch that goes to another server group with the lease of a dead group would be assigned in both.
    exact = not (singly(job) or trains_alone(job)) and BatchCounts(topology).exact
    assigns = exact and (schedule.mode == "static" or not topology.synced) and draw_assigns(name, seed)
    alone = draw_group_faults(name, seed, *sizes[:2]) if trains_alone(job) and mortal else ()
    pairs = draw_pairs(name, seed, *sizes[:2], elastic if schedule.mode == "lease" else (), mortal)
    return replace(schedule, faults=(*schedule.faults, *moves, *alone, *pairs), assigns=assigns)


def run_trial(job: Job, name: str, seed: int, schedule: FaultSchedule) -> TrialVerdict:
    """Run one simulation."""
    trial = (IslandTrial if trains_alone(job) else Trial)(job, seed, schedule)
    seen = [0, 0]
    crashes = 0

    def observe(sender: Address, to: Address, message: Message) -> None:
        seen[0] += 1
        # Equal digests mean that two runs of a seed were the same, message by message.
        line = f"{trial.sim.now!r} {sender} {to} {type(message).__name__}"
        seen[1] = zlib.crc32(line.encode(), seen[1])

    try:
        trial.transport.observers.append(observe)
        while trial.run().crashed:
            crashes += 1
            trial = trial.again()
            # Each start has a transport of its own.
            trial.transport.observers.append(observe)
        wrong = _text(trial.wrong())
    # Every error is a finding about this seed; the other seeds still run.
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    moves = sum(fault.what in MOVES for _, fault in trial.log)
    counted = (trial.kills, crashes, moves, trial.snapshots, seen[0], round(trial.sim.now, 4), seen[1])
    injected = {fault: round(moment, 4) for moment, fault in trial.log}
    return TrialVerdict(seed, name, schedule, wrong, *counted, tuple(injected.get(fault) for fault in schedule.faults))


def _text(wrong: Sequence[tuple[int, int, float]]) -> str:
    if wrong and wrong[0][0] < 0:
        return "worker (0,0) did not finish"
    cells = ", ".join(f"cell {cell} of p{parameter} is {value:g}" for parameter, cell, value in wrong[:3])
    more = f" and {len(wrong) - 3} others" if len(wrong) > 3 else ""
    return f"counted wrongly: {cells}{more}, where 1 is right" if wrong else ""


@contextmanager
def one_core() -> Iterator[None]:
    """Inside, this process runs on one core: the threads of a simulation take turns, and switch faster there."""
    allowed = os.sched_getaffinity(0)
    # By pid, so that several runs use several.
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def run_seeds(seeds: Sequence[int], job: Job | None = None, name: str = "") -> Iterator[TrialVerdict]:
    """Run a simulation for each seed, of one layout or of the seed's own."""
    for seed in seeds:
        mine = name or layout_of(seed)
        used = LAYOUTS[mine] if job is None else job
        yield run_trial(used, mine, seed, schedule_of(used, mine, seed))


def shrink(job: Job, verdict: TrialVerdict) -> tuple[TrialVerdict, tuple[int, ...]]:
    """Shorten a schedule that shows a bug; return its verdict and the faults left."""
    again = partial(run_trial, job, verdict.layout, verdict.seed)
    best, kept = verdict, tuple(range(len(verdict.schedule.faults)))
    shorter = True
    while shorter:
        shorter = False
        for leave in kept:
            fewer = tuple(at for at in kept if at != leave)
            found = again(chosen(verdict.schedule, fewer))
            if found.wrong:
                best, kept, shorter = found, fewer, True
                # From the beginning: without this fault an earlier one may be superfluous, too.
                break
    return best, kept


def chosen(schedule: FaultSchedule, kept: Sequence[int]) -> FaultSchedule:
    """Return the schedule with only these of its faults."""
    return replace(schedule, faults=tuple(schedule.faults[at] for at in kept))
