"""Which process has which copy of a server, when processes die one after the other, and what the launcher does."""

from dataclasses import replace
from itertools import product

import pytest

from topotrain.config.job import Cluster, TransportChoice
from topotrain.config.topology import Topology, layout
from topotrain.core.events import (
    Failed,
)
from topotrain.extensions.replication.replica_placement import (
    ReplicaPlacement,
    ReplicaSet,
    domain_in,
    domains,
    parse_placement,
)
from topotrain.launch.recovery.attempt_state import AttemptState
from topotrain.launch.recovery.recovery_actions import (
    PlaceReplica,
)
from topotrain.launch.recovery.restarts import Restarts
from topotrain.launch.recovery.server_replacement import ServerReplacement

CLUSTER = Cluster(
    nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True, transport=TransportChoice.kTcp, replicas=2
)
TOPOLOGY = layout(CLUSTER)


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
