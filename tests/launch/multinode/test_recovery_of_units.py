"""What units tell the one that leads, and which are waited for between two lives. What is decided: policy.txt."""

import random

import pytest
from reports import EventList

from topotrain.core.events import (
    Covered,
    Differs,
    Event,
    Exited,
    Failed,
    Frozen,
    Lost,
    Missed,
    Notice,
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
from topotrain.launch.recovery.recovery_actions import FailJob


def lost(who: str) -> Lost:
    return Lost(who, 7, f"{who} (pid 7) was killed by SIGKILL", "last words")


def silent(rank: int) -> Failed:
    return Failed(f"unit {rank}", "died", f"unit {rank} on h vanished without a word", "")


def step(who: str) -> StepDone:
    return StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)


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
    assert shortened({"log": "y" * 10**6 + "end", "pid": 3})["log"].endswith("yend")


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
