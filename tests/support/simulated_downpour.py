"""Downpour on the simulated network."""

from collections.abc import Sequence

import torch
from simulation import ScriptedCluster, ScriptedWorker, same, total

from topotrain.core.client.client import StepOutcome


def downpour(
    cluster: ScriptedCluster,
    steps: int = 3,
    start: float = 5.0,
    scale: float = 1.0,
    pauses: Sequence[float] = (0.01,),
    outcomes: dict[tuple[int, int], StepOutcome] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A job of whole numbers times a scale; returns (the start less all gradients, what worker (0,0) got at the end).

    pauses: a worker computes for up to one of these seconds. outcomes: filled with those of each group's step.
    """
    pushed: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
    final: list[torch.Tensor] = []
    read: dict[tuple[int, int], list[torch.Tensor]] = {}

    def script(worker: ScriptedWorker) -> None:
        worker.open(start)
        for step in range(steps):
            moment = read.setdefault((worker.me.group, step), worker.values())
            assert same(moment, worker.values()), f"seed {cluster.sim.seed}: replicas of one group differ"
            gradient = worker.numbers(scale=scale)
            pushed.setdefault((worker.me.group, step), []).append(gradient)
            worker.sleep(0.0, cluster.random.choice(pauses))
            assert same(moment, worker.values()), f"seed {cluster.sim.seed}: parameters changed outside of a step"
            if worker.visible:
                mean = worker.backward(gradient)
                group = pushed[(worker.me.group, step)]
                assert len(group) == worker.client.channel.group_size, "a mean without everybody's gradient"
                assert same(mean, total(group)), f"seed {cluster.sim.seed}: a sum that is not the group's own"
            else:
                worker.push(gradient)
            outcome = worker.commit()
            if outcomes is not None:
                outcomes[worker.me.group, step] = outcome
        worker.finish()
        if worker.me == cluster.workers[0]:
            worker.client.values.fetch_final()
            final.extend(worker.values())

    cluster.play(script)
    everything = total([gradient for group in pushed.values() for gradient in group])
    return [start - part for part in everything], final
