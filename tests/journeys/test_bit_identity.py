"""Synchronous jobs through real processes: the same bits on every transport and run, and those of one process.

The reference is one process that uses the job's summation tree and the servers' kernels (`arrangement.reference`).
"""

import pytest
import torch
from in_process_job import Result, reference
from job_runner import JobRunner
from programs import bits

from topotrain.config.job import Cluster, Job

pytestmark = pytest.mark.journey

PAIRS = "nworkers_per_group: 4 nworkers_per_procs: 2 nservers_per_group: 2 nservers_per_procs: 2"
CLUSTER = Cluster(nworkers_per_group=4, nworkers_per_procs=2, nservers_per_group=2, nservers_per_procs=2)


def one_process() -> Result:
    _, _, loader = bits.build("momentum")
    batches = [batch for _ in range(bits.STEPS * bits.BATCH // bits.SAMPLES) for batch in loader]
    assert len(batches) == bits.STEPS

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        fresh, its_optimizer, _ = bits.build("momentum")
        return fresh, its_optimizer

    def script(trainer: object) -> None:
        for batch in batches:
            trainer.optimizer.zero_grad()
            trainer.backward(trainer.losses(lambda model, *share: model.loss(*share), *batch))
            trainer.optimizer.step()

    return reference(Job(cluster=CLUSTER), build, script)


def test_same_bits_as_one_process(runner: JobRunner) -> None:
    expected = one_process()
    for number, transport in enumerate(("kShm",)):
        final = runner.run(f"{PAIRS} transport: {transport}", "bits.py", "momentum", name=f"run{number}").final
        for name, value in expected.values.items():
            if name in final:  # a tied weight is saved once
                assert torch.equal(final[name], value), f"{name} differs over {transport}"
        assert len(final) >= len(dict(bits.Three().named_parameters()))


def test_one_worker_is_the_plain_script_bit_for_bit(runner: JobRunner) -> None:
    expected = one_process_fused()
    final = runner.run("", "bits.py", "momentum").final
    for name, value in final.items():
        assert torch.equal(value, expected[name]), name


def one_process_fused() -> dict[str, torch.Tensor]:
    """The plain loop with the kernel that topotrain picks where the script chose none."""
    model, optimizer, loader = bits.build("momentum")
    for group in optimizer.param_groups:
        group["fused"] = True
    for _ in range(bits.STEPS * bits.BATCH // bits.SAMPLES):
        for images, labels in loader:
            optimizer.zero_grad()
            model.loss(images, labels).backward()
            optimizer.step()
    return model.state_dict()
