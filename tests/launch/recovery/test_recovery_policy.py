"""What is decided when processes die, without any: events and times go in, decisions come out."""

from dataclasses import replace

import pytest

from topotrain.config.job import Apply, Cluster, Grads, Job, OnFailure
from topotrain.config.topology import layout
from topotrain.core.events import (
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Incident,
    Lost,
    Recovered,
    Repeatable,
    Repeated,
    Started,
    StepDone,
    Thawed,
    Unrepeatable,
)
from topotrain.launch.recovery.attempt_state import LEASE_S, RETRY_S, START_S
from topotrain.launch.recovery.recovery_actions import EndProcess, FailJob, RestartGroup, RestartJob
from topotrain.launch.recovery.recovery_policy import CAUSE_S, RecoveryPolicy, RestartTerms, recovery
from topotrain.launch.recovery.restarts import WINDOW_S

DOWNPOUR = Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True)
TOPOLOGY = layout(DOWNPOUR)
WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0", "worker 1/1")
EVERYBODY = (*WORKERS, "server 0/0")
ALL = RestartTerms(frozenset({0, 1}), limit=3)
BEGAN = 100.0


def lost(who: str, pid: int = 7) -> Lost:
    return Lost(who, pid, f"{who} (pid {pid}) was killed by SIGKILL", "last words")


def step(who: str) -> StepDone:
    return StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)


def finished(who: str) -> Finished:
    return Finished(who, 1, 8, 0.0, 0, 0, 0)


def machine(terms: RestartTerms = ALL) -> RecoveryPolicy:
    """One whose processes are all up."""
    made = RecoveryPolicy(TOPOLOGY, terms, BEGAN)
    tell(made, BEGAN, *(Started(who, number) for number, who in enumerate(("unit 0", *EVERYBODY))))
    return made


def tell(made: RecoveryPolicy, now: float, *events: Event) -> list[object]:
    return [word for event in events for word in made.on_event(event, now)]


def test_what_no_process_dies_of_goes_through() -> None:
    made = machine()
    for event in (step(WORKERS[0]), Exited("unit 3", 5, 0), finished("server 0/0")):
        assert made.on_event(event, 101.0) == [event]
    assert made.due is None


def test_a_dead_worker_takes_its_group_along_and_no_other() -> None:
    made = machine()
    found = made.on_event(lost("worker 1/0"), 105.0)
    what = "worker 1/0 (pid 7) was killed by SIGKILL"
    assert found == [
        Incident(0, "worker 1/0", what, "group 1 starts again (incarnation 1)", 5.0),
        RestartGroup(1, 1, what),
    ]


IN_PLACE = replace(ALL, in_place=frozenset({0, 1}))


def repeatable(*workers: str) -> list[Event]:
    return [Repeatable(who, "") for who in workers]


def test_a_worker_starts_again_alone_if_the_script_of_the_others_can_repeat_a_step() -> None:
    made = machine(IN_PLACE)
    assert tell(made, 101.0, *repeatable("worker 0/0", "worker 0/1")) == []
    found = made.on_event(lost("worker 0/1"), 105.0)
    assert found[1] == RestartGroup(0, 1, "worker 0/1 (pid 7) was killed by SIGKILL", "worker 0/1", told=True)
    # A step of the survivor does not end the incident, and its pause is in the report.
    assert tell(made, 105.1, Repeated("worker 0/0", 4, 0.07), step("worker 0/0"))[1:] == []
    tell(made, 105.2, Started("worker 0/1", 8))
    assert tell(made, 105.5, step("worker 0/1"))[1:] == [Recovered(0, pytest.approx(0.5), 0.07)]


@pytest.mark.parametrize("known", [[], [*repeatable("worker 0/0"), Repeatable("worker 0/0", "two backwards")]])
def test_a_group_restarts_as_a_whole_if_a_script_is_not_known_to_keep_the_rules(known: list[Event]) -> None:
    made = machine(IN_PLACE)
    tell(made, 101.0, *known, *repeatable("worker 1/0"))
    found = made.on_event(lost("worker 0/1"), 105.0)
    assert found[1] == RestartGroup(0, 1, "worker 0/1 (pid 7) was killed by SIGKILL", told=True)


def test_a_reason_stays_and_the_last_survivor_takes_its_group_along() -> None:
    made = machine(IN_PLACE)
    tell(
        made, 101.0, *repeatable("worker 0/0", "worker 0/1"), Repeatable("worker 1/0", "why"), *repeatable("worker 1/0")
    )
    assert made.on_event(lost("worker 1/1"), 102.0)[1].worker == ""  # type: ignore[union-attr]
    assert made.on_event(lost("worker 0/1"), 105.0)[1].worker == "worker 0/1"  # type: ignore[union-attr]
    assert made.on_event(lost("worker 0/0"), 105.1)[1] == RestartGroup(
        0, 2, "worker 0/0 (pid 7) was killed by SIGKILL", told=True
    )


def test_a_survivor_that_cannot_repeat_its_step_takes_its_group_along_and_not_the_job() -> None:
    made = machine(IN_PLACE)
    tell(made, 101.0, *repeatable("worker 0/0", "worker 0/1"))
    made.on_event(lost("worker 0/1"), 105.0)
    failed = Failed("worker 0/0", "peer", "a worker of the group is lost, and the step cannot be repeated", "")
    assert tell(made, 105.1, Repeatable("worker 0/0", "two backwards"), failed) == []
    found = made.poll(105.1 + CAUSE_S)
    assert [type(action) for action in found] == [Incident, RestartGroup] and found[1].worker == ""  # type: ignore[union-attr]


def test_with_backup_workers_the_dead_one_starts_again_alone() -> None:
    made = machine(replace(ALL, singly=True))
    found = made.on_event(lost("worker 0/1"), 105.0)
    what = "worker 0/1 (pid 7) was killed by SIGKILL"
    action = "it starts again, and its group continues meanwhile (incarnation 1)"
    assert found == [Incident(0, "worker 0/1", what, action, 5.0), RestartGroup(0, 1, what, "worker 0/1")]
    assert tell(made, 105.2, step("worker 0/0"))[1:] == [Recovered(0, pytest.approx(0.2), 0.0)], "its group steps"
    tell(made, 105.3, Exited("worker 0/1", 7, -9))
    assert not made.complete
    (incident, regroup) = made.on_event(lost("worker 0/0"), 105.4)
    assert isinstance(incident, Incident)
    assert regroup == RestartGroup(0, 2, "worker 0/0 (pid 7) was killed by SIGKILL", "worker 0/0")
    tell(made, 105.5, Started("worker 0/1", 8), Started("worker 0/0", 9))
    tell(made, 106.0, *(finished(who) for who in WORKERS), *(Exited(who, 1, 0) for who in EVERYBODY))
    assert made.complete


def test_what_the_group_says_while_it_goes_is_no_cause() -> None:
    made = machine()
    tell(made, 105.0, lost("worker 1/0"))
    follows = [
        Failed("worker 1/1", "peer", "lost worker 1/0", ""),
        Failed("worker 1/1", "internal", "JobError: worker 1/0 is gone", ""),
        Failed("worker 1/1", "program", "RuntimeError: reset by peer", ""),
        lost("worker 1/1"),
        lost("worker 1/0"),
    ]
    assert tell(made, 105.1, *follows) == []
    assert made.due == 105.0 + START_S
    tell(made, 106.0, Started("worker 1/0", 17), Started("worker 1/1", 18))
    assert made.due is None


def test_the_second_death_after_a_new_start_is_another_incarnation() -> None:
    made = machine()
    tell(made, 105.0, lost("worker 1/0"), Exited("worker 1/0", 7, -9), Started("worker 1/0", 17))
    incident, again = tell(made, 106.0, lost("worker 1/0", 17))
    assert isinstance(incident, Incident)
    assert incident.number == 1
    assert isinstance(again, RestartGroup)
    assert again.incarnation == 2
    # The other worker's first new process may be told of only now: it is ended as well, and missed by nobody.
    assert [type(word) for word in tell(made, 106.1, Exited("worker 1/1", 3, -9))] == [Exited]
    assert not made.complete


def test_an_error_that_may_follow_from_a_death_waits_for_one() -> None:
    made = machine()
    assert tell(made, 105.0, Failed("worker 1/0", "peer", "lost server 0/0", "")) == []
    assert made.due == 105.0 + CAUSE_S
    incident, again = tell(made, 105.2, lost("server 0/0"))
    assert isinstance(incident, Incident)
    assert incident.who == "server 0/0"
    assert isinstance(again, RestartJob)
    assert made.due is None


def test_the_error_of_a_member_is_explained_by_the_death_in_its_group_only() -> None:
    made = machine()
    tell(made, 105.0, Failed("worker 1/1", "internal", "JobError", ""), Failed("worker 0/1", "internal", "x", "trace"))
    tell(made, 105.2, lost("worker 1/0"))
    assert made.due == 105.0 + CAUSE_S
    assert made.poll(105.9) == []
    assert made.poll(106.0) == [FailJob((Failed("worker 0/1", "internal", "x", "trace"),))]


def test_a_lost_connection_that_no_death_explains_is_a_lost_worker() -> None:
    made = machine()
    tell(made, 105.0, Failed("worker 1/0", "peer", "lost server 0/0: reset", ""))
    incident, again = made.poll(106.0)
    assert isinstance(incident, Incident)
    assert incident.what == "worker 1/0 cannot go on: lost server 0/0: reset"
    assert again == RestartGroup(1, 1, incident.what)


def test_a_group_that_is_not_taken_in_again_takes_the_whole_job_along() -> None:
    made = machine()
    tell(made, 105.0, lost("worker 1/0"), Started("worker 1/0", 17), Started("worker 1/1", 18))
    tell(made, 105.5, Failed("worker 1/0", "internal", "JobError: too late", ""))
    assert [type(word) for word in made.poll(106.5)] == [Incident, RestartJob]


@pytest.mark.parametrize("kind", ["program", "config"])
def test_the_programs_error_ends_the_job_at_once_and_then_everything_is_passed_on(kind: str) -> None:
    made = machine()
    error = Failed("worker 1/0", kind, "ValueError", "trace")
    assert tell(made, 105.0, error) == [error]
    later = Failed("worker 0/0", "program", "ValueError", "trace")
    assert tell(made, 105.1, later) == [later]
    assert tell(made, 105.2, lost("worker 1/1")) == [
        Failed("worker 1/1", "died", lost("worker 1/1").text, "last words")
    ]
    assert not made.complete


@pytest.mark.parametrize("who", ["server 0/0", "unit 1", "forkserver"])
def test_whoever_serves_all_takes_the_whole_job_along(who: str) -> None:
    made = machine()
    event = lost(who) if who.startswith("server") else Failed(who, "died", f"{who} was killed by SIGKILL", "")
    incident, again = tell(made, 105.0, event)
    assert isinstance(incident, Incident)
    assert incident.action == "the whole job starts again"
    assert isinstance(again, RestartJob)
    made.begin_attempt()
    assert not made.complete
    tell(made, 106.0, *(Started(name, 50) for name in EVERYBODY))
    regroup = tell(made, 107.0, lost("worker 0/0"))[1]
    assert isinstance(regroup, RestartGroup)
    assert regroup.incarnation == 1  # nobody of the first life can speak to the second


def test_where_a_group_cannot_start_alone_all_do() -> None:
    assert isinstance(tell(machine(replace(ALL, groups=frozenset())), 105.0, lost("worker 0/1"))[1], RestartJob)


def test_a_script_that_says_that_no_group_starts_again_by_itself_takes_the_job_along() -> None:
    made = machine()
    assert tell(made, 101.0, Unrepeatable("worker 0/0", "there are tables", False)) == []
    *_, last = tell(made, 105.0, lost("worker 0/1"))
    assert isinstance(last, RestartJob)
    made.begin_attempt()
    made.on_event(Started("worker 0/1", 9), 106.0)
    assert isinstance(tell(made, 107.0, lost("worker 0/1"))[-1], RestartGroup)  # another life of the script may differ


@pytest.mark.parametrize("who", ["worker 0/1", "server 0/0"])
def test_a_script_that_says_that_nothing_starts_again_ends_the_job_with_the_death(who: str) -> None:
    made = machine()
    tell(made, 101.0, Unrepeatable("worker 1/0", "a loop", True), Unrepeatable("worker 1/0", "there are tables", False))
    assert tell(made, 105.0, lost(who)) == [FailJob((failed_of(who, "; it does not start again: a loop"),))]


def test_such_a_script_that_is_through_is_not_missed() -> None:
    made = machine()
    tell(made, 101.0, Unrepeatable("worker 0/0", "a loop", True), finished("worker 0/1"))
    (incident,) = tell(made, 105.0, lost("worker 0/1"))
    assert isinstance(incident, Incident)


def failed_of(who: str, why: str) -> Failed:
    return Failed(who, "died", lost(who).text + why, "last words")


def restarted(made: RecoveryPolicy, who: str, at: float) -> list[object]:
    """The answer to a death; after it, the group is up again."""
    answer = tell(made, at, lost(who))
    group = [name for name in WORKERS if name.startswith(who[:-1])]
    tell(made, at + 0.1, *(Started(name, int(at)) for name in group))
    return answer


def test_the_fourth_death_in_ten_minutes_ends_the_job_and_names_all() -> None:
    made = machine()
    for number in range(3):
        assert isinstance(restarted(made, "worker 1/0", 110.0 + 10 * number)[1], RestartGroup)
    assert isinstance(restarted(made, "worker 0/0", 141.0)[1], RestartGroup)  # each group for itself
    (give_up,) = restarted(made, "worker 1/1", 142.0)
    assert isinstance(give_up, FailJob)
    (failed,) = give_up.failures
    assert (failed.who, failed.kind, failed.traceback) == ("worker 1/1", "died", "last words")
    assert (
        "worker 1/1 (pid 7) was killed by SIGKILL, and group 1 has started again 3 times within 10 min" in failed.text
    )
    assert "at 10.0 s worker 1/0" in failed.text
    assert "at 30.0 s worker 1/0" in failed.text


def test_old_deaths_are_forgotten() -> None:
    made = machine()
    for number in range(8):
        assert isinstance(restarted(made, "worker 1/0", 110.0 + number * WINDOW_S / 3)[1], RestartGroup)


def test_restarts_of_the_whole_job_are_counted_over_its_attempts() -> None:
    made = machine(replace(ALL, limit=1))
    assert isinstance(tell(made, 105.0, lost("server 0/0"))[1], RestartJob)
    made.begin_attempt()
    (give_up,) = tell(made, 106.0, lost("server 0/0"))
    assert isinstance(give_up, FailJob)
    assert "the job has started again once within 10 minutes" in give_up.failures[0].text


def test_without_restarts_a_death_is_told_as_it_is() -> None:
    (give_up,) = tell(machine(replace(ALL, limit=0)), 105.0, lost("worker 0/1"))
    assert give_up == FailJob((Failed("worker 0/1", "died", lost("worker 0/1").text, "last words"),))


def test_who_has_done_its_part_is_not_missed() -> None:
    made = machine()
    tell(made, 105.0, finished("worker 1/0"))
    (incident,) = tell(made, 106.0, lost("worker 1/0"))
    assert isinstance(incident, Incident)
    assert incident.action == "nothing is missing: its work was done"


def test_when_servers_have_gone_before_the_result_is_saved_all_is_done_again() -> None:
    made = machine()
    tell(made, 105.0, *map(finished, (*WORKERS[1:], "server 0/0")), Exited("server 0/0", 5, 0))
    assert isinstance(tell(made, 105.1, lost("worker 0/0"))[1], RestartJob)


def test_when_all_workers_are_through_no_death_matters() -> None:
    made = machine()
    tell(made, 105.0, *map(finished, WORKERS))
    for event in (lost("server 0/0"), Failed("unit 2", "died", "unit 2 was killed", "")):
        assert [type(word) for word in tell(made, 106.0, event)] == [Incident]


def test_a_member_that_had_ended_well_starts_again_with_its_group() -> None:
    made = machine()
    tell(made, 105.0, finished("worker 1/0"), Exited("worker 1/0", 2, 0))
    assert isinstance(tell(made, 105.1, lost("worker 1/1"))[1], RestartGroup)
    tell(made, 105.2, *(Exited(name, 1, 0) for name in EVERYBODY))
    assert not made.complete
    tell(made, 106.0, *(Started(name, 20) for name in WORKERS[2:]))
    assert not made.complete
    assert isinstance(tell(made, 107.0, lost("worker 1/0"))[1], RestartGroup)  # its first end no longer counts
    tell(made, 108.0, *(Started(name, 30) for name in WORKERS[2:]), *(Exited(name, 30, 0) for name in WORKERS[2:]))
    assert made.complete


def test_all_is_complete_when_every_process_has_ended() -> None:
    made = machine()
    tell(made, 105.0, *(Exited(name, 1, 0) for name in EVERYBODY[:-1]))
    assert not made.complete
    tell(made, 105.0, Failed("server 0/0", "peer", "?", ""), Exited("server 0/0", 1, 1))
    assert not made.complete  # what it said still waits for its cause
    tell(made, 105.0)
    assert [type(word) for word in made.poll(107.0)] == [Incident, RestartJob]


def frozen(made: RecoveryPolicy, who: str, at: float = 105.0) -> list[object]:
    """The answer when somebody is stopped, and is left so for the lease."""
    assert tell(made, at, Frozen(who, 7)) == [Frozen(who, 7)]
    assert made.due == at + LEASE_S
    assert made.poll(at + LEASE_S - 0.01) == []
    return list(made.poll(at + LEASE_S))


def test_a_worker_that_stays_frozen_is_ended_and_takes_its_group_along() -> None:
    made = machine()
    what = "worker 1/0 (pid 7) was frozen for 2 s and was ended"
    assert frozen(made, "worker 1/0") == [
        EndProcess("worker 1/0"),
        Incident(0, "worker 1/0", what, "group 1 starts again (incarnation 1)", 5.0),
        RestartGroup(1, 1, what),
    ]
    tell(made, 107.1, Exited("worker 1/0", 7, -9), Started("worker 1/0", 17), Started("worker 1/1", 18))
    assert made.due is None
    assert tell(made, 107.5, step("worker 1/0"))[1:] == [Recovered(0, 2.5, 0.0)]  # since it was frozen


def test_who_goes_on_in_time_is_left_alone() -> None:
    made = machine()
    tell(made, 105.0, Frozen("worker 1/0", 7))
    assert tell(made, 106.9, Thawed("worker 1/0", 7)) == [Thawed("worker 1/0", 7)]
    assert made.due is None
    assert made.poll(107.0) == []
    # Somebody may be stopped again and again, of which the end of a stop is not always told.
    tell(made, 107.0, Frozen("worker 1/0", 7))
    tell(made, 108.0, Frozen("worker 1/0", 7))
    assert made.poll(109.9) == []
    assert [type(word) for word in made.poll(110.0)] == [EndProcess, Incident, RestartGroup]


def test_each_that_is_frozen_has_a_time_of_its_own() -> None:
    made = machine()
    tell(made, 105.0, Frozen("worker 1/0", 7), Frozen("worker 0/0", 8))
    tell(made, 106.0, Thawed("worker 1/0", 7), Frozen("worker 1/1", 9))
    assert made.due == 107.0
    assert [word.group for word in made.poll(107.0) if isinstance(word, RestartGroup)] == [0]
    assert made.due == 108.0
    tell(made, 107.5, lost("worker 1/0"))  # whose group starts again without waiting for the frozen one
    tell(made, 107.6, *(Started(who, 20) for who in WORKERS))
    assert made.due is None


@pytest.mark.parametrize("ends", [Exited("worker 1/0", 7, -9), Started("worker 1/0", 8)])
def test_a_frozen_process_that_is_gone_is_not_waited_for(ends: Event) -> None:
    made = machine()
    tell(made, 105.0, Frozen("worker 1/0", 7), ends)
    assert made.due is None


def test_a_frozen_server_takes_the_whole_job_along() -> None:
    made = machine()
    tell(made, 104.0, Frozen("worker 0/1", 4))
    tell(made, 104.1, Thawed("worker 0/1", 4))
    dismiss, incident, again = frozen(made, "server 0/0")
    assert (dismiss, type(again)) == (EndProcess("server 0/0"), RestartJob)
    assert isinstance(incident, Incident)
    assert incident.what == "server 0/0 (pid 7) was frozen for 2 s and was ended"
    assert made.due is None


def test_who_is_frozen_with_its_part_done_is_ended_and_not_missed() -> None:
    made = machine()
    tell(made, 105.0, finished("worker 1/0"))
    dismiss, incident = frozen(made, "worker 1/0")
    assert dismiss == EndProcess("worker 1/0")
    assert isinstance(incident, Incident)
    assert incident.action == "nothing is missing: its work was done"


def test_where_nothing_may_start_again_a_frozen_process_ends_the_job() -> None:
    dismiss, give_up = frozen(machine(replace(ALL, limit=0)), "worker 1/0")
    assert dismiss == EndProcess("worker 1/0")
    what = "worker 1/0 (pid 7) was frozen for 2 s and was ended"
    assert give_up == FailJob((Failed("worker 1/0", "died", what, ""),))


def test_once_the_job_ends_no_process_is_timed_any_more() -> None:
    made = machine()
    tell(made, 105.0, Frozen("worker 1/0", 7), Failed("worker 0/0", "program", "ValueError", "trace"))
    assert made.due is None
    assert made.poll(110.0) == []


def test_how_long_training_waited() -> None:
    made = machine()
    tell(made, 104.0, step("worker 0/0"), step("worker 0/1"), step("worker 1/0"))
    tell(made, 105.0, lost("worker 1/0"))
    assert tell(made, 105.5, step("worker 1/1")) == [step("worker 1/1")]  # its last word, and no new step
    tell(made, 105.5, step("worker 0/1"))
    tell(made, 105.7, Started("worker 1/0", 20), Started("worker 1/1", 21))
    tell(made, 105.8, step("worker 0/0"), step("worker 0/1"))
    found = tell(made, 106.0, step("worker 1/1"))
    assert found[0] == step("worker 1/1")
    assert found[1:] == [Recovered(0, 1.0, pytest.approx(1.8))]
    assert tell(made, 106.1, step("worker 1/0")) == [step("worker 1/0")]


def test_after_a_restart_of_the_whole_the_first_step_of_anybody_counts() -> None:
    made = machine()
    tell(made, 105.0, lost("worker 1/0"))
    tell(made, 106.0, lost("server 0/0"))
    assert tell(made, 106.2, step("worker 0/0")) == [step("worker 0/0")]  # of a process that is being ended
    made.begin_attempt()
    assert tell(made, 109.0, step("worker 0/1"))[1:] == [Recovered(0, 4.0, 0.0), Recovered(1, 3.0, 0.0)]


def test_the_job_says_what_may_start_again() -> None:
    goes_on = Job(cluster=DOWNPOUR, restarts=1)
    assert recovery(replace(goes_on, on_failure=OnFailure.kStop), TOPOLOGY, BEGAN) is None
    made = recovery(goes_on, TOPOLOGY, BEGAN)
    assert made is not None
    assert isinstance(tell(made, 105.0, lost("worker 0/0"))[-1], RestartGroup)
    made = recovery(replace(goes_on, apply=Apply.kOnArrival, grads=Grads.kHidden), TOPOLOGY, BEGAN)
    assert made is not None
    assert isinstance(tell(made, 105.0, lost("worker 0/0"))[-1], RestartJob)  # nobody could take back what is applied


def refused(*workers: str) -> list[Event]:
    """What a unit reports whose forks of these workers were refused."""
    return [event for who in workers for event in (Lost(who, 0, f"{who}: no fork", ""), Exited(who, 0, 1))]


def test_a_fork_that_is_refused_at_a_restart_is_tried_again_and_counts_once_for_its_group() -> None:
    made = machine()
    tell(made, 105.0, lost("worker 1/0"), Exited("worker 1/0", 7, -9), Exited("worker 1/1", 3, -9))
    for attempt in (2, 3):
        at = 105.0 + 10 * attempt
        found = tell(made, at, *refused("worker 1/0", "worker 1/1"))
        assert all(isinstance(word, Exited) for word in found)
        assert made.due == at + RETRY_S and not made.complete
        found = made.poll(at + RETRY_S)
        assert [word for word in found if isinstance(word, RestartGroup)] == [
            RestartGroup(1, attempt, "worker 1/0: no fork")
        ]
    tell(made, 140.0, *refused("worker 1/1"))
    (failed,) = [word for word in made.poll(141.0) if isinstance(word, FailJob)]
    assert failed.failures[0].text.startswith("worker 1/1: no fork, and group 1 has started again 3 times")


def test_a_fork_that_succeeds_at_the_second_try_ends_the_loss() -> None:
    made = machine()
    tell(made, 105.0, lost("worker 1/0"), Exited("worker 1/0", 7, -9), *refused("worker 1/0"))
    made.poll(105.0 + RETRY_S)
    tell(made, 107.0, Started("worker 1/0", 17), Started("worker 1/1", 18))
    assert made.due is None
    assert [type(word) for word in tell(made, 107.5, step("worker 1/0"))[1:]] == [Recovered, Recovered]


def test_a_first_fork_that_is_refused_is_a_loss() -> None:
    made = RecoveryPolicy(TOPOLOGY, ALL, BEGAN)
    tell(made, BEGAN, *(Started(who, 1) for who in EVERYBODY if who != "worker 1/1"), *refused("worker 1/1"))
    assert [type(word) for word in made.poll(BEGAN + RETRY_S)] == [EndProcess, Incident, RestartGroup]


def test_a_process_that_is_never_started_again_is_a_loss() -> None:
    """As where the former process cannot be killed."""
    made = machine()
    tell(made, 105.0, lost("worker 1/0"), Exited("worker 1/0", 7, -9), Started("worker 1/0", 17))
    assert made.poll(104.0 + START_S) == []
    found = made.poll(105.0 + START_S)
    assert [type(word) for word in found] == [EndProcess, Incident, RestartGroup]
    assert "worker 1/1 could not be started within 60 s" in found[2].why  # type: ignore[union-attr]
