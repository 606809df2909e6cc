"""Two copies of every server: a process dies at any moment, and nobody can tell afterwards (`replication`)."""

import pytest
import torch
from replicated import ReplicatedTown, flats_of
from simulation import Seat, job

STEPS = 3


def train(seat: Seat) -> None:
    seat.open(start=1.0)
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(100 * step + seat.me.index)
        gradient = [
            torch.randn(p.shape, generator=dice, dtype=getattr(torch, p.dtype)) * 0.3 for p in seat.town.map.parameters
        ]
        seat.step(gradient, hyper=HYPER if step == 0 else b"")
    seat.finish()
    town: ReplicatedTown = seat.town  # type: ignore[assignment]
    if seat.me.index == 0:
        seat.door.final_values()
        seat.door.final_buffers()
    lines = town.lifelines[seat.me]
    lines.leave()
    town.sim.wait(lambda: lines.left)
    seat.town.ends[seat.me] = [*seat.values(), *((o.version, o.norm) for o in seat.outcomes)]  # type: ignore[attr-defined]


HYPER = b""


def run(kill: tuple[int, int] | None = None, again: int = 0, loses: bool = False, servers: int = 2) -> ReplicatedTown:
    town = ReplicatedTown(
        job(workers=2, shards=servers, momentum=0.0) if False else job(workers=2, shards=servers), 1, kill, again
    )
    town.wire.loses = loses
    town.ends = {}  # type: ignore[attr-defined]
    return town.play(train)


def same(a: ReplicatedTown, b: ReplicatedTown) -> bool:
    values = all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    for me, ends in a.ends.items():  # type: ignore[attr-defined]
        other = b.ends[me]  # type: ignore[attr-defined]
        values = values and all(
            torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(ends, other, strict=True)
        )
    return values


def test_undisturbed_copies_are_equal() -> None:
    town = run()
    for index in range(2):
        first, second = town.copies(index)
        assert all(torch.equal(a, b) for a, b in zip(flats_of(first), flats_of(second), strict=True))
        assert first.version == second.version == STEPS


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_may_die_at_any_moment(process: int, loses: bool) -> None:
    calm = run()
    moments = calm.ticks[process]
    died = 0
    for moment in range(1, moments + 1):
        town = run((process, moment), loses=loses)
        died += town.deaths
        assert same(town, calm), (process, moment)
        assert town.speaking(0).version == STEPS, (process, moment)
        for index in range(2):
            copies = town.copies(index)
            assert len(copies) == 2
            assert all(torch.equal(a, b) for a, b in zip(*map(flats_of, copies), strict=True)), (process, moment)
    assert died == moments
