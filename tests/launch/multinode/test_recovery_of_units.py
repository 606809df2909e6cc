"""What unit 0 decides for a job of several units, what the others tell it, and who is waited for between two lives."""

import random
from dataclasses import replace

import pytest
from reports import EventList

from topotrain.config.job import Cluster, Job, TransportChoice
from topotrain.config.topology import Address, Role, layout
from topotrain.core.events import (
    Agreed,
    Covered,
    Differs,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Incident,
    Left,
    Lost,
    Missed,
    Notice,
    Recovered,
    Started,
    StepDone,
    Unrepeatable,
    Unsaved,
)
from topotrain.core.protocol import ProtocolError
from topotrain.launch.multinode.control_connection import UnitMessage, UnitReturned, UnitVanished
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.node_info import NodeInfo
from topotrain.launch.multinode.reliable_messages import (
    MESSAGE_BYTES,
    PART_BYTES,
    ReliableEnd,
    UnitPart,
    Words,
    shortened,
)
from topotrain.launch.multinode.restart_barrier import RestartBarrier
from topotrain.launch.recovery.attempt_state import SERVERS_S
from topotrain.launch.recovery.recovery_actions import (
    LOSE,
    AskServers,
    EndProcess,
    FailJob,
    PlaceReplica,
    ReportGone,
    RestartGroup,
    RestartJob,
)
from topotrain.launch.recovery.recovery_policy import FAR_CAUSE_S, RecoveryPolicy, recovery

BEGAN = 100.0
DOWNPOUR = Cluster(nworker_groups=3, nworkers_per_group=2, server_worker_separate=True)
SANDBLASTER = Cluster(nworkers_per_group=2, server_worker_separate=True)


def lost(who: str) -> Lost:
    return Lost(who, 7, f"{who} (pid 7) was killed by SIGKILL", "last words")


def silent(rank: int) -> Failed:
    return Failed(f"unit {rank}", "died", f"unit {rank} on h vanished without a word", "")


def step(who: str) -> StepDone:
    return StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)


def residents(cluster: Cluster) -> list[list[str]]:
    return [[str(who) for who in (*unit.workers, *unit.servers)] for unit in layout(cluster).units]


def machine(cluster: Cluster, restarts: int = 3) -> RecoveryPolicy:
    """One in unit 0, all of whose processes, here and elsewhere, are up."""
    near = frozenset(map(str, layout(cluster).units[0].workers))
    made = recovery(Job(cluster=cluster, restarts=restarts), layout(cluster), BEGAN, near)
    assert made is not None
    tell(made, BEGAN, *(Started(who, 1) for unit in residents(cluster) for who in unit))
    return made


def tell(made: RecoveryPolicy, now: float, *events: Event) -> list[object]:
    return [word for event in events for word in made.on_event(event, now)]


def unit_of(cluster: Cluster, who: str) -> int:
    return next(rank for rank, living in enumerate(residents(cluster)) if who in living)


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_a_group_of_several_units_starts_again() -> None:
    assert len({unit_of(DOWNPOUR, f"worker 1/{index}") for index in range(2)}) == 2
    incident, again = tell(machine(DOWNPOUR), 105.0, lost("worker 1/1"))
    assert isinstance(incident, Incident)
    assert again == RestartGroup(1, 1, incident.what, told=True)


def test_an_error_waits_until_a_silent_unit_would_have_been_noticed() -> None:
    made = machine(DOWNPOUR)
    assert not made.suspicious
    tell(made, 105.0, Failed("worker 1/0", "peer", "lost server 0/0", ""))
    assert made.suspicious
    assert made.due == 105.0 + FAR_CAUSE_S


def test_steps_of_other_units_are_received_while_a_unit_waits() -> None:
    made = machine(SANDBLASTER)
    far = next(who for who in ("worker 0/0", "worker 0/1") if unit_of(SANDBLASTER, who))
    tell(made, 101.0, step(far))  # its first; then it says no more for a while
    assert not made.wants_steps
    tell(made, 190.0, lost("server 0/0"))
    assert made.wants_steps
    made.begin_attempt()
    assert tell(made, 191.0, step(far))[1:] == [Recovered(0, 1.0, 0.0)]
    assert not made.wants_steps


def test_what_was_received_of_others_long_ago_is_no_gap() -> None:
    made = machine(DOWNPOUR)
    tell(made, 101.0, step("worker 2/0"), step("worker 0/0"))
    tell(made, 189.9, step("worker 0/0"))
    tell(made, 190.0, lost("worker 1/0"), Started("worker 1/0", 2), Started("worker 1/1", 2))
    tell(made, 190.2, step("worker 2/0"))
    *_, recovered = tell(made, 190.5, step("worker 1/0"))
    assert recovered == Recovered(0, 0.5, pytest.approx(0.6))  # of worker 0/0, which is here


def test_a_server_that_stays_behind_the_last_worker_is_ended() -> None:
    made = machine(SANDBLASTER)
    for who, now in (("worker 0/0", 110.0), ("worker 0/1", 115.0)):
        tell(made, now, Finished(who, 1, 8, 0.0, 0, 0, 0), Exited(who, 1, 0))
    assert made.due == 115.0 + SERVERS_S and made.poll(134.0) == []
    end, incident = made.poll(135.0)
    assert end == EndProcess("server 0/0")
    assert incident.what == "server 0/0 did not end within 20 s after the last worker"
    assert tell(made, 136.0, Exited("server 0/0", 1, -9)) and made.complete


# --- units that vanish ----------------------------------------------------------------------------------------------


def test_a_unit_of_groups_that_can_be_given_up() -> None:
    cluster = Cluster(nworker_groups=3, nworkers_per_group=1, server_worker_separate=True)
    made = machine(cluster)
    rank = unit_of(cluster, "worker 2/0")
    incident, ask = made.on_unit_lost(rank, silent(rank), 105.0)
    assert isinstance(incident, Incident)
    assert (incident.who, incident.action) == (f"unit {rank}", "the job goes on without group 2")
    assert ask == AskServers(LOSE, 2)
    assert tell(made, 105.1, Agreed("server 0/0", 2, LOSE, "")) == [
        Left(2, "is given up", pytest.approx(5.1)),
        ReportGone(2, 1),
        *made_answers(made),
    ]
    assert made.missing == {"worker 2/0"}
    assert made.on_unit_lost(rank, silent(rank), 106.0) == []  # that is known
    tell(made, 107.0, *(Exited(who, 1, 0) for unit in residents(cluster) for who in unit if who != "worker 2/0"))
    assert made.complete


def made_answers(made: RecoveryPolicy) -> list[object]:
    """Nobody has wished it, but an answer would be the same."""
    from topotrain.launch.recovery.recovery_actions import LEAVE, AnswerRequest

    return [AnswerRequest(LEAVE, 2, "group 2 is given up")]


def test_the_rest_of_a_group_goes_with_the_unit_that_vanished() -> None:
    made = machine(DOWNPOUR)
    rank = unit_of(DOWNPOUR, "worker 2/1")
    words = made.on_unit_lost(rank, silent(rank), 105.0)
    assert [word.who for word in words if isinstance(word, EndProcess)] == ["worker 2/0"]
    assert AskServers(LOSE, 2) in words


def test_servers_that_cannot_do_without_it_let_the_whole_job_start_again() -> None:
    made = machine(DOWNPOUR)
    rank = unit_of(DOWNPOUR, "worker 2/1")
    made.on_unit_lost(rank, silent(rank), 105.0)
    *_, last = tell(made, 105.1, Agreed("server 0/0", 2, LOSE, "nobody else reads"))
    assert isinstance(last, RestartJob)


@pytest.mark.parametrize("who", ["worker 0/1", "server 0/0"])
def test_a_unit_that_the_job_needs_takes_the_whole_along(who: str) -> None:
    for cluster in (DOWNPOUR, SANDBLASTER):
        made, rank = machine(cluster), unit_of(cluster, who)
        assert rank
        incident, again = made.on_unit_lost(rank, silent(rank), 105.0)
        assert isinstance(incident, Incident)
        assert incident.who == f"unit {rank}"
        assert isinstance(again, RestartJob)
        assert made.on_unit_lost(rank, silent(rank), 105.1) == []
        made.begin_attempt()
        assert isinstance(made.on_unit_lost(rank, silent(rank), 106.0)[1], RestartJob)  # another one


def test_a_unit_whose_part_is_done_is_not_missed() -> None:
    made, rank = machine(DOWNPOUR), unit_of(DOWNPOUR, "worker 2/1")
    tell(made, 104.0, *(Finished(who, 1, 8, 0.0, 0, 0, 0) for who in residents(DOWNPOUR)[rank]))
    (incident,) = made.on_unit_lost(rank, silent(rank), 105.0)
    assert isinstance(incident, Incident)
    assert incident.action == "nothing is missing: its work was done"


def test_without_restarts_or_with_a_loop_of_another_library_a_vanished_unit_ends_the_job() -> None:
    made = machine(SANDBLASTER, restarts=0)
    assert made.on_unit_lost(1, silent(1), 105.0) == [FailJob((silent(1),))]
    made = machine(SANDBLASTER)
    tell(made, 101.0, Unrepeatable("worker 0/0", "a loop", True))
    (give_up,) = made.on_unit_lost(1, silent(1), 105.0)
    assert isinstance(give_up, FailJob)
    assert give_up.failures[0].text == silent(1).text + "; it does not start again: a loop"


def test_no_unit_ends_before_its_processes() -> None:
    made = machine(SANDBLASTER)
    for rank in range(len(residents(SANDBLASTER))):
        assert not made.complete
        tell(made, 105.0, Exited(f"unit {rank}", 1, -9))
    assert made.complete


# --- servers with a second copy -------------------------------------------------------------------------------------

TWICE = replace(SANDBLASTER, nworkers_per_procs=2, nservers_per_group=2, transport=TransportChoice.kTcp, replicas=2)
"""Unit 0 has the workers, and units 1 and 2 a server each."""


def covered(made: RecoveryPolicy, shadows: int, *of: int) -> RecoveryPolicy:
    tell(made, 101.0, *(Covered(f"server 0/{index}", shadows) for index in of or range(2)))
    return made


def test_the_seat_of_a_unit_that_is_gone_is_filled_in_another_and_the_second_copies_speak() -> None:
    made = covered(machine(TWICE), 0)
    incident, reseat = made.on_unit_lost(2, silent(2), 105.0)
    assert isinstance(incident, Incident) and "fresh processes in unit 0" in incident.action
    assert reseat == PlaceReplica("server 0/1", 1, silent(2).text, [[0, 1, 0, 1], [0, 1, 1, 1]], 0)
    assert made.lost_units == {2}
    tell(made, 105.5, Started("server 0/1", 9))
    # There it may die as anywhere, and what unit 0 hears of unit 2 would be of somebody else.
    covered(made, 1)
    incident, reseat = tell(made, 106.0, lost("server 0/1"))
    assert isinstance(reseat, PlaceReplica) and reseat.unit == 0
    tell(made, 106.5, Started("server 0/1", 10))
    covered(made, 2)
    assert made.location_of(Address(Role.SERVER, 0, 1)) == ("server 0/0", 1)
    incident, reseat, *_ = made.on_unit_lost(1, silent(1), 107.0)
    assert isinstance(reseat, PlaceReplica) and (reseat.process, reseat.unit) == ("server 0/0", 0)
    assert made.location_of(Address(Role.SERVER, 0, 0)) == ("server 0/1", 0)
    made.begin_attempt()
    assert made.location_of(Address(Role.SERVER, 0, 0)) == ("server 0/0", 1)


def test_a_unit_with_a_seat_and_a_group_that_others_can_do_without() -> None:
    cluster = replace(TWICE, nworker_groups=2, nworkers_per_group=1, nworkers_per_procs=1, server_worker_separate=False)
    made = covered(machine(cluster), 0)
    words = made.on_unit_lost(1, silent(1), 105.0)
    assert [word.unit for word in words if isinstance(word, PlaceReplica)] == [0]
    assert words.index(AskServers(LOSE, 1)) > next(n for n, word in enumerate(words) if isinstance(word, PlaceReplica))


def test_both_copies_in_units_that_are_gone_are_a_new_start() -> None:
    made = covered(machine(TWICE), 0)
    made.on_unit_lost(2, silent(2), 105.0)
    assert isinstance(made.on_unit_lost(1, silent(1), 105.1)[-1], RestartJob), "nobody has everything but who is gone"
    made = covered(machine(TWICE), 0, 0)  # server 1 has one copy
    assert isinstance(made.on_unit_lost(2, silent(2), 105.0)[-1], RestartJob)
    made = covered(machine(TWICE), 0)
    made.on_unit_lost(2, silent(2), 105.0)  # a fresh process is about to stand in unit 0
    assert isinstance(tell(made, 105.1, lost("server 0/0"))[-1], RestartJob)


def test_with_copies_on_several_hosts_one_of_two_stays_alone() -> None:
    topology = layout(TWICE, (0, 0, 1))
    made = recovery(Job(cluster=topology.cluster), topology, BEGAN, frozenset())
    assert made is not None
    tell(made, BEGAN, *(Started(who, 1) for unit in residents(TWICE) for who in unit))
    covered(made, 0)
    incident, reseat = made.on_unit_lost(2, silent(2), 105.0)
    assert isinstance(incident, Incident) and "alone" in incident.action
    assert reseat == PlaceReplica("server 0/1", 0, silent(2).text, [[0, -1, 0, 0], [0, -1, 1, 0]], -1)
    made.begin_attempt()
    made.begin_attempt(layout(topology.cluster, (0, 1, 0)))  # the units have come back elsewhere
    covered(made, 0)
    assert isinstance(tell(made, 106.0, lost("server 0/0"))[-1], PlaceReplica)


def test_servers_that_miss_each_other_let_silent_units_be_suspected() -> None:
    made = covered(machine(TWICE), 0)
    tell(made, 104.0, Missed("server 0/0"))
    assert made.suspicious and made.due is None
    made.on_unit_lost(2, silent(2), 105.0)
    assert not made.suspicious


def test_all_groups_that_have_lost_a_worker_start_again() -> None:
    made = machine(DOWNPOUR)
    for who in ("worker 1/0", "worker 2/1", "worker 1/1"):
        tell(made, 105.0, Failed(who, "peer", "lost server 0/0", ""))
    words = made.poll(105.0 + FAR_CAUSE_S)
    assert sorted(word.group for word in words if isinstance(word, RestartGroup)) == [1, 2]


# --- units that follow ----------------------------------------------------------------------------------------------


def following() -> tuple[Follower, list[Event]]:
    said = EventList()
    return Follower(["worker 0/1"], said), said


def test_what_unit_0_has_to_know_is_told_and_deaths_are_held() -> None:
    made, said = following()
    peer, program = Failed("worker 0/1", "peer", "lost", ""), Failed("worker 0/1", "program", "boom", "")
    held: list[Event] = [lost("worker 0/1"), peer, Unrepeatable("worker 0/1", "a loop", True)]
    passed: list[Event] = [Started("worker 0/1", 1), Frozen("worker 0/1", 1), program, Exited("worker 0/1", 1, 1)]
    passed += [Covered("server 0/1", 1), Differs("server 0/1", 1), Missed("server 0/1"), Unsaved("server 0/1", "why")]
    assert [word for event in held for word in made.on_event(event, 1.0)] == []
    assert [word for event in passed for word in made.on_event(event, 1.0)] == passed
    assert said == [*held, *passed]
    notice = Notice("worker 0/1", "hello")
    assert made.on_event(notice, 1.0) == [notice]
    assert said[-1] is not notice
    assert not made.complete
    made.end()
    assert made.complete
    # Nothing starts again from here on: what dies now ends the job.
    assert made.on_event(lost("worker 0/1"), 2.0) == [
        Failed("worker 0/1", "died", lost("worker 0/1").text, "last words")
    ]


def test_a_server_from_a_unit_that_is_gone_keeps_a_unit_that_is_alone() -> None:
    made, _ = following()
    tell_following(made, Started("server 0/1", 3), Exited("worker 0/1", 1, 0))
    made.on_connection(all_received=False, alone=True)
    assert not made.complete
    tell_following(made, Exited("server 0/1", 3, 0))
    assert made.complete


def tell_following(made: Follower, *events: Event) -> None:
    for event in events:
        made.on_event(event, 1.0)


def test_of_steps_the_first_is_told_and_the_others_when_they_are_wanted() -> None:
    made, said = following()
    for event in (Started("worker 0/1", 1), step("worker 0/1"), step("worker 0/1")):
        assert made.on_event(event, 1.0) == [event]
    assert said == [Started("worker 0/1", 1), step("worker 0/1")]
    made.listen(True)
    made.on_event(step("worker 0/1"), 1.0)
    made.listen(False)
    made.on_event(step("worker 0/1"), 1.0)
    assert len(said) == 3


def test_a_unit_that_is_cut_off_for_long_ends_by_itself() -> None:
    made, _ = following()
    made.on_event(Started("worker 0/1", 1), 1.0)
    made.on_event(lost("worker 0/1"), 1.0)
    made.on_connection(all_received=False, alone=False)
    assert made.suspicious
    assert made.poll(5.0) == []
    made.on_connection(all_received=False, alone=True)
    (give_up,) = made.poll(20.0)
    assert isinstance(give_up, FailJob)
    assert give_up.failures[0].who == "worker 0/1"
    # What unit 0 has heard it decides about, and who has ended well does not wait.
    made, _ = following()
    made.on_event(lost("worker 0/1"), 1.0)
    made.on_connection(all_received=True, alone=False)
    assert not made.suspicious
    made.on_connection(all_received=False, alone=True)
    assert made.poll(20.0) == []
    assert not made.complete
    made.on_event(Exited("worker 0/1", 1, 0), 21.0)
    assert made.complete


# --- messages -------------------------------------------------------------------------------------------------------


def received(end: ReliableEnd, parts: list[UnitPart]) -> list[Words]:
    return [words for part in parts if (words := end.receive(part)) is not None]


def test_each_message_is_received_once_and_in_order_however_often_its_parts_come() -> None:
    a, b = ReliableEnd(), ReliableEnd()
    first, second = a.send({"n": 1}), a.send({"n": 2})
    assert received(b, second) == []  # the first is missing, and both will come again
    assert received(b, a.unacknowledged()) == [{"n": 1}, {"n": 2}]
    assert received(b, [*first, *second, *a.unacknowledged()]) == []
    assert a.waiting
    assert a.receive(b.acknowledgement()) is None
    assert not a.waiting and a.unacknowledged() == []
    assert received(b, a.send({"n": 3})) == [{"n": 3}]
    (reply,) = b.send({"m": 1})  # a message acknowledges, too
    assert a.receive(reply) == {"m": 1}
    assert not a.waiting


def test_a_large_message_comes_in_parts_and_goes_on_after_a_reconnection() -> None:
    a, b = ReliableEnd(), ReliableEnd()
    words = {"text": "x" * (3 * PART_BYTES)}
    parts = a.send(words)
    assert len(parts) == 4
    assert received(b, parts[:2]) == []
    a.receive(b.acknowledgement())
    assert [part.number for part in a.unacknowledged()] == [3, 4]
    assert received(b, a.unacknowledged()) == [words]
    assert shortened({"log": "y" * 10**6 + "end", "pid": 3})["log"].endswith("yend")


def test_what_is_no_message_is_refused() -> None:
    for text in (b"", b"[]", b"\xff", b"{", b"[" * 10**5):
        with pytest.raises(ProtocolError):
            ReliableEnd().receive(UnitPart(1, 0, False, text))
    end, most = ReliableEnd(), MESSAGE_BYTES // PART_BYTES
    for number in range(1, most + 1):
        assert end.receive(UnitPart(number, 0, True, b"x" * PART_BYTES)) is None
    with pytest.raises(ProtocolError, match="at most"):
        end.receive(UnitPart(most + 1, 0, True, b"x"))


def test_units_with_any_losses_of_connections_receive_all_messages_once_and_in_order() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ends, sent, found = (ReliableEnd(), ReliableEnd()), ([], []), ([], [])  # type: ignore[var-annotated]
        ways: list[list[UnitPart]] = [[], []]  # to each end
        for _ in range(60):
            side = rng.randrange(2)
            match rng.randrange(4):
                case 0:
                    sent[side].append({"n": len(sent[side]), "text": "x" * rng.choice((1, 2 * PART_BYTES))})
                    ways[1 - side] += ends[side].send(sent[side][-1])
                case 1:  # what is on its way is lost from some point on; both send again
                    for way in (0, 1):
                        del ways[way][rng.randrange(len(ways[way]) + 1) :]
                        ways[way] += ends[1 - way].unacknowledged()
                case _ if ways[side]:
                    part = ways[side].pop(0)
                    found[side].extend(received(ends[side], [part]))
                    if part.number:
                        ways[1 - side].append(ends[side].acknowledgement())
                case _:
                    pass
        for side in (0, 1):
            for part in [*ways[side], *ends[1 - side].unacknowledged()]:
                found[side].extend(received(ends[side], [part]))
            ends[1 - side].receive(ends[side].acknowledgement())
        assert found == (sent[1], sent[0]), seed
        assert not ends[0].waiting and not ends[1].waiting, seed


# --- between two lives ----------------------------------------------------------------------------------------------


def ready(rank: int, life: int = 1) -> UnitMessage:
    return UnitMessage(rank, {"life": life, "ready": True})


def back(rank: int, word: str = "w") -> UnitReturned:
    return UnitReturned(rank, NodeInfo(rank, "h", 1, "m", "", "", 3, False, word))


def test_all_are_waited_for_and_vanished_units_for_a_time() -> None:
    made = RestartBarrier(1, (1, 2), (), 60.0)
    made.on_news(ready(1, life=0), 5.0)  # of a life that is over
    assert made.missing == {1, 2}
    made.on_news(ready(1), 6.0)
    made.on_news(UnitVanished(2, silent(2)), 7.0)
    assert (made.missing, made.gone, made.due) == ({2}, [2], 67.0)
    made.on_news(back(2), 20.0)
    made.on_news(UnitVanished(2, silent(2)), 20.1)  # the one before it
    assert (made.missing, made.gone, made.due) == (set(), [], None)
    assert made.back[2].word == "w"


def test_units_that_were_silent_for_a_while_and_that_vanish_while_others_are_waited_for() -> None:
    made = RestartBarrier(0, (1, 2), (), 60.0)
    made.on_news(UnitVanished(2, silent(2)), 7.0)
    made.on_news(ready(2, 0), 9.0)  # the same process
    made.on_news(UnitVanished(1, silent(1)), 10.0)
    assert (made.missing, made.gone, made.there) == ({1}, [1], {2})


def test_a_unit_without_processes_is_not_waited_for_once_it_is_gone() -> None:
    made = RestartBarrier(0, (1, 2), (2,), 60.0)
    made.on_news(ready(1, 0), 7.0)
    assert made.missing == {2}
    made.on_news(UnitVanished(2, silent(2)), 8.0)
    assert made.missing == set()
    assert made.there == {1}
