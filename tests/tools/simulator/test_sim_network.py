"""The simulated network: what it promises to the code that is tested on it."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from faulty_network import FaultyTransport, NetworkFaults

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Drained, Fetch, Init, Message, ProtocolError
from topotrain.tools.simulator.sim_network import Deadlock, Simulation

A, B = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)
BAD = NetworkFaults(delay=(0.001, 0.003), late=0.02, duplicate=0.2, reorder=0.3)


@dataclass
class Ear:
    """Keeps what it hears, and where it was told to put bodies."""

    sim: Simulation
    target: torch.Tensor | None = None
    heard: list[tuple[float, Message]] = field(default_factory=list)
    bodies: list[torch.Tensor] = field(default_factory=list)
    gone: list[Address] = field(default_factory=list)

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        assert viewable
        return self.target

    def handle(self, sender: Address, message: Message) -> None:
        self.heard.append((self.sim.now, message))
        if message.body is not None:
            self.bodies.append(message.body)

    def lost(self, peer: Address, reason: str) -> None:
        self.gone.append(peer)

    @property
    def rounds(self) -> list[int]:
        return [message.round for _, message in self.heard if isinstance(message, Fetch)]


def connected(seed: int = 0, weather: NetworkFaults | None = None) -> tuple[Simulation, FaultyTransport, Ear, Ear]:
    sim = Simulation(seed)
    wire = FaultyTransport(sim, weather)
    a, b = Ear(sim), Ear(sim)
    wire.attach(A, a)
    wire.attach(B, b)
    wire.connect(A, B, "")
    return sim, wire, a, b


def ten(seed: int, weather: NetworkFaults | None) -> Ear:
    sim, wire, _, b = connected(seed, weather)
    for number in range(10):
        wire.send(A, B, Fetch(number))
    sim.run()
    return b


def test_messages_arrive_in_order_and_once_unless_the_network_is_bad():
    assert ten(3, BAD).heard == ten(3, BAD).heard != ten(4, BAD).heard
    heard = ten(0, None)
    assert heard.rounds == list(range(10))
    assert all(0 < time < 0.01 for time, _ in heard.heard)
    assert any(ten(seed, NetworkFaults(reorder=0.5)).rounds != list(range(10)) for seed in range(5))
    assert sorted(ten(0, NetworkFaults(duplicate=1.0)).rounds) == sorted([*range(10)] * 2)


def test_a_body_is_read_when_it_is_sent_or_when_it_arrives_and_goes_where_the_receiver_wants_it():
    for snapshots, seen in ((True, 1.0), (False, 2.0)):
        sim, wire, _, b = connected(weather=NetworkFaults(snapshots=snapshots))
        body = torch.ones(3)
        wire.send(A, B, Init(0, body=body))
        body.fill_(2)
        sim.run()
        assert b.bodies[0].dtype == torch.uint8 and b.bodies[0].view(torch.float32).tolist() == [seen] * 3
    sim, wire, _, b = connected()
    b.target = torch.zeros(3)
    wire.send(A, B, Init(0, body=torch.ones(3)))
    sim.run()
    assert b.bodies[0] is b.target and b.target.tolist() == [1, 1, 1]
    wire.send(A, B, Init(0, body=torch.ones(4)))
    with pytest.raises(ProtocolError):
        sim.run()


def test_a_crash_falls_between_two_messages_of_a_kind():
    sim, wire, a, b = connected()
    wire.crash(A, after=2, kind=Fetch, tell=True)
    for number in range(4):
        wire.send(A, B, Fetch(number))
        wire.send(A, B, Drained())
    wire.send(B, A, Drained())
    sim.run()
    assert [type(message) for _, message in b.heard] == [Fetch, Drained, Fetch, Drained]
    assert b.gone == [A] and a.heard == [] and len(wire.lost) == 5
    wire.revive(A)
    wire.send(A, B, Fetch(9))
    sim.run()
    assert b.rounds[-1] == 9


def test_a_pause_keeps_what_is_under_way():
    sim, wire, a, b = connected()
    wire.send(A, B, Fetch(1))
    wire.pause(B)
    wire.send(B, A, Fetch(2))
    wire.send(A, B, Fetch(3))
    sim.run()
    assert a.rounds == b.rounds == []
    wire.resume(B)
    sim.run()
    assert a.rounds == [2] and b.rounds == [1, 3]


def test_actors_take_turns_in_virtual_time():
    sim, story = Simulation(0), []
    inside: set[str] = set()

    def actor(name: str, pause: float) -> None:
        for _ in range(2):
            assert not inside
            inside.add(name)
            story.append((name, round(sim.now, 3)))
            inside.remove(name)
            sim.sleep(pause)

    sim.actor("slow", lambda: actor("slow", 1000.0))
    sim.actor("fast", lambda: actor("fast", 1.0))
    sim.run()
    assert story == [("slow", 0), ("fast", 0), ("fast", 1), ("slow", 1000)]


def test_who_waits_for_ever_is_named():
    sim = Simulation(7)
    sim.actor("Ada", lambda: sim.wait(lambda: False))
    sim.actor("Bob", lambda: sim.sleep(1.0))
    sim.actor("Cyd", lambda: sim.wait(lambda: False))
    before = threading.active_count()
    with pytest.raises(Deadlock, match=r"seed 7, 1\.000 s: .*: Ada, Cyd$"):
        sim.run()
    assert threading.active_count() == before
    sim.wait(lambda: True)
    with pytest.raises(RuntimeError, match="only an actor"):
        sim.wait(lambda: False)


def test_an_error_ends_the_run_and_every_process_in_it():
    sim, cleaned = Simulation(0), []

    def waits() -> None:
        try:
            sim.wait(lambda: False)
        finally:
            cleaned.append(True)
            sim.sleep(1.0)

    def fails() -> None:
        sim.sleep(1.0)
        raise ZeroDivisionError

    sim.actor("waits", waits)
    sim.actor("fails", fails)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        sim.run()
    assert cleaned == [True] and threading.active_count() == before
