"""The fault schedule of a simulation, drawn from a seed.

The death of a worker is the death of its group (`membership`). So is the end of one of its connections, because the
worker ends with it, and the launcher restarts the group.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from faulty_network import NetworkFaults

from topotrain.core import protocol as m
from topotrain.core.protocol import Message

CALM = NetworkFaults()
FAR = NetworkFaults(delay=(0.001, 0.05))
"""Servers receive related messages at very different times."""
STORM = NetworkFaults(delay=(0.0005, 0.004), late=0.02, duplicate=0.15, reorder=0.25)
"""Delay, duplicates and reordering, all at once."""
ECHO = NetworkFaults(delay=(0.0005, 0.004), late=0.3, duplicate=0.5)
"""Old messages arrive a second time."""
VIEWS = NetworkFaults(delay=(0.0005, 0.01), snapshots=False)
"""As on real transports with shared memory: in order and once, with bodies read on arrival."""

ASSIGNED = 3
"""Number of the parameter that scripts assign."""

NETWORKS: Mapping[str, NetworkFaults] = {"calm": CALM, "far": FAR, "storm": STORM, "views": VIEWS, "echo": ECHO}
_DRAWN = ("calm", "far", "storm", "views")
# The share of storms that become echoes. A fifth network in _DRAWN would have changed every seed.
_ECHO_SHARE = 0.3


class FaultKind(str, Enum):
    """The kinds of faults."""

    KILL = "kill"  # all processes of a worker group die
    CUT = "cut"  # one connection of a worker ends, to a server or to another worker of its group
    PAUSE = "pause"  # one process stops for a while
    CLOCK = "clock"  # the clock of a host jumps
    CRASH = "crash"  # a server dies, and the whole job restarts from its newest snapshot
    LEAVE = "leave"  # a group is asked to leave, where the servers agree
    LOSE = "lose"  # a group is given up, where the servers agree
    JOIN = "join"  # a group joins, where the servers agree
    LAG = "lag"  # the steps of one worker take longer from here on
    FORK = "fork"  # the next start of one worker fails once


MOVES = frozenset({FaultKind.LEAVE, FaultKind.LOSE, FaultKind.JOIN})

ANY = -1
"""Incarnation of a fault at a message of any process: from server to server, too."""
_ENDING = (m.Finish, m.ModelBufferValue, m.Drained, m.FinalValue, m.FinalRequest, m.BufferRequest)
"""The messages of the job's end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at message `after` of an incarnation or of any process, or at a time."""

    group: int
    incarnation: int = 0  # of the group, for a fault at a message
    index: int = 0
    after: int = -1  # messages of this kind before it; negative: not at a message
    kind: type[Message] = Message
    at: float = -1.0  # virtual seconds; negative: not at a time
    # Seconds until the group restarts, the process continues, or (LEAVE) the group must be gone. LAG: by which a step
    # is longer.
    away: float = 0.1
    what: FaultKind = FaultKind.KILL
    server: int = -1  # CUT: the shard at the other end. PAUSE: the shard to pause instead of the worker, -1: none
    peer: int = -1  # CUT: the worker of the group at the other end, instead of a shard

    def __str__(self) -> str:
        worker = f"worker ({self.group},{self.index})"
        if self.at >= 0:
            when = f"at {self.at:.4f} s"
        else:
            kind = "message" if self.kind is Message else self.kind.__name__
            whose = "any process" if self.incarnation == ANY else f"{worker} of incarnation {self.incarnation}"
            when = f"at {kind} {self.after + 1} of {whose}"
        if self.what is FaultKind.CLOCK:
            return f"{when}: the clock of the host of server (0,0) jumps"
        if self.what is FaultKind.CRASH:
            return f"{when}: the whole job dies, and restarts from its newest snapshot"
        if self.what in MOVES:
            how = {
                FaultKind.LEAVE: f"leaves within {self.away:g} s",
                FaultKind.LOSE: "is lost for good",
                FaultKind.JOIN: "joins",
            }
            return f"{when}: worker group {self.group} {how[self.what]}"
        if self.what is FaultKind.PAUSE:
            whom = worker if self.server < 0 else f"server {self.server} of worker group {self.group}"
            return f"{when}: {whom} is paused for {self.away:g} s"
        if self.what is FaultKind.FORK:
            return f"{when}: the next start of {worker} fails, and its group restarts {self.away:g} s later"
        if self.what is FaultKind.LAG:
            return f"{when}: each step of {worker} takes {self.away:g} s longer"
        again = f"its group restarts {self.away:g} s later"
        if self.what is FaultKind.CUT and self.peer >= 0:
            return f"{when}: {worker} loses its connection to worker ({self.group},{self.peer}); {again}"
        if self.what is FaultKind.CUT:
            return f"{when}: {worker} loses its connection to shard {self.server}; {again}"
        return f"{when}: worker group {self.group} is killed and restarts {self.away:g} s later"


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """Everything about a simulation that the seed decides in advance."""

    network: str  # a name of NETWORKS
    batches: int
    epochs: int
    mode: str  # "lease" or "static"
    detects: bool  # servers learn at once that a process is gone, as from a launcher on the same host
    faults: tuple[Fault, ...]
    every: float = 0.0  # seconds between snapshots; 0: only where a clock jumps, without worker states
    opens: float = 0.0  # servers start within so many seconds
    survive: float = 0.8  # share of the deaths in groups that recover in place after which the launcher lets them
    assigns: bool = False  # the scripts assign the cells of one parameter, before the step of each batch


def draw(name: str, seed: int, groups: int, workers: int, shards: int, mortal: bool) -> FaultSchedule:
    """Return the schedule of a seed for a layout; mortal: the groups can restart."""
    # The order of the draws belongs to the meaning of a seed, so a new draw comes last.
    rng = random.Random(f"{name} {seed}")
    network, mode = rng.choice(_DRAWN), rng.choice(("lease", "lease", "static"))
    batches, epochs, detects = rng.randint(2, 8), rng.choice((1, 1, 2)), rng.random() < 0.7
    # All groups die at the same time, which single draws would hardly ever give.
    if mortal and rng.random() < 0.1:
        at = rng.uniform(0.0, 0.1)
        faults: Sequence[Fault] = [Fault(group, at=at, away=rng.choice((0.0, 0.05, 3.0))) for group in range(groups)]
    else:
        kinds = (
            (FaultKind.KILL, FaultKind.KILL, FaultKind.CUT, FaultKind.PAUSE, FaultKind.CLOCK)
            if mortal
            else (FaultKind.PAUSE, FaultKind.CLOCK)
        )
        faults = [_draw_fault(rng, rng.choice(kinds), groups, workers, shards) for _ in range(rng.randint(1, 4))]
    if network == "storm" and rng.random() < _ECHO_SHARE:
        network = "echo"
    every = rng.choice((0.0, 0.003, 0.01, 0.03))
    # Without snapshots a crash would only test the beginning again.
    crashes = [_draw_crash(rng, groups, workers) for _ in range(rng.choice((0, 1, 1, 2)))] if every else []
    opens = rng.choice((0.0, 0.005, 0.03))
    return FaultSchedule(
        network=network,
        batches=batches,
        epochs=epochs,
        mode=mode,
        detects=detects,
        faults=(*faults, *crashes),
        every=every,
        opens=opens,
    )


def _draw_crash(rng: random.Random, groups: int, workers: int) -> Fault:
    """Draw a crash of the whole job."""
    group, index = rng.randrange(groups), rng.randrange(workers)
    if rng.random() < 0.5:
        return Fault(group, index=index, at=rng.uniform(0.005, 0.12), away=0.0, what=FaultKind.CRASH)
    # At a message, the crash is often within a burst of messages.
    return Fault(group, 0, index, rng.randint(0, 60), away=0.0, what=FaultKind.CRASH)


def draw_moves(name: str, seed: int, groups: Sequence[int]) -> tuple[Fault, ...]:
    """Draw which of these worker groups leave and join in a simulation of a layout."""
    # A generator of its own, so that the other faults of a seed stay as they were before groups could move.
    rng = random.Random(f"{name} {seed} moves")
    if not groups or rng.random() < 0.6:
        return ()
    verbs = (FaultKind.LEAVE, FaultKind.LEAVE, FaultKind.LOSE, FaultKind.JOIN, FaultKind.JOIN)
    drawn = [(rng.uniform(0.0, 0.12), rng.choice(groups), rng.choice(verbs)) for _ in range(rng.randint(1, 5))]
    return tuple(Fault(g, at=at, away=rng.choice((0.0, 0.01, 0.5)), what=verb) for at, g, verb in sorted(drawn))


def draw_assigns(name: str, seed: int) -> bool:
    """Draw whether the scripts of a simulation assign parameters."""
    # A generator of its own, as for `draw_moves`.
    return random.Random(f"{name} {seed} assigns").random() < 0.3


def draw_pairs(
    name: str, seed: int, groups: int, workers: int, moves: Sequence[int], mortal: bool
) -> tuple[Fault, ...]:
    """Draw faults that matter beside another one.

    They are starts that fail, simultaneous requests, and ends during the job's end. moves: the groups that can leave.
    mortal: the groups can restart.
    """
    # A generator of its own, as for `draw_moves`.
    rng = random.Random(f"{name} {seed} pairs")
    group, index, away = rng.randrange(groups), rng.randrange(workers), rng.choice((0.0, 0.01, 0.1))
    found = list[Fault]()
    if mortal and rng.random() < 0.3:
        fork = Fault(group, at=0.0, index=index, away=away, what=FaultKind.FORK)
        found += [fork, Fault(group, at=rng.uniform(0.0, 0.12), index=rng.randrange(workers), away=away)]
    if rng.random() < 0.3:
        # Two changes, a snapshot, and the end of a stop can be requested at once.
        at, verbs = rng.uniform(0.0, 0.12), rng.sample(sorted(MOVES), 2)
        chosen = rng.choices(moves, k=2) if moves else ()
        found += [Fault(each, at=at, away=away, what=verb) for each, verb in zip(chosen, verbs, strict=False)]
        found.append(Fault(group, at=at, what=FaultKind.CLOCK))
        found += [Fault(group, at=at + away, away=0.0, what=FaultKind.CRASH)] * (rng.random() < 0.3)
    if rng.random() < 0.4:
        end = Fault(group, ANY, index, rng.choice((0, 0, 1, 2, 3)), rng.choice(_ENDING), server=0, away=away)
        deaths = (FaultKind.KILL, FaultKind.CUT) if mortal else ()
        kinds = (FaultKind.CLOCK, FaultKind.CRASH, FaultKind.PAUSE, *deaths)
        found += [replace(end, what=what) for what in rng.sample(kinds, rng.choice((1, 1, 2)))]
    return tuple(found)


def draw_group_faults(name: str, seed: int, groups: int, workers: int) -> tuple[Fault, ...]:
    """Draw faults of single workers.

    Their groups add up their gradients among themselves.
    """
    # A generator of its own, as for `draw_moves`.
    rng = random.Random(f"{name} {seed} group")
    found = []
    if workers > 1 and rng.random() < 0.5:
        group, index, away = rng.randrange(groups), rng.randrange(workers), rng.choice((0.002, 0.01, 0.05))
        found.append(Fault(group, index=index, at=rng.uniform(0.0, 0.05), away=away, what=FaultKind.LAG))
    for _ in range(rng.choice((0, 0, 1, 2)) if workers > 1 else 0):
        group, (index, peer), away = rng.randrange(groups), rng.sample(range(workers), 2), rng.choice((0.0, 0.01, 0.1))
        cut = Fault(group, index=index, away=away, what=FaultKind.CUT, peer=peer)
        if rng.random() < 0.5:
            found.append(replace(cut, at=rng.uniform(0.0, 0.12)))
        else:
            found.append(replace(cut, incarnation=rng.choice((0, 0, 1)), after=rng.randint(0, 80)))
    return tuple(found)


def _draw_fault(rng: random.Random, what: FaultKind, groups: int, workers: int, shards: int) -> Fault:
    group, index, server = rng.randrange(groups), rng.randrange(workers), rng.randrange(shards)
    if what is FaultKind.PAUSE:
        server = rng.choice((-1, server))
    # A restart may come before servers notice the death, during the replies to it, or long after.
    away = rng.choice((0.0, 0.003, 0.05, 3.0)) if what is not FaultKind.PAUSE else rng.choice((0.01, 0.1, 1.0))
    if rng.random() < 0.4:
        return Fault(group, at=rng.uniform(0.0, 0.12), away=away, what=what, index=index, server=server)
    # Later incarnations, too: a group may die again while it rejoins.
    incarnation = rng.choice((0, 0, 1, 2))
    return Fault(group, incarnation, index, rng.randint(0, 50), away=away, what=what, server=server)
