"""Which process has which copy of a server, when processes die one after the other, and what the launcher does."""

from dataclasses import replace
from itertools import product

import pytest

from topotrain.config.job import Cluster, Job, OnFailure, TransportChoice
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.events import (
    Agreed,
    Covered,
    Differs,
    Exited,
    Failed,
    Finished,
    Incident,
    Lost,
    Recovered,
    Started,
    StepDone,
)
from topotrain.extensions.replication.replica_placement import (
    ReplicaPlacement,
    ReplicaSet,
    domain_in,
    domains,
    parse_placement,
)
from topotrain.launch.recovery.attempt_state import RETRY_S, AttemptState
from topotrain.launch.recovery.recovery_actions import (
    LEAVE,
    AskServers,
    EndProcess,
    FailJob,
    GroupRequest,
    PlaceReplica,
    ReportGone,
    RestartJob,
)
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy, RestartTerms
from topotrain.launch.recovery.restarts import Restarts
from topotrain.launch.recovery.server_replacement import ServerReplacement

CLUSTER = Cluster(
    nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True, transport=TransportChoice.kTcp, replicas=2
)
JOB = Job(cluster=CLUSTER, on_failure=OnFailure.kContinue)
TOPOLOGY = layout(CLUSTER)
SEVERAL = layout(replace(CLUSTER, nworker_groups=3, nworkers_per_group=1))
WORKERS, SERVERS = ("worker 0/0", "worker 0/1"), ("server 0/0", "server 0/1")


def whole(placement: ReplicaPlacement) -> ReplicaPlacement:
    for server, where in placement.servers.items():
        placement.covered(server, where.standbys)
    return placement


@pytest.mark.parametrize(
    "hosts", [(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0)]
)
def test_any_three_deaths_in_a_row_leave_two_copies_in_two_processes_on_two_hosts(hosts: tuple[int, ...]) -> None:
    for deaths in product(range(len(hosts)), repeat=3):
        placement, born = whole(ReplicaPlacement(hosts)), dict.fromkeys(range(len(hosts)), 0)
        for number, index in enumerate(deaths, 1):
            assert placement.lost(index)
            placement.filled(index)
            born[index] = number
            whole(placement)
            for where in placement.servers.values():
                assert where.primary != where.standby >= 0
                assert hosts[where.primary] != hosts[where.standby]
                assert born[where.primary] <= born[where.standby], "nobody would believe an older process"
        assert parse_placement(placement.to_data()) == placement.servers


def test_where_servers_stand_on_several_hosts_hosts_are_what_may_be_lost() -> None:
    """Of these four units the first two have the workers."""
    several = layout(CLUSTER, (0, 0, 0, 1))
    assert domains(several) == (0, 1) and domains(TOPOLOGY) == (0, 1)
    four = replace(CLUSTER, nservers_per_group=4)
    assert domains(layout(four, (0, 0, 0, 0, 1, 1))) == (0, 0, 1, 1)


def test_a_copy_that_is_not_complete_is_none() -> None:
    placement = ReplicaPlacement(range(2))
    placement.covered(0, 0)
    assert not placement.lost(1), "nobody has what server 1 was"
    placement = whole(ReplicaPlacement(range(2)))
    assert placement.lost(1)
    placement.filled(1)
    assert placement.servers == {0: ReplicaSet(0, 1, 0, 1), 1: ReplicaSet(0, 1, 1, 1)}
    placement.covered(0, 0)  # said before the death
    assert not placement.lost(0)


def test_a_process_that_is_replaced_on_another_host_follows_the_present_servers() -> None:
    placement = whole(ReplicaPlacement((0, 1, 2)))  # server i has its second copy on host i + 1
    assert placement.lost(1)
    assert placement.missing(0) == 1, "server 1 speaks in process 2 now; server 0 speaks on host 0 itself"
    assert placement.missing(2) == 1
    placement.filled(1, 0)
    assert placement.servers[1] == ReplicaSet(2, 1, 1, 1)
    assert placement.servers[0] == ReplicaSet(0, -1), "both copies would be lost with host 0"
    whole(placement)
    assert not placement.lost(0), "so with host 0 all of server 0 is lost"


def replacement(topology: Topology) -> tuple[AttemptState, ServerReplacement]:
    """An attempt whose replicas are all complete."""
    attempt = AttemptState(topology)
    made = ServerReplacement(topology, attempt, Restarts(attempt, 3, 0.0, None))
    for server in topology.servers(0):
        made.on_covered(str(server), 0)
    return attempt, made


def placed(replicas: ServerReplacement) -> PlaceReplica:
    """Where the process of server 0/1 is replaced after its death."""
    _, found = replicas.replace({"server 0/1"}, Failed("unit 3", "died", "unit 3 is gone", ""), 1.0)
    assert isinstance(found, PlaceReplica)
    return found


def test_in_which_unit_an_empty_seat_is_filled() -> None:
    cluster = replace(CLUSTER, nservers_per_group=3)
    for hosts, first in (
        ((0, 0, 0, 1, 2), 0),  # of the units of host 0 one without servers
        ((0, 1, 0, 1, 2), 1),  # there it is of use to both servers without a second copy
        ((2, 2, 0, 1, 2), 0),
        ((0, 0, 0, 0, 0), 0),
    ):
        topology = layout(cluster, hosts)
        attempt, replicas = replacement(topology)
        assert placed(replicas).unit == 3, "in its own unit, while that runs"
        attempt, replicas = replacement(topology)
        attempt.lose_unit(3)
        found = placed(replicas)
        assert found.unit == first
        assert "server 0/1" in attempt.residents_of(first) and attempt.residents_of(3) == set()
        where = [*domains(topology)]
        where[1] = domain_in(topology, 1, first)
        for lead, shadow, _, _ in found.seats:
            assert shadow < 0 or where[lead] != where[shadow]
    two = layout(CLUSTER, (0, 0, 0, 1))
    attempt, replicas = replacement(two)
    attempt.lose_unit(3)
    assert placed(replicas).unit == -1, "no process runs on another host"


def machine() -> RecoveryPolicy:
    made = RecoveryPolicy(TOPOLOGY, RestartTerms(frozenset({0}), limit=3), 100.0, replicated=True)
    for number, who in enumerate((*WORKERS, *SERVERS)):
        made.on_event(Started(who, number), 100.0)
    return made


def covered(made: RecoveryPolicy, shadows: int) -> RecoveryPolicy:
    for server in SERVERS:
        made.on_event(Covered(server, shadows), 101.0)
    return made


def lost(who: str) -> Lost:
    return Lost(who, 7, f"{who} was killed", "")


def restarts(made: RecoveryPolicy, who: str, at: float) -> bool:
    """Whether the death of this process is a new start of the job."""
    return any(isinstance(word, RestartJob) for word in made.on_event(lost(who), at))


def test_a_dead_server_is_replaced_again_and_again_and_no_process_starts_again() -> None:
    made = covered(machine(), 0)
    incident, reseat = made.on_event(lost("server 0/1"), 105.0)
    assert isinstance(incident, Incident)
    assert reseat == PlaceReplica("server 0/1", 1, "server 0/1 was killed", [[0, 1, 0, 1], [0, 1, 1, 1]], 3)
    step = StepDone("worker 0/0", 1.0, 1, 8, None, 0.0, 0, 0, 0)
    assert made.on_event(step, 105.5) == [step, Recovered(0, 0.5, 0.0)]
    made.on_event(Started("server 0/1", 9), 106.0)
    covered(made, 1)
    _, reseat = made.on_event(lost("server 0/0"), 107.0)
    assert reseat == PlaceReplica("server 0/0", 2, "server 0/0 was killed", [[1, 0, 1, 2], [1, 0, 2, 2]], 2)


def test_a_second_copy_whose_fork_is_refused_is_tried_again() -> None:
    made = covered(machine(), 0)
    made.on_event(lost("server 0/1"), 105.0)
    made.on_event(Lost("server 0/1", 0, "server 0/1: no fork", ""), 105.1)
    made.on_event(Exited("server 0/1", 0, 1), 105.1)
    assert made.due == 105.1 + RETRY_S
    (reseat,) = [word for word in made.poll(107.0) if isinstance(word, PlaceReplica)]
    assert (reseat.process, reseat.number, reseat.why, reseat.unit) == ("server 0/1", 2, "server 0/1: no fork", 3)
    for _ in range(2):
        made.on_event(Lost("server 0/1", 0, "server 0/1: no fork", ""), 108.0)
        found = made.poll(110.0)
    assert any(isinstance(word, FailJob) for word in found), found


def test_both_copies_lost_is_a_new_start() -> None:
    made = covered(machine(), 0)
    made.on_event(lost("server 0/1"), 105.0)
    assert restarts(made, "server 0/0", 105.1)
    made.begin_attempt()
    assert restarts(made, "server 0/1", 110.0), "what was complete in the former life is not in this one"


def test_copies_that_differ_are_an_incident_and_then_the_end() -> None:
    made = covered(machine(), 0)
    (incident,) = made.on_event(Differs("server 0/1", 0), 103.0)
    assert isinstance(incident, Incident) and "made anew" in incident.action
    assert restarts(made, "server 0/1", 103.5), "its copy is of no use"
    made = covered(machine(), 0)
    made.on_event(Differs("server 0/1", 0), 103.0)
    made.on_event(Covered("server 0/1", 0), 103.2)
    assert isinstance(made.on_event(Differs("server 0/0", 0), 103.3)[0], Incident)
    (end,) = made.on_event(Differs("server 0/1", 0), 104.0)
    assert isinstance(end, FailJob) and "differ once more" in end.failures[0].text


def test_a_coordinator_that_moves_is_told_again_what_was_asked_and_which_groups_are_gone() -> None:
    refusals = dict.fromkeys(range(3), "")
    made = RecoveryPolicy(SEVERAL, RestartTerms(frozenset(range(3)), 3, refusals), 100.0, replicated=True)
    covered(made, 0)
    assert made.on_group_request(GroupRequest(LEAVE, 1)) == [AskServers(LEAVE, 1)]
    _, reseat, *words = made.on_event(lost("server 0/1"), 102.0)
    assert isinstance(reseat, PlaceReplica) and words == [], "it has not moved"
    covered(made, 1)
    _, reseat, *words = made.on_event(lost("server 0/0"), 103.0)
    assert isinstance(reseat, PlaceReplica) and words == [AskServers(LEAVE, 1)]
    assert made.location_of(Address(Role.SERVER, 0, 0)) == ("server 0/1", SEVERAL.unit_of(Address(Role.SERVER, 0, 1)))
    made.on_event(Agreed("server 0/0", 1, LEAVE, ""), 103.5)
    left = made.on_event(Exited("worker 1/0", 5, 0), 104.0)
    assert ReportGone(1, 1) in left
    made.on_event(Started("server 0/1", 9), 104.5)
    covered(made, 2)
    _, _, *words = made.on_event(lost("server 0/1"), 105.0)
    assert words == [ReportGone(1, 1)]


def test_a_standby_ends_with_the_servers_that_speak() -> None:
    made = covered(machine(), 0)
    made.on_event(lost("server 0/1"), 105.0)
    for who in WORKERS:
        made.on_event(Finished(who, 1, 8, 0.0, 0, 0, 0), 106.0)
    end = Finished("server 0/0", 0, 0, 0.0, 0, 0, 0)
    assert made.on_event(end, 106.0) == [end, EndProcess("server 0/1")]
