"""Worker groups that leave a job and come to it, whenever and in whatever order: every batch counts once, all end."""

import random
from dataclasses import dataclass
from functools import partial

import pytest
from simulation import job

from topotrain import message as m
from topotrain.consistency import AWAY
from topotrain.ending import Ending
from topotrain.faults import CALM, FAR, STORM, VIEWS, Fault, Schedule, What
from topotrain.lives import Killed
from topotrain.rehearsal import Seat
from topotrain.server import Server
from topotrain.topology import Address, Role
from topotrain.trial import Trial

pytestmark = pytest.mark.simulated

LAYOUTS = {
    "downpour": (3, 1, 1, {}),
    "downpour of pairs": (3, 2, 2, {}),
    "downpour on three shards": (4, 1, 3, {}),
    "bounded": (3, 1, 2, {"max_staleness": 1}),
    "in step": (3, 2, 2, {"max_staleness": 0}),
    "warming up": (3, 1, 2, {"warmup_steps": 3}),
}
COORDINATOR = Address(Role.SERVER, 0, 0)


@dataclass(frozen=True)
class Move:
    """A group leaves at a moment, is dead from then on ("lose"), or comes; where the servers say that it may."""

    verb: str
    group: int
    at: float
    patience: float = 0.5  # for leaving, before it is ended


class Elastic(Trial):
    """A trial with moves; `absent` groups are not there at the start."""

    def __init__(self, job, seed, schedule, weather, moves, absent=()):
        self.absent, self.moves, self.done = set(absent), moves, []
        self.leaving: set[int] = set()
        self.left_at = -1.0
        super().__init__(job, seed, schedule, weather)

    def _tell(self, message):
        house = self.houses[COORDINATOR]
        self.wire.awake(lambda: house.handle(COORDINATOR, message), COORDINATOR)

    def _may(self, move):
        return not self.server(0, 0).may_change(move.group, move.verb)

    def _lives(self, group):
        return [self.lives[worker] for worker in self.topology.workers(group)]

    def move(self, move):
        """What a launcher would do."""
        there = move.group not in self.absent | self.leaving
        if there == (move.verb == "join") or not self._may(move):
            return
        self.done.append(move)
        if move.verb == "join":
            self.absent.discard(move.group)
            self._bear(self.topology.workers(move.group))
            return
        self.leaving.add(move.group)
        lives = self._lives(move.group)
        if move.verb == "lose":
            self._end_of(move.group)
        else:
            self._tell(m.Leave(move.group))
            self.sim.at(self.sim.now + move.patience, lambda: self._too_late(move.group, lives))

    def _too_late(self, group, lives):
        if self._lives(group) == lives and group in self.leaving:
            self._end_of(group)

    def _end_of(self, group):
        for life in self._lives(group):
            if not life.over:
                self._depart(life)
        self._emptied(group)

    def _depart(self, life):
        """One process of a group that leaves has ended."""
        life.over = life.dead = True
        door = self.doors[life.me]
        for server in sorted({*door.servers, door.desk}):
            self._later(partial(self._end, life, server))

    def _emptied(self, group):
        """Nobody is left of a group: the servers are told, before or after they have seen it."""
        if group in self.leaving and all(life.over for life in self._lives(group)):
            self.leaving.discard(group)
            if all(not life.dead for life in self._lives(group)):
                return  # it has come to its end meanwhile
            self.absent.add(group)
            self.left_at = self.sim.now
            self._later(partial(self._tell, m.Away(group, self._lives(group)[0].incarnation + 1)))

    def _go(self, life):
        """A worker leaves as it was told to."""
        if not life.over:
            self._depart(life)
            self._emptied(life.me.group)
        raise Killed

    def kill(self, group, away, index=0):
        if group not in self.absent | self.leaving:
            super().kill(group, away, index)

    def _bear(self, fellows):
        if fellows[0].group not in self.absent | self.leaving:
            super()._bear(fellows)

    def _start(self, me):
        if me.group not in self.absent:
            super()._start(me)

    def run(self):
        for group in sorted(self.absent):
            self._tell(m.Away(group, 0))
        for move in self.moves:
            self.sim.at(move.at, partial(self.move, move))
        return super().run()

    def script(self, seat: Seat) -> None:
        life = self.lives[seat.me]
        seat.open(0.0)
        for epoch in range(self.epochs):
            for stream, seq, number in self._batches(seat, epoch):
                seat.sleep(0.0, 0.004)
                if life.over:
                    raise Killed
                cell = (epoch * self.batches + number) * self.topology.workers_per_group + seat.me.index
                outcome = seat.step(self._gradient(cell), marks=(stream, seq, seq))
                if not life.over:
                    self.commits.setdefault(seat.me.group, []).append(self.sim.now)
                if outcome.leaves:
                    self._go(life)
            if seat.door.data.leaves:
                self._go(life)
        seat.finish()
        if seat.me == self.workers[0]:
            seat.door.final_values()
            seat.door.final_buffers()
            self.final = seat.values()


def drawn(name: str, seed: int) -> tuple[Move, ...]:
    dice, groups = random.Random(f"{name} {seed} moves"), LAYOUTS[name][0]
    verbs = ("leave", "leave", "lose", "join", "join")
    moves = [
        Move(dice.choice(verbs), dice.randrange(1, groups), dice.uniform(0.0, 0.2), dice.choice((0.0, 0.01, 0.5)))
        for _ in range(dice.randint(2, 7))
    ]
    return tuple(sorted(moves, key=lambda move: move.at))


def one(name: str, seed: int) -> Elastic:
    dice, (groups, workers, shards, settings) = random.Random(f"{name} {seed}"), LAYOUTS[name]
    faults = [Fault(0, at=dice.uniform(0.0, 0.15), what=What.CLOCK)] * (seed % 2)
    if seed % 3 == 0:
        faults.append(Fault(dice.randrange(groups), at=dice.uniform(0.0, 0.15), away=dice.choice((0.0, 0.05))))
    schedule = Schedule("", 18, 1 + seed % 2, "lease", seed % 4 != 0, tuple(faults))
    absent = (groups - 1,) if seed % 5 == 0 else ()
    weather = (FAR, STORM, VIEWS, CALM)[seed % 4]
    return Elastic(job(groups, workers, shards, **settings), seed, schedule, weather, drawn(name, seed), absent).run()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_batch_counts_once_whoever_leaves_and_comes_when(name):
    done = []
    for seed in range(12):
        found = one(name, seed)
        assert not found.wrong(), f"{name}, seed {seed}: {found.wrong()[:5]}"
        done += [move.verb for move in found.done]
    assert min(map(done.count, ("leave", "lose", "join"))) >= 1, done


def calm(moves, absent=(), groups=3, workers=2, batches=30):
    schedule = Schedule("", batches, 1, "lease", True, ())
    return Elastic(job(groups, workers, 2), 1, schedule, VIEWS, moves, absent).run()


def test_who_leaves_ends_behind_a_step_and_the_others_read_the_rest_without_a_pause():
    found = calm((Move("leave", 1, 0.05),))
    assert not found.wrong() and found.done
    left = max(found.commits[1])
    assert left < 0.3
    for group in (0, 2):
        later = [moment for moment in found.commits[group] if moment > left]
        assert later and max(b - a for a, b in zip([left, *later], later, strict=False)) < 0.3


def test_who_was_never_there_is_missed_by_nobody_and_reads_once_it_comes():
    found = calm((), absent=(1, 2))
    assert not found.wrong() and set(found.commits) == {0}
    found = calm((Move("join", 2, 0.1),), absent=(1, 2))
    assert not found.wrong() and set(found.commits) == {0, 2}


def test_who_has_left_may_come_again_and_leave_again():
    found = calm((Move("leave", 2, 0.05), Move("join", 2, 0.25), Move("leave", 2, 0.5)), batches=120)
    assert [move.verb for move in found.done] == ["leave", "join", "leave"] and not found.wrong()
    assert any(moment > 0.25 for moment in found.commits[2])


def test_who_waits_for_batches_that_others_may_leave_goes_at_once():
    """Group 0 is slow with its last batch; group 1 has read all there is, and is told to go while it waits."""

    class Slow(Elastic):
        def script(self, seat):
            if seat.me.group:
                return super().script(seat)
            sleep = seat.sleep
            seat.sleep = lambda low, high: sleep(1.0, 1.0)
            return super().script(seat)

    found = Slow(job(2, 1, 1), 1, Schedule("", 3, 1, "lease", True, ()), VIEWS, (Move("leave", 1, 0.5, 9.0),)).run()
    assert found.done and not found.wrong()
    assert found.absent == {1}
    assert found.left_at < 0.7


# --- rules left out ----------------------------------------------------------------------------------------------


def missed_at_the_end(patch):
    """The desk waits for the model's buffers of who has left."""
    patch.setattr(Ending, "away", lambda self, group: None)


def waited_for(patch):
    """Other groups wait for its clock."""
    patch.setattr(Server, "_runs", lambda self, group: not self.ended(group))


def before_its_last_step(patch):
    """It is gone at once, and what was decided or staged of its steps is not."""

    def leave(self, group, incarnation):
        decision = self._log.decree(group, incarnation, AWAY)
        for server in self._topology.servers(self._me.group):
            self._send(server, decision)

    patch.setattr("topotrain.membership.Regroup.leave", leave)
    patch.setattr(Server, "lost", lambda self, worker: [])


MUTANTS = [missed_at_the_end, waited_for, before_its_last_step]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_each_rule_is_needed(mutant, monkeypatch):
    mutant(monkeypatch)
    names = ("downpour of pairs", "downpour", "in step", "downpour on three shards")
    assert any(goes_wrong(name, seed) for name in names for seed in range(15)), "the rule makes no difference"


def goes_wrong(name, seed):
    try:
        return bool(one(name, seed).wrong())
    except Exception:
        return True
