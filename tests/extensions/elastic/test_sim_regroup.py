"""Worker groups that die and are started again: every batch counts once, a step on all shards or none, nobody waits."""

import random
from dataclasses import replace
from functools import partial

import pytest
from fault_trial import Trial, goes_wrong
from simulation import job, trace

from topotrain.config.job import Compression
from topotrain.core import protocol as m
from topotrain.core.client.rejoin import Rejoin
from topotrain.core.server.consistency import RESTARTS, DecisionLog
from topotrain.core.server.gradients.gradient_source import GradientSource
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server import Server
from topotrain.core.server.step_execution import Decisions
from topotrain.extensions.compression.message_filter import ServerEncoding
from topotrain.extensions.elastic.membership import GroupRestarts, Members
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams, RestartRequest
from topotrain.tools.simulator.fault_schedule import CALM, FAR, STORM, VIEWS, Fault, FaultSchedule
from topotrain.tools.simulator.sim_network import NetworkFaults
from topotrain.training.data.lease_queue import LeaseQueue

pytestmark = pytest.mark.simulated

LAYOUTS = {
    "downpour": (3, 1, 1, {}),
    "downpour of pairs": (2, 2, 2, {}),
    "downpour on three shards": (3, 1, 3, {}),
    "sandblaster": (1, 2, 2, {}),
    "sandblaster of three": (1, 3, 3, {}),
    "hogwild": (2, 1, 2, {"nserver_groups": 2}),
    "hogwild of pairs": (4, 2, 1, {"nserver_groups": 2}),
    "bounded": (3, 1, 2, {"max_staleness": 1}),
    "in step": (2, 2, 2, {"max_staleness": 0}),
    "warming up": (3, 1, 2, {"warmup_steps": 3}),
    "encoded": (2, 2, 2, {"compression": Compression.kFp16}),
    # With a bound the servers restart a group by themselves, and do not wait for the launcher.
    "two with a bound": (1, 2, 2, {"max_staleness": 1}),
    "three with a bound": (1, 3, 3, {"max_staleness": 1}),
}


def place(
    name: str,
    seed: int,
    weather: NetworkFaults = CALM,
    batches: int = 12,
    epochs: int = 1,
    mode: str = "lease",
    tells: bool = True,
    fates: tuple[Fault, ...] = (),
) -> Trial:
    groups, workers, shards, settings = LAYOUTS[name]
    schedule = FaultSchedule("", batches, epochs, mode, tells, fates, survive=0.0)
    return Trial(job(groups, workers, shards, **settings), seed, schedule, weather)  # type: ignore[arg-type]


def drawn(name: str, seed: int) -> tuple[Fault, ...]:
    """One to three deaths at moments drawn by the seed, or of all groups at once."""
    rng, (groups, workers, _, _) = random.Random(f"{name} {seed}"), LAYOUTS[name]
    if seed % 8 == 7:
        at = rng.uniform(0.0, 0.12)
        return tuple(Fault(group, at=at, away=rng.choice((0.0, 0.05, 3.0))) for group in range(groups))
    fates = []
    for number in range(rng.randint(1, 3)):
        group, away = rng.randrange(groups), rng.choice((0.0, 0.003, 0.05, 3.0))
        if rng.random() < 0.5:
            fates.append(Fault(group, at=rng.uniform(0.0, 0.15), away=away))
        else:
            fates.append(Fault(group, number, rng.randrange(workers), rng.randint(0, 60), away=away))
    return tuple(fates)


def one(name: str, seed: int) -> Trial:
    weather = (FAR, STORM, VIEWS, CALM, FAR)[seed % 5]
    mode = "static" if seed % 4 == 1 else "lease"
    found = place(name, seed, weather, epochs=1 + seed % 2, mode=mode, tells=seed % 3 != 0, fates=drawn(name, seed))
    return found.run()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_batch_counts_once_whichever_process_dies_when(name):
    kills = 0
    for seed in range(30):
        found = one(name, seed)
        assert not found.wrong(), f"{name}, seed {seed}: {found.wrong()[:5]}"
        kills += found.kills
    assert kills >= 25


def left_alone(name: str, seed: int) -> Trial:
    """Group 1 dies in the middle and stays away for long: the others read all there is, and never wait."""
    fates = (Fault(1, at=0.03 + 0.01 * seed, away=100.0),)
    found = place(name, seed, STORM, batches=40, fates=fates).run()
    ((death, _),) = found.deaths
    for group in set(found.commits) - {1}:
        moments = [moment for moment in found.commits[group] if moment > death]
        gaps = [after - before for before, after in zip([death, *moments], moments, strict=False)]
        assert max(gaps, default=0.0) < 0.3, f"seed {seed}, group {group} waited"
    last = max(moment for moments in found.commits.values() for moment in moments)
    assert last < death + 5.0, f"seed {seed}: something was left for when the group is back"
    return found


@pytest.mark.parametrize("name", ["downpour", "downpour of pairs", "hogwild", "hogwild of pairs", "bounded", "in step"])
def test_the_others_read_what_the_dead_left_and_do_not_wait_for_them(name):
    for seed in range(4):
        assert not left_alone(name, seed).wrong(), f"seed {seed}"


def test_when_no_process_dies_none_is_reported():
    found = place("hogwild of pairs", 0)
    kinds = trace(found, m.WorkerRejoined, RestartRequest, AppliedBatchesOfStreams, m.AppliedBatchesRequest)
    assert not found.run().wrong() and not kinds


@pytest.mark.parametrize("after", range(0, 48, 3))
def test_a_group_that_dies_at_every_message_of_its_start_and_of_its_first_steps(after):
    for index in (0, 1):
        fates = (Fault(0, 0, index, after), Fault(0, 1, 1 - index, after // 2, away=0.01))
        found = place("sandblaster", after, STORM, batches=12, fates=fates).run()
        assert found.kills == 2 and not found.wrong()


@pytest.mark.parametrize("kind", [m.Finish, m.ModelBufferValue, m.FinalRequest, m.BufferRequest])
@pytest.mark.parametrize("name", ["downpour of pairs", "sandblaster of three", "hogwild of pairs"])
def test_a_group_that_dies_at_its_end_comes_to_it_again(name, kind):
    for seed in range(3):
        found = place(name, seed, (STORM, FAR, CALM)[seed], batches=6, fates=(Fault(0, kind=kind, after=seed % 2),))
        found.run()
        assert not found.wrong(), f"seed {seed}"


# --- rules left out ----------------------------------------------------------------------------------------------
#
# Each mutant leaves one rule out. A run with it must go wrong: a cell that is not 1, an error, or a wait for ever.


def no_abandon(patch):
    """Votes of the dead stay in the log."""

    def restart(self, group, incarnation):
        return self.decree(group, incarnation, RESTARTS) if self.adopt(group, incarnation) else None

    patch.setattr(DecisionLog, "restart", restart)


def votes_of_anybody(patch):
    """A vote says nothing of its incarnation."""
    patch.setattr(DecisionLog, "adopt", lambda self, group, n: _newer(self._incarnations, group, n))
    staged = DecisionLog.staged
    patch.setattr(
        DecisionLog,
        "staged",
        lambda self, shard, vote: staged(self, shard, replace(vote, incarnation=self._incarnations.get(vote.group, 0))),
    )


def _newer(known, group, incarnation):
    new = incarnation > known.get(group, 0)
    if new:
        known[group] = incarnation
    return new


def steps_go_on(patch):
    """The log remembers which steps of a group it has decided."""

    def restart(self, group, incarnation):
        if not self.adopt(group, incarnation):
            return None
        self._votes = {key: vote for key, vote in self._votes.items() if key[0] != group}
        return self.decree(group, incarnation, RESTARTS)

    patch.setattr(DecisionLog, "restart", restart)


def leases_whole(patch):
    """A lease is given back whole, whatever of it is applied."""
    restart = LeaseQueue.group_restarted
    patch.setattr(LeaseQueue, "group_restarted", lambda self, group, applied, ended: restart(self, group, {}, ended))


def leases_kept(patch):
    """A lease of the dead counts as read."""
    restart = LeaseQueue.group_restarted
    patch.setattr(
        LeaseQueue,
        "group_restarted",
        lambda self, group, _, ended: restart(self, group, dict.fromkeys(self.streams(group), 1 << 20), ended),
    )


def leases_forgotten(patch):
    """The coordinator is not told that a group is gone."""
    patch.setattr(LeaseQueue, "group_restarted", lambda self, group, applied, ended: [])


def echo_first(patch):
    """A shard greets who returns at once, and not when the change is carried out."""

    def returned(self, worker, incarnation):
        members = self.members
        self._expect(worker.group, incarnation)
        members.join(worker, incarnation)
        if incarnation == members.newest(worker.group):
            known = members._groups[worker.group]
            known.incarnation = incarnation
            self._accept(worker)

    patch.setattr(GroupRestarts, "_receive_rejoin", returned)


def coordinator_greets_first(patch):
    """Server (0,0) does not ask the coordinator of other servers how far the group came."""
    ask = GroupRestarts._ask

    def asks_nobody(self, group, incarnation):
        if group in self._ours:
            ask(self, group, incarnation)
        elif self._leases:
            self._change(group, incarnation, lambda _: 0, False)

    patch.setattr(GroupRestarts, "_ask", asks_nobody)


def words_of_the_dead(patch):
    """Everybody is heard always."""
    patch.setattr(Members, "is_current", lambda self, worker: True)


def words_before_the_greeting(patch):
    """After the change all workers of the group are heard, also those that have not said who they are."""

    def hears(self, worker):
        group = self._groups.get(worker.group)
        return group is None or group.newest == group.incarnation

    patch.setattr(Members, "is_current", hears)


def taken_for_mine(patch):
    """A worker takes what comes before the echo for its own."""

    patch.setattr(Rejoin, "admits", lambda self, sender, message: True)


def speaks_at_once(patch):
    """A worker does not wait for the echo."""

    def announce(self):
        for server in sorted(self._pending):
            self._channel.send(server, m.WorkerRejoined(self._incarnation))
        self._pending = set()

    patch.setattr(Rejoin, "announce", announce)


def streams_forgotten(patch):
    """What was applied is forgotten with the rest."""
    reset = Server.reset_group

    def all_of_it(self, group, ended):
        reset(self, group, ended)
        self.steps.batches._last.clear()

    patch.setattr(Server, "reset_group", all_of_it)


def staging_kept(patch):
    """What the dead have pushed stays in the step."""
    patch.setattr(GradientSource, "restart", lambda self: setattr(self, "step", 0))


def steps_kept(patch):
    """The shard goes on counting the group's steps."""
    patch.setattr(GradientSource, "restart", lambda self: self._reset())


def readers_kept(patch):
    """Who was shown what is not forgotten."""
    patch.setattr(PullReplies, "forget", lambda self, group: None)


def encoding_kept(patch):
    """Which pushes were decoded is not forgotten."""
    patch.setattr(ServerEncoding, "forget", lambda self, group: None)


def clocks_stay(patch):
    """Others wait for a group that is gone."""
    change = Decisions._change

    def but_clocks(self, decision):
        if decision.change != RESTARTS:
            change(self, decision)
        for extension in self._hooks.on_decree[RESTARTS] if decision.change == RESTARTS else ():
            extension.on_decree(decision)

    patch.setattr(Decisions, "_change", but_clocks)


def decreed_twice(patch):
    """A restart is decreed once for each shard that asks."""

    def restart(self, group, incarnation):
        self._incarnations[group] = incarnation
        self._votes = {key: vote for key, vote in self._votes.items() if key[0] != group}
        self._decided.pop(group, None)
        return self.decree(group, incarnation, RESTARTS)

    patch.setattr(DecisionLog, "restart", restart)


MUTANTS = [
    (no_abandon, one, "downpour of pairs", 1),
    (votes_of_anybody, one, "hogwild", 11),
    (steps_go_on, one, "downpour of pairs", 1),
    (leases_whole, one, "downpour", 0),
    (leases_kept, one, "downpour", 0),
    (leases_forgotten, left_alone, "downpour", 0),
    (echo_first, one, "downpour of pairs", 6),
    (coordinator_greets_first, one, "hogwild", 3),
    (words_of_the_dead, one, "three with a bound", 34),
    (words_before_the_greeting, one, "three with a bound", 22),
    (taken_for_mine, one, "downpour on three shards", 7),
    (speaks_at_once, one, "downpour of pairs", 1),
    (streams_forgotten, one, "downpour of pairs", 1),
    (staging_kept, one, "sandblaster", 1),
    (steps_kept, one, "downpour of pairs", 1),
    (readers_kept, one, "hogwild of pairs", 35),
    (encoding_kept, one, "encoded", 2),
    (clocks_stay, left_alone, "bounded", 0),
    (decreed_twice, one, "two with a bound", 10),
]


@pytest.mark.parametrize(("mutant", "run", "name", "seed"), MUTANTS, ids=[row[0].__name__ for row in MUTANTS])
def test_each_rule_is_needed(mutant, run, name, seed, monkeypatch):
    """The seed is one that is known to show it; where the code has changed, another one will."""
    mutant(monkeypatch)
    assert any(goes_wrong(partial(run, name, each)) for each in (seed, *range(20))), "the rule makes no difference"
