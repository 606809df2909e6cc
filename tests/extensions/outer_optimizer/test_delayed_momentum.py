"""Jobs with delayed Nesterov momentum outside, and what a snapshot's outer optimizer may be followed by."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process_job import mlp, run_local, vectors
from test_same_bits import OUTER, adamw, assert_same_bits, building, expected, job, script

from topotrain.config.job import ConfigError, Merge, UpdaterType
from topotrain.core.optim.adapter import describe_all
from topotrain.core.optim.delayed_nesterov import DelayedNesterov
from topotrain.extensions.checkpointing.shard_snapshot import check_same
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.tools.plan.layout_plan import state_entries
from topotrain.training.parameters.flat_parameters import describe_model


def delayed(delay: int, groups: int = 3, **cluster: Any) -> Any:
    made = job(groups, **cluster)
    outer = replace(OUTER["nesterov"][0], type=UpdaterType.kDelayedNesterov, delay=delay)
    return replace(made, cluster=replace(made.cluster, outer=outer))


def wanted(batches: Any, delay: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The example in plain PyTorch, with this optimizer outside."""
    monkeypatch.setitem(OUTER, "delayed", (None, lambda p: DelayedNesterov(p, lr=0.7, momentum=0.9, delay=delay)))
    return expected(batches, 3, 4, "delayed")


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_job_has_the_bits_of_plain_pytorch(delay: int, servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = vectors(3 * 21)
    found = run_local(delayed(delay, nservers_per_group=servers), building(mlp, adamw), script(batches, 3)).values
    assert_same_bits(found, wanted(batches, delay, monkeypatch))


def test_without_a_delay_it_is_the_job_of_nesterov() -> None:
    batches = vectors(3 * 13)
    found, plain = (run_local(each, building(mlp, adamw), script(batches, 3)).values for each in (delayed(1), job()))
    assert_same_bits(found, plain)


def test_fragments_count_for_themselves() -> None:
    """Of 8 exchanges each of 2 fragments has 4, and at the end one fragment has steps that are left."""
    batches, cluster = vectors(3 * 16), {"fragments": 2, "sync_freq": 4}
    one, many = (
        run_local(delayed(2, nservers_per_group=n, **cluster), building(mlp, adamw), script(batches, 3)) for n in (1, 3)
    )
    assert_same_bits(many.values, one.values)
    (server,) = one.servers
    steps = [value for unit in server.model.units for _, name, value in unit.update.state() if name == "step"]
    assert steps and {float(value) for value in steps} == {4.0}, "steps that are left are no step of the optimizer"


def test_with_a_quorum_every_arrival_counts() -> None:
    batches = vectors(3 * 16)
    found = run_local(delayed(3, quorum=1), building(mlp, adamw), script(batches, 3))
    (server,) = found.servers
    steps = {float(v) for unit in server.model.units for _, name, v in unit.update.state() if name == "step"}
    (made,), version = steps, server.state.version
    assert version - 3 <= made <= version, "what a group has left at its end is no step of the optimizer"
    assert all(bool(v.isfinite().all()) for v in found.values.values())


# --- snapshots -------------------------------------------------------------------------------------------------------


def goes_on(before: Any, now: Any) -> None:
    """Raise what a job raises that goes on from a snapshot of another one."""

    def described(made: Any) -> tuple[Any, str]:
        model = mlp()
        inner = InnerOptimizer(adamw(model.parameters()), made.cluster, model.named_parameters())
        parts = describe_model(model, (), inner.optimizers)
        return parts.parameters, replace(describe_all(inner.optimizers, parts.tensors), outer=True).to_text()

    old, text = described(before)
    parameters, now_text = described(now)
    check_same(parameters, now_text, SimpleNamespace(parameters=old, optimizer=text, number=7))  # type: ignore[arg-type]


def test_which_outer_optimizer_may_follow() -> None:
    goes_on(delayed(2), delayed(4))
    goes_on(job(), job(merge=Merge.kRadial))
    goes_on(job(merge=Merge.kRadial), job())
    with pytest.raises(ConfigError, match=r"resume = 'topotrain:DelayedNesterov': must be torch\.optim\.SGD"):
        goes_on(job(), delayed(2))


def test_the_plan_counts_its_state() -> None:
    assert [state_entries(delayed(delay).cluster.outer) for delay in (1, 2, 9)] == [1, 2, 2]
