"""What goes wrong in a rehearsal, and when: drawn from a seed, so that one number says all of it.

A worker's death is the death of its group (`membership`), and so is the end of one of its connections: the worker ends
with it, and the launcher starts the group again. Pauses stop a process, not the others. Only hosts have clocks, and use
them to ask for snapshots: one that jumps asks at a wrong moment, and several times.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from topotrain.core.protocol import Message
from topotrain.tools.simulator.sim_network import NetworkFaults

CALM = NetworkFaults()
FAR = NetworkFaults(delay=(0.001, 0.05))
"""Servers hear of the same thing at very different moments."""
STORM = NetworkFaults(delay=(0.0005, 0.004), late=0.02, duplicate=0.15, reorder=0.25)
"""Delay, duplicates and reordering, all at once."""
ECHO = NetworkFaults(delay=(0.0005, 0.004), late=0.3, duplicate=0.5)
"""What was said long ago comes once more."""
VIEWS = NetworkFaults(delay=(0.0005, 0.01), snapshots=False)
"""As on real roads that show memory: in order and once, bodies read on arrival."""

WEATHERS: Mapping[str, NetworkFaults] = {"calm": CALM, "far": FAR, "storm": STORM, "views": VIEWS, "echo": ECHO}
_DRAWN = ("calm", "far", "storm", "views")
_ECHOES = 0.3


class FaultKind(str, Enum):
    """KILL: all processes of a worker group. CUT: one connection of a worker. PAUSE: one process. CLOCK: it jumps.

    CRASH: a server dies, and so all of the job starts again from its newest snapshot.
    A group is told to LEAVE, is lost for good (LOSE), or comes (JOIN), where the servers agree.
    """

    KILL = "kill"
    CUT = "cut"
    PAUSE = "pause"
    CLOCK = "clock"
    CRASH = "crash"
    LEAVE = "leave"
    LOSE = "lose"
    JOIN = "join"


MOVES = frozenset({FaultKind.LEAVE, FaultKind.LOSE, FaultKind.JOIN})


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong: at the `after`-th message of a worker of an incarnation, or at a moment.

    Args:
        group, index: the worker.
        incarnation: of the group, where it is about a message.
        after: messages of this kind before; negative: not about a message.
        kind: of the message.
        at: the moment, in virtual seconds; negative: not about a moment.
        away: seconds until the group is started again, or the process goes on; LEAVE: that it has for leaving.
        server: CUT: the shard at the other end. PAUSE: the shard that is paused, instead of the worker; -1: none.
    """

    group: int
    incarnation: int = 0
    index: int = 0
    after: int = -1
    kind: type[Message] = Message
    at: float = -1.0
    away: float = 0.1
    what: FaultKind = FaultKind.KILL
    server: int = -1

    def __str__(self) -> str:
        worker = f"worker ({self.group},{self.index})"
        if self.at >= 0:
            when = f"at {self.at:.4f} s"
        else:
            kind = "message" if self.kind is Message else self.kind.__name__
            when = f"at {kind} {self.after + 1} of {worker} of incarnation {self.incarnation}"
        if self.what is FaultKind.CLOCK:
            return f"{when}: the clock of the host of server (0,0) jumps"
        if self.what is FaultKind.CRASH:
            return f"{when}: the whole job dies, and starts again from its newest snapshot"
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
        again = f"its group is started again {self.away:g} s later"
        if self.what is FaultKind.CUT:
            return f"{when}: {worker} loses its connection to shard {self.server}; {again}"
        return f"{when}: worker group {self.group} is killed and started again {self.away:g} s later"


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """All of a rehearsal that the seed decides before it begins.

    Args:
        weather: a name of WEATHERS.
        batches, epochs: what is read. mode: "lease" or "static".
        tells: servers hear at once that a process is gone, as from a launcher on the same host.
        faults: what goes wrong.
        every: seconds between two snapshots; 0: there are some only where a clock jumps, and workers leave no states.
        opens: servers come up within so many seconds.
    """

    weather: str
    batches: int
    epochs: int
    mode: str
    tells: bool
    faults: tuple[Fault, ...]
    every: float = 0.0
    opens: float = 0.0


def draw(name: str, seed: int, groups: int, workers: int, shards: int, mortal: bool) -> FaultSchedule:
    """The schedule of a seed.

    Args:
        name: of the layout; other layouts have other schedules.
        groups, workers, shards: worker groups, workers in each, shards.
        mortal: its groups can be started again.
    """
    dice = random.Random(f"{name} {seed}")
    weather, mode = dice.choice(_DRAWN), dice.choice(("lease", "lease", "static"))
    batches, epochs, tells = dice.randint(2, 8), dice.choice((1, 1, 2)), dice.random() < 0.7
    if mortal and dice.random() < 0.1:
        at = dice.uniform(0.0, 0.1)
        faults: Sequence[Fault] = [Fault(group, at=at, away=dice.choice((0.0, 0.05, 3.0))) for group in range(groups)]
    else:
        kinds = (
            (FaultKind.KILL, FaultKind.KILL, FaultKind.CUT, FaultKind.PAUSE, FaultKind.CLOCK)
            if mortal
            else (FaultKind.PAUSE, FaultKind.CLOCK)
        )
        faults = [_one(dice, dice.choice(kinds), groups, workers, shards) for _ in range(dice.randint(1, 4))]
    if weather == "storm" and dice.random() < _ECHOES:
        weather = "echo"
    every = dice.choice((0.0, 0.003, 0.01, 0.03))
    crashes = [_crash(dice, groups, workers) for _ in range(dice.choice((0, 1, 1, 2)))] if every else []
    opens = dice.choice((0.0, 0.005, 0.03))
    return FaultSchedule(weather, batches, epochs, mode, tells, (*faults, *crashes), every, opens)


def _crash(dice: random.Random, groups: int, workers: int) -> Fault:
    """A job has died by now and then, and often in the middle of what a worker says in one go."""
    group, index = dice.randrange(groups), dice.randrange(workers)
    if dice.random() < 0.5:
        return Fault(group, index=index, at=dice.uniform(0.005, 0.12), away=0.0, what=FaultKind.CRASH)
    return Fault(group, 0, index, dice.randint(0, 60), away=0.0, what=FaultKind.CRASH)


def drawn_moves(name: str, seed: int, groups: Sequence[int]) -> tuple[Fault, ...]:
    """Which of these worker groups leave and come, in some rehearsals of a layout; by dice of their own."""
    dice = random.Random(f"{name} {seed} moves")
    if not groups or dice.random() < 0.6:
        return ()
    verbs = (FaultKind.LEAVE, FaultKind.LEAVE, FaultKind.LOSE, FaultKind.JOIN, FaultKind.JOIN)
    drawn = [(dice.uniform(0.0, 0.12), dice.choice(groups), dice.choice(verbs)) for _ in range(dice.randint(1, 5))]
    return tuple(Fault(g, at=at, away=dice.choice((0.0, 0.01, 0.5)), what=verb) for at, g, verb in sorted(drawn))


def _one(dice: random.Random, what: FaultKind, groups: int, workers: int, shards: int) -> Fault:
    group, index, server = dice.randrange(groups), dice.randrange(workers), dice.randrange(shards)
    if what is FaultKind.PAUSE:
        server = dice.choice((-1, server))
    away = dice.choice((0.0, 0.003, 0.05, 3.0)) if what is not FaultKind.PAUSE else dice.choice((0.01, 0.1, 1.0))
    if dice.random() < 0.4:
        return Fault(group, at=dice.uniform(0.0, 0.12), away=away, what=what, index=index, server=server)
    incarnation = dice.choice((0, 0, 1, 2))
    return Fault(group, incarnation, index, dice.randint(0, 50), away=away, what=what, server=server)
