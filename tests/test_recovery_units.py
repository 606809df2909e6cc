"""What unit 0 decides for a job of several units, what the others tell it, and who is waited for between two lives."""

import json
from dataclasses import replace

import pytest

from topotrain.events import (
    Agreed,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Incident,
    Left,
    Lost,
    Notice,
    Recovered,
    Started,
    StepDone,
    Unrepeatable,
)
from topotrain.job import Cluster, ConfigError, Job
from topotrain.launch.attendance import LOSE, Ask, Gone
from topotrain.launch.following import Following
from topotrain.launch.introduction import Introduction
from topotrain.launch.letters import PAGE_BYTES, Ends, shortened
from topotrain.launch.muster import Muster
from topotrain.launch.post import Back, Letter, Vanished
from topotrain.launch.recovery import FAR_CAUSE_S, Recovery, recovery
from topotrain.launch.words import Dismiss, GiveUp, Regroup, Renew
from topotrain.topology import layout

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


def machine(cluster: Cluster, restarts: int = 3) -> Recovery:
    """One in unit 0, all of whose processes, here and elsewhere, are up."""
    near = frozenset(map(str, layout(cluster).units[0].workers))
    made = recovery(Job(cluster=cluster, restarts=restarts), layout(cluster), BEGAN, near)
    assert made is not None
    tell(made, BEGAN, *(Started(who, 1) for unit in residents(cluster) for who in unit))
    return made


def tell(made: Recovery, now: float, *events: Event) -> list[object]:
    return [word for event in events for word in made.heard(event, now)]


def unit_of(cluster: Cluster, who: str) -> int:
    return next(rank for rank, living in enumerate(residents(cluster)) if who in living)


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_a_group_of_several_units_starts_again() -> None:
    assert len({unit_of(DOWNPOUR, f"worker 1/{index}") for index in range(2)}) == 2
    incident, again = tell(machine(DOWNPOUR), 105.0, lost("worker 1/1"))
    assert isinstance(incident, Incident)
    assert again == Regroup(1, 1, incident.what)


def test_an_error_waits_until_a_silent_unit_would_have_been_noticed() -> None:
    made = machine(DOWNPOUR)
    assert not made.suspects
    tell(made, 105.0, Failed("worker 1/0", "peer", "lost server 0/0", ""))
    assert made.suspects
    assert made.due == 105.0 + FAR_CAUSE_S


def test_steps_of_other_units_are_listened_to_while_somebody_waits() -> None:
    made = machine(SANDBLASTER)
    far = next(who for who in ("worker 0/0", "worker 0/1") if unit_of(SANDBLASTER, who))
    tell(made, 101.0, step(far))  # its first; then it says no more for a while
    assert not made.listens
    tell(made, 190.0, lost("server 0/0"))
    assert made.listens
    made.renewed()
    assert tell(made, 191.0, step(far))[1:] == [Recovered(0, 1.0, 0.0)]
    assert not made.listens


def test_what_was_heard_of_others_long_ago_is_no_gap() -> None:
    made = machine(DOWNPOUR)
    tell(made, 101.0, step("worker 2/0"), step("worker 0/0"))
    tell(made, 189.9, step("worker 0/0"))
    tell(made, 190.0, lost("worker 1/0"), Started("worker 1/0", 2), Started("worker 1/1", 2))
    tell(made, 190.2, step("worker 2/0"))
    *_, recovered = tell(made, 190.5, step("worker 1/0"))
    assert recovered == Recovered(0, 0.5, pytest.approx(0.6))  # of worker 0/0, which is here


# --- units that vanish ----------------------------------------------------------------------------------------------


def test_a_unit_of_groups_that_can_be_given_up() -> None:
    cluster = Cluster(nworker_groups=3, nworkers_per_group=1, server_worker_separate=True)
    made = machine(cluster)
    rank = unit_of(cluster, "worker 2/0")
    incident, ask = made.vanished(rank, silent(rank), 105.0)
    assert isinstance(incident, Incident)
    assert (incident.who, incident.action) == (f"unit {rank}", "the job goes on without group 2")
    assert ask == Ask(LOSE, 2)
    assert tell(made, 105.1, Agreed("server 0/0", 2, LOSE, "")) == [
        Left(2, "is given up", pytest.approx(5.1)),
        Gone(2, 1),
        *made_answers(made),
    ]
    assert made.missing == {"worker 2/0"}
    assert made.vanished(rank, silent(rank), 106.0) == []  # that is known
    tell(made, 107.0, *(Exited(who, 1, 0) for unit in residents(cluster) for who in unit if who != "worker 2/0"))
    assert made.complete


def made_answers(made: Recovery) -> list[object]:
    """Nobody has wished it, but an answer would be the same."""
    from topotrain.launch.attendance import LEAVE, Answer

    return [Answer(LEAVE, 2, "group 2 is given up")]


def test_the_rest_of_a_group_goes_with_the_unit_that_vanished() -> None:
    made = machine(DOWNPOUR)
    rank = unit_of(DOWNPOUR, "worker 2/1")
    words = made.vanished(rank, silent(rank), 105.0)
    assert [word.who for word in words if isinstance(word, Dismiss)] == ["worker 2/0"]
    assert Ask(LOSE, 2) in words


def test_servers_that_cannot_do_without_it_let_the_whole_job_start_again() -> None:
    made = machine(DOWNPOUR)
    rank = unit_of(DOWNPOUR, "worker 2/1")
    made.vanished(rank, silent(rank), 105.0)
    *_, last = tell(made, 105.1, Agreed("server 0/0", 2, LOSE, "nobody else reads"))
    assert isinstance(last, Renew)


@pytest.mark.parametrize("who", ["worker 0/1", "server 0/0"])
def test_a_unit_that_the_job_needs_takes_the_whole_along(who: str) -> None:
    for cluster in (DOWNPOUR, SANDBLASTER):
        made, rank = machine(cluster), unit_of(cluster, who)
        assert rank
        incident, again = made.vanished(rank, silent(rank), 105.0)
        assert isinstance(incident, Incident)
        assert incident.who == f"unit {rank}"
        assert isinstance(again, Renew)
        assert made.vanished(rank, silent(rank), 105.1) == []
        made.renewed()
        assert isinstance(made.vanished(rank, silent(rank), 106.0)[1], Renew)  # another one


def test_a_unit_whose_part_is_done_is_not_missed() -> None:
    made, rank = machine(DOWNPOUR), unit_of(DOWNPOUR, "worker 2/1")
    tell(made, 104.0, *(Finished(who, 1, 8, 0.0, 0, 0, 0) for who in residents(DOWNPOUR)[rank]))
    (incident,) = made.vanished(rank, silent(rank), 105.0)
    assert isinstance(incident, Incident)
    assert incident.action == "nothing is missing: its part was done"


def test_without_restarts_or_with_a_loop_of_another_library_a_vanished_unit_ends_the_job() -> None:
    made = machine(SANDBLASTER, restarts=0)
    assert made.vanished(1, silent(1), 105.0) == [GiveUp((silent(1),))]
    made = machine(SANDBLASTER)
    tell(made, 101.0, Unrepeatable("worker 0/0", "a loop", True))
    (give_up,) = made.vanished(1, silent(1), 105.0)
    assert isinstance(give_up, GiveUp)
    assert give_up.failures[0].text == silent(1).text + "; it does not start again: a loop"


def test_no_unit_ends_before_who_lives_there() -> None:
    made = machine(SANDBLASTER)
    for rank in range(len(residents(SANDBLASTER))):
        assert not made.complete
        tell(made, 105.0, Exited(f"unit {rank}", 1, -9))
    assert made.complete


def test_second_copies_still_need_one_launcher() -> None:
    cluster = replace(SANDBLASTER, nservers_per_group=2, replicas=2)
    with pytest.raises(ConfigError, match="replicas"):
        recovery(Job(cluster=cluster), layout(cluster), BEGAN, frozenset())


# --- units that follow ----------------------------------------------------------------------------------------------


def following() -> tuple[Following, list[Event]]:
    said: list[Event] = []
    return Following(["worker 0/1"], said.append), said


def test_what_unit_0_has_to_know_is_told_and_deaths_are_held() -> None:
    made, said = following()
    peer, program = Failed("worker 0/1", "peer", "lost", ""), Failed("worker 0/1", "program", "boom", "")
    held: list[Event] = [lost("worker 0/1"), peer, Unrepeatable("worker 0/1", "a loop", True)]
    passed: list[Event] = [Started("worker 0/1", 1), Frozen("worker 0/1", 1), program, Exited("worker 0/1", 1, 1)]
    assert [word for event in held for word in made.heard(event, 1.0)] == []
    assert [word for event in passed for word in made.heard(event, 1.0)] == passed
    assert said == [*held, *passed]
    notice = Notice("worker 0/1", "hello")
    assert made.heard(notice, 1.0) == [notice]
    assert said[-1] is not notice
    assert not made.complete
    made.end()
    assert made.complete
    # Nothing starts again from here on: what dies now ends the job.
    assert made.heard(lost("worker 0/1"), 2.0) == [Failed("worker 0/1", "died", lost("worker 0/1").text, "last words")]


def test_of_steps_the_first_is_told_and_the_others_when_they_are_wanted() -> None:
    made, said = following()
    for event in (Started("worker 0/1", 1), step("worker 0/1"), step("worker 0/1")):
        assert made.heard(event, 1.0) == [event]
    assert said == [Started("worker 0/1", 1), step("worker 0/1")]
    made.listen(True)
    made.heard(step("worker 0/1"), 1.0)
    made.listen(False)
    made.heard(step("worker 0/1"), 1.0)
    assert len(said) == 3


def test_who_cannot_be_heard_for_long_ends_by_itself() -> None:
    made, _ = following()
    made.heard(Started("worker 0/1", 1), 1.0)
    made.heard(lost("worker 0/1"), 1.0)
    made.told(all=False, alone=False)
    assert made.turn(5.0) == []
    made.told(all=False, alone=True)
    (give_up,) = made.turn(20.0)
    assert isinstance(give_up, GiveUp)
    assert give_up.failures[0].who == "worker 0/1"
    # What unit 0 has heard it decides about, and who has ended well does not wait.
    made, _ = following()
    made.heard(lost("worker 0/1"), 1.0)
    made.told(all=True, alone=False)
    made.told(all=False, alone=True)
    assert made.turn(20.0) == []
    assert not made.complete
    made.heard(Exited("worker 0/1", 1, 0), 21.0)
    assert made.complete


# --- letters --------------------------------------------------------------------------------------------------------


def test_each_word_is_heard_once_however_often_and_late_pages_come() -> None:
    a, b = Ends(), Ends()
    a.say({"n": 1})
    old = a.page()
    a.say({"n": 2})
    assert b.read(a.page()) == [{"n": 1}, {"n": 2}]
    assert b.fresh
    assert b.read(a.page()) == b.read(old) == []
    assert a.waiting
    a.read(b.page())
    assert not a.waiting
    a.say({"n": 3})
    assert json.loads(a.page())["said"] == [[3, {"n": 3}]]
    assert b.read(a.page()) == [{"n": 3}]
    for junk in (b"", b"[]", b"{}", b'{"heard":0,"said":[1]}', b"\xff"):
        with pytest.raises(ValueError):
            b.read(junk)


def test_what_has_no_room_on_a_page_comes_with_the_next() -> None:
    a, b = Ends(), Ends()
    for number in range(5):
        a.say({"n": number, "text": "x" * (PAGE_BYTES // 2)})
    heard: list[int] = []
    while a.waiting:
        page = a.page()
        assert len(page) < 2 * PAGE_BYTES
        heard += [words["n"] for words in b.read(page)]
        a.read(b.page())
    assert heard == [0, 1, 2, 3, 4]
    assert shortened({"log": "y" * 10**6 + "end", "pid": 3})["log"].endswith("yend")


# --- between two lives ----------------------------------------------------------------------------------------------


def ready(rank: int, life: int = 1) -> Letter:
    return Letter(rank, {"life": life, "ready": True})


def back(rank: int, word: str = "w") -> Back:
    return Back(rank, Introduction(rank, "h", 1, "m", "", "", 3, False, word))


def test_all_are_waited_for_and_who_vanished_for_a_time() -> None:
    made = Muster(1, (1, 2), (), 60.0)
    made.heard(ready(1, life=0), 5.0)  # of a life that is over
    assert made.missing == {1, 2}
    made.heard(ready(1), 6.0)
    made.heard(Vanished(2, silent(2)), 7.0)
    assert (made.missing, made.gone, made.due) == ({2}, [2], 67.0)
    made.heard(back(2), 20.0)
    made.heard(Vanished(2, silent(2)), 20.1)  # the one before it
    assert (made.missing, made.gone, made.due) == (set(), [], None)
    assert made.back[2].word == "w"


def test_who_was_silent_for_a_while_and_who_vanishes_while_others_are_waited_for() -> None:
    made = Muster(0, (1, 2), (), 60.0)
    made.heard(Vanished(2, silent(2)), 7.0)
    made.heard(ready(2, 0), 9.0)  # the same process
    made.heard(Vanished(1, silent(1)), 10.0)
    assert (made.missing, made.gone, made.there) == ({1}, [1], {2})


def test_a_unit_where_nobody_would_live_is_not_waited_for_once_it_is_gone() -> None:
    made = Muster(0, (1, 2), (2,), 60.0)
    made.heard(ready(1, 0), 7.0)
    assert made.missing == {2}
    made.heard(Vanished(2, silent(2)), 8.0)
    assert made.missing == set()
    assert made.there == {1}
