"""Downpour on the simulated network."""

import torch
from simulation import Seat, Town, same, total


def downpour(town: Town, steps: int = 3, start: float = 5.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A job of whole numbers; returns (what the servers must hold at the end, what worker (0,0) got)."""
    pushed: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
    final: list[torch.Tensor] = []
    read: dict[tuple[int, int], list[torch.Tensor]] = {}

    def script(seat: Seat) -> None:
        seat.open(start)
        for step in range(steps):
            moment = read.setdefault((seat.me.group, step), seat.values())
            assert same(moment, seat.values()), f"seed {town.sim.seed}: replicas of one group differ"
            gradient = seat.numbers()
            pushed.setdefault((seat.me.group, step), []).append(gradient)
            seat.sleep(0.0, 0.01)
            if seat.visible:
                mean = seat.backward(gradient)
                group = pushed[(seat.me.group, step)]
                assert len(group) == seat.client.channel.group_size, "a mean without everybody's gradient"
                assert same(mean, total(group)), f"seed {town.sim.seed}: a sum that is not the group's own"
            else:
                seat.push(gradient)
            seat.commit()
        seat.finish()
        if seat.me == town.workers[0]:
            seat.client.values.fetch_final()
            final.extend(seat.values())

    town.play(script)
    everything = total([gradient for group in pushed.values() for gradient in group])
    return [start - part for part in everything], final
